"""A table that combines each method with each option for its training, its uploads or its sums.

The table comes from the code. For each cell, the checks that precede any contact with a site are run, followed by a
round with five tiny sites. If the code refuses a combination, the cell shows the code's own reason. A trainer without
data stands in for the sites: what composes is decided by checks, contracts and message formats, not by data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.method import Method
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.privacy import PrivacyGuarantee, Sampling
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    TrainingResult,
)
from fedveil.errors import ConfigError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.privacy.guarantee_source import check_guarantee
from fedveil.rng import RandomStream
from fedveil.training.per_example import draw_batches
from fedveil.wire.quantized import QuantizedCodec

SITES = ("a", "b", "c", "d", "e")
_ALWAYS = {"run.deterministic": True, "train.max-steps": 1, "train.batch-size": 2, "cohort.min-sites": 5}
_NOISY = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0}
_SECURE = {"secure.enabled": True, "secure.min-sites": 4, "secure.clip-bound": 4.0}
COLUMNS: Mapping[str, Mapping[str, object]] = {
    "`dp.*`": _NOISY,
    "`secure.enabled`": _SECURE,
    '`secure.noise = "sum"`': _SECURE | _NOISY | {"secure.noise": "sum"},
    '`server.optimizer = "fedadam"`': {"server.optimizer": "fedadam"},
    "`cohort.buffer-size`": {"cohort.buffer-size": 5},
    '`aggregate.rule = "median"`': {"aggregate.rule": "median"},
    '`aggregate.rule = "multi-krum"`': {"aggregate.rule": "multi-krum", "aggregate.num-byzantine": 1},
}
CODES = "uploads in codes"


@dataclass
class _Still:
    """A site whose examples all have a zero gradient."""

    spec: Spec
    num_examples: int = 4
    batch_size: int = 2
    steps: int = 1

    @property
    def rows(self) -> _Still:
        return self

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        return TrainingResult(dict(weights), {"steps": 1.0})

    def gradient(self, weights: Weights) -> TrainingResult:
        return TrainingResult({name: torch.zeros_like(w) for name, w in weights.items()}, {"steps": 1.0})

    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        return draw_batches(sampling, self.num_examples, self.batch_size, steps, rng, skip)

    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        rows = len(batch.rows)
        # Not zero, because a product of factors that did not move would look like a step that is sent unchanged.
        steps = {n: torch.full((rows, *w.shape), 0.01) for n, w in weights.items()}
        return PerExampleGradients(steps, torch.zeros(rows))

    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        rows = len(batch.rows)
        zero = PerExampleFeatureGradients(
            torch.zeros(rows, 1), torch.zeros(rows, 1), lambda g: {n: torch.zeros_like(w) for n, w in weights.items()}
        )
        return zero


@cache
def cell(name: str, column: str) -> str:
    """ "yes", or the code's reason for refusing. `column` is one of `COLUMNS`, or `CODES`."""
    method = strategies.create_method(name)
    if column == CODES:
        return _codes(name, method)
    changes = dict(COLUMNS[column])
    if isinstance(method, PrivacyGuarantee) and "secure.noise" in changes:  # the method's noise replaces dp.*'s
        changes = {key: value for key, value in changes.items() if not key.startswith("dp.")}
    return _tried(name, method, changes)


def _codes(name: str, method: Method) -> str:
    if _sends_codes(method):
        return "yes"
    if "upload_bits" not in type(method).__dataclass_fields__:
        return "no: it has no field for them"
    coded = strategies.create_method(name, "upload_bits = 4")
    if not _sends_codes(coded):
        raise AssertionError(f"{name}: upload_bits = 4 puts no codes on the wire")
    answer = _tried(name, coded, {})
    return "yes: `upload_bits`" if answer == "yes" else answer


def _sends_codes(method: Method) -> bool:
    layout = method.layout(method.adapter.example_spec())
    return any(isinstance(field.codec, QuantizedCodec) for field in layout.fields if field.direction == "up")


def _tried(name: str, method: Method, changes: Mapping[str, object]) -> str:
    """Run one round, after the checks that a server makes before it contacts a site."""
    spec = dict(method.adapter.example_spec())
    exchange, config = MessageExchange(method, name, spec), parse({**_ALWAYS, "method.name": name, **changes})
    stream = torch.Generator().manual_seed(1)
    weights = {n: 0.1 * torch.randn(t.shape, generator=stream) for n, t in spec.items()}
    try:
        check_guarantee(method, config, has_row_gradients=True)
        aggregation_rules.check_rule(exchange, config.aggregate)
        state = method.init(spec, weights, rng.initial_stream(0, "method init"))
        InProcessFederation(exchange, config, lambda site, ctx: _Still(spec), list(SITES), state).round(0)
    except ConfigError as error:
        return f"no: {_reason(str(error))}"
    return "yes"


def _reason(message: str) -> str:
    """Extract the reason from an error message: the text between "found" and the next step."""
    match = re.search(r"found (.*?)(?:; |$)", message, re.DOTALL)
    return match[1] if match else message
