"""What every task offers to the apps, the in-process runner and the benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.method import Local, Spec, Weights
from fedveil.rng import Stream

Examples = Sequence[Mapping[str, Any]]
Rows = Sequence[Any]  # examples as the task's model takes them


@dataclass(frozen=True)
class Share:
    """Which part of a data folder is one site's: partition `index` of `count`, as the run config says how to cut."""

    index: int
    count: int


@dataclass(frozen=True)
class Step:
    """How far a local training is.

    Attributes:
        step, steps: steps done, and planned.
        loss: mean over the last of them.
        tokens: read so far, padding apart; 0 where a task has none.
        seconds: since the first step began.
    """

    step: int
    steps: int
    loss: float
    tokens: int
    seconds: float


Watch = Callable[[Step], None]  # may raise, and so end the training


def unwatched(step: Step) -> None:
    """Nobody looks."""


class Task(ABC):
    """A base model with an adapter attached, and what to do with it.

    The base is loaded once, at the first need; tensors of the adapter go in and out by name. Nothing here is
    shared between two tasks, so two sites in one process do not meet.
    """

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """Names, shapes and dtypes of what is trained."""

    @abstractmethod
    def initial(self, rng: Stream) -> Weights:
        """Initial adapter weights, drawn from `rng` (LoRA: A random, B zero) or read from the base (all weights)."""

    @abstractmethod
    def examples(self, data: Path, split: str, share: Share | None = None) -> Examples:
        """Rows of one split ("train", "test") of a data folder or file; `share` cuts out one site's part.

        Raises:
            TaskError: the path, a split or a column is not there.
        """

    @abstractmethod
    def prepare(self, examples: Examples) -> Rows:
        """The examples as the model takes them, tokenised or decoded. Costs time: once for all rounds.

        Raises:
            TaskError: a row that cannot be read, by its column.
        """

    @abstractmethod
    def local(self, rows: Rows, rng: Stream, watch: Watch = unwatched) -> Local:
        """One client's training on prepared rows; `rng` orders the batches, `watch` sees how far it is.

        Raises:
            TaskError: no rows.
        """

    @abstractmethod
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Scores of the model with `weights`: always "loss", with `generate` the task's quality metrics too."""
