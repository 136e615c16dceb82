"""Choose the test examples to score in an evaluation: at most evaluate.eval-examples, drawn from run.seed.

The examples are divided, in order, into as many equal parts as there are examples to score, and one is drawn from each
part. So even a file that is sorted by class is scored on all its classes. Every round and every resumed run scores the
same examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from fedveil import rng
from fedveil.config import RunConfig

_Example = TypeVar("_Example")


def draw_scored(examples: Sequence[_Example], config: RunConfig) -> Sequence[_Example]:
    """Return the examples to score, in their order; all if there are no more than evaluate.eval-examples."""
    count = config.evaluate.eval_examples
    return [examples[i] for i in draw_spread(len(examples), count, config)] if len(examples) > count else examples


def draw_spread(total: int, count: int, config: RunConfig, purpose: str = "scored examples") -> list[int]:
    """Return `count` of `total` positions, in order: one from each of `count` equal parts."""
    stream = rng.initial_stream(config.run.seed, purpose)
    bounds = [total * i // count for i in range(count + 1)]
    return [low + stream.choice(high - low, 1)[0] for low, high in itertools.pairwise(bounds)]
