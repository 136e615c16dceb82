"""A model's losses on each test source, so that a table's intervals cover the test rows as well as the seeds.

The sources are drawn with replacement, with the same draws for every row of a table and every seed. All of them score
the same sources, so differences are paired by source and seed (`resampling`). A result file contains the losses, so
that anyone can repeat the bootstrap.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.attacks.membership.model_scores import target_loss
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Examples, Task
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import Numbers, ResampledMetric

_TEST = 9  # names the random draws
_CLOSE = 1e-3  # relative tolerance, because padding changes the last digits of sums of floats


@dataclass(frozen=True)
class SourceLosses:
    """A model's summed loss on each source.

    Attributes:
        nats: (sources,), the loss summed over the target tokens of a source's references.
        tokens: (sources,), the number of these tokens.
    """

    nats: Numbers
    tokens: Numbers

    @property
    def mean(self) -> float:
        """Return the mean loss per token, in nats."""
        return float(self.nats.sum() / self.tokens.sum())

    def agrees_with(self, loss: float) -> bool:
        """Return whether the mean equals the loss that the task computed on the same rows."""
        return abs(self.mean - loss) <= _CLOSE * abs(loss)

    def to_json(self) -> dict[str, str]:
        """Return both arrays as base64 of little-endian 32-bit floats."""
        return {"nats": _encode(self.nats), "tokens": _encode(self.tokens)}

    @classmethod
    def from_json(cls, found: Mapping[str, str]) -> SourceLosses:
        """Return the losses from the output of `to_json`."""
        return cls(_decode(found["nats"]), _decode(found["tokens"]))


def measure_losses(task: Task, weights: Weights, examples: Examples, column: str) -> SourceLosses:
    """Return a model's losses on `examples`, by the source in `column`, in order of first appearance."""
    nats, tokens = dict[str, float](), dict[str, float]()
    predictions = task.predict(weights, task.encode(examples))
    for example, prediction in zip(examples, predictions, strict=True):
        source, count = example.values[column], len(prediction.wanted)
        nats[source] = nats.get(source, 0.0) + count * target_loss(prediction)
        tokens[source] = tokens.get(source, 0.0) + count
    return SourceLosses(np.array([*nats.values()]), np.array([*tokens.values()]))


def resample_losses(values: Sequence[float], losses: Sequence[SourceLosses]) -> ResampledMetric:
    """Return the metric over all seeds, from each seed's value and its losses on the same sources.

    Raises:
        ValueError: the seeds' sources differ.
    """
    if any(not np.array_equal(each.tokens, losses[0].tokens) for each in losses):
        raise ValueError("source losses: expected the same sources in every seed, found others")
    drawn = resampling.draw_counts(len(losses[0].tokens), _TEST)
    seeds = []
    for value, each in zip(values, losses, strict=True):
        replicates = (drawn @ each.nats) / (drawn @ each.tokens)
        seeds.append(ResampledMetric(value, replicates + (value - each.mean), len(each.nats)))
    return resampling.over_seeds(seeds)


def in_result(losses: Sequence[SourceLosses]) -> dict[str, Any]:
    """Return the part that a result's row stores: each source's tokens, and each seed's losses."""
    return {"tokens": _encode(losses[0].tokens), "nats": [_encode(each.nats) for each in losses]}


def _encode(values: Numbers) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _decode(text: str) -> Numbers:
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)
