"""What every task offers to the apps, the in-process runner and the benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.config import TaskConfig
from fedveil.contract.adapter import Mount
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream

Rows = Sequence[Any]  # examples as the task's model takes them


@dataclass(frozen=True)
class Example:
    """One row of a data set, as it was read. What is known of it beside its columns has fields of its own.

    Attributes:
        values: its columns by name, all of them.
        origin: the row and its file, for messages; "" where it was not read from a file.
        folder: where relative paths in its columns begin.
        class_names: of all classes of its data set, by number; empty where the data set names none.
    """

    values: Mapping[str, Any]
    origin: str = ""
    folder: str = "."
    class_names: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """How a message names it: by its origin, else by its columns."""
        return self.origin or f"a row with {', '.join(self.values)}"

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> list[Example]:
        """Examples of rows that were not read from a file."""
        return [Example(row) for row in rows]


Examples = Sequence[Example]


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


@dataclass(frozen=True)
class Prediction:
    """What a model says about one row, on the CPU, fp32.

    Attributes:
        logits: (positions, classes) by slice: "target" (each position predicts one token of the row's own target, its
            end among them; a classifier has one position), and where the task has them "image" (the positions of the
            image's own tokens) and "generated" (each position predicts one token that the model wrote by itself).
        wanted: (positions,) the target's tokens or class, for the slice "target".
    """

    logits: Mapping[str, Tensor]
    wanted: Tensor


Watch = Callable[[Step], None]  # may raise, and so end the training


def unwatched(step: Step) -> None:
    """Ignores the step: for a training that nobody follows."""


@dataclass(frozen=True)
class TaskInfo:
    """What a task says of itself before a model or a row is read. The module of each task has one, `INFO`.

    Attributes:
        mounts: what its models offer to adapters.
        columns: the columns that it reads of every row, under that section of the run config.
        tiny: where its own small model lies, for task.model = "tiny"; None where it makes one in code, or where the
            folder is not installed.
    """

    mounts: tuple[Mount, ...]
    columns: Callable[[TaskConfig], tuple[str, ...]]
    tiny: Callable[[], Path | None]


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
    def encode(self, examples: Examples) -> Rows:
        """The examples as the model takes them, tokenised or decoded. Costs time: once for all rounds.

        Raises:
            TaskError: a row that cannot be read, by its column.
        """

    @abstractmethod
    def trainer(self, rows: Rows, rng: Stream, watch: Watch = unwatched) -> Trainer:
        """One client's training on prepared rows; `rng` orders the batches, `watch` sees how far it is.

        Raises:
            TaskError: no rows.
        """

    @abstractmethod
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Scores of the model with `weights`: always "loss", with `generate` the task's quality metrics too."""

    @abstractmethod
    def predict(self, weights: Weights, rows: Rows, generate: bool = False) -> Iterator[Prediction]:
        """What the model with `weights` says about each row, in their order; `generate` adds the slice "generated".

        A batch at a time, so that the logits of many rows are never held at once.

        Raises:
            TaskError: weights that are not the spec's.
        """
