"""What composes with what: every method under what changes its training, its uploads or its sums.

Made from the code: each cell is a round of five tiny sites that was run, after the checks that come before any site is
asked. What the code refuses stands there with the code's own reason. A trainer without data stands for the sites: what
composes is decided by checks, contracts and message formats, not by data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.budget import Claim, Sampling
from fedveil.contract.method import Method
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Batch, FeatureGradients, Frozen, Penalty, PerSample, Trained
from fedveil.errors import ConfigError
from fedveil.federation import rules
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.privacy.claims import checked_claim
from fedveil.rng import Stream
from fedveil.training.per_sample import draw
from fedveil.wire.codes import Codes

SITES = ("a", "b", "c", "d", "e")
_ALWAYS = {"run.deterministic": True, "train.max-steps": 1, "train.batch-size": 2, "cohort.min-sites": 5}
_NOISY = {"dp.clip": 1.0, "dp.noise": 1.0}
_SECURE = {"secure.enabled": True, "secure.min-sites": 4, "secure.bound": 4.0}
COLUMNS: Mapping[str, Mapping[str, object]] = {
    "`dp.*`": _NOISY,
    "`secure.enabled`": _SECURE,
    '`secure.noise = "sum"`': _SECURE | _NOISY | {"secure.noise": "sum"},
    '`aggregate.rule = "median"`': {"aggregate.rule": "median"},
    '`aggregate.rule = "multi-krum"`': {"aggregate.rule": "multi-krum", "aggregate.hostile": 1},
}
CODES = "uploads in codes"


@dataclass
class _Still:
    """A site whose rows all have the gradient 0."""

    spec: Spec
    num_examples: int = 4
    batch_size: int = 2
    steps: int = 1

    @property
    def rows(self) -> _Still:
        return self

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        return Trained(dict(weights), {"steps": 1.0})

    def gradient(self, weights: Weights) -> Trained:
        return Trained({name: torch.zeros_like(w) for name, w in weights.items()}, {"steps": 1.0})

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        return draw(sampling, self.num_examples, self.batch_size, steps, rng, skip)

    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        rows = len(batch.rows)
        return PerSample({n: torch.zeros(rows, *w.shape) for n, w in weights.items()}, torch.zeros(rows))

    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        rows = len(batch.rows)
        zero = FeatureGradients(
            torch.zeros(rows, 1), torch.zeros(rows, 1), lambda g: {n: torch.zeros_like(w) for n, w in weights.items()}
        )
        return zero


@cache
def cell(name: str, column: str) -> str:
    """ "yes", or the code's reason why not. `column` is one of `COLUMNS`, or `CODES`."""
    method = strategies.create(name)
    if column == CODES:
        return _codes(name, method)
    changes = dict(COLUMNS[column])
    if isinstance(method, Claim) and "secure.noise" in changes:  # its noise, instead of the noisy steps'
        changes = {key: value for key, value in changes.items() if not key.startswith("dp.")}
    return _tried(name, method, changes)


def _codes(name: str, method: Method) -> str:
    if _sends_codes(method):
        return "yes"
    if "upload_bits" not in type(method).__dataclass_fields__:
        return "no: it has no field for them"
    coded = strategies.create(name, "upload_bits = 4")
    if not _sends_codes(coded):
        raise AssertionError(f"{name}: upload_bits = 4 puts no codes on the wire")
    found = _tried(name, coded, {})
    return "yes: `upload_bits`" if found == "yes" else found


def _sends_codes(method: Method) -> bool:
    layout = method.layout(method.adapter.example_spec())
    return any(isinstance(field.codec, Codes) for field in layout.fields if field.direction == "up")


def _tried(name: str, method: Method, changes: Mapping[str, object]) -> str:
    """One round, after what a server checks before it asks a site."""
    spec = dict(method.adapter.example_spec())
    exchange, config = Exchange(method, name, spec), parse({**_ALWAYS, "method.name": name, **changes})
    stream = torch.Generator().manual_seed(1)
    weights = {n: 0.1 * torch.randn(t.shape, generator=stream) for n, t in spec.items()}
    try:
        checked_claim(method, config, has_row_gradients=True)
        rules.check(exchange, config.aggregate)
        state = method.init(spec, weights, rng.initial(0, "method init"))
        Federation(exchange, config, lambda site, ctx: _Still(spec), list(SITES), state).round(0)
    except ConfigError as error:
        return f"no: {_reason(str(error))}"
    return "yes"


def _reason(message: str) -> str:
    """What was found, in the words of an error: it stands between "found" and the next step."""
    found = re.search(r"found (.*?)(?:; |$)", message, re.DOTALL)
    return found[1] if found else message
