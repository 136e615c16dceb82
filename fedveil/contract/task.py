"""The interface of a task, for the apps, the in-process runner and the benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedveil.config import TaskConfig
from fedveil.contract.adapter import Mount
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream

Rows = Sequence[Any]  # examples as the task's model takes them


@dataclass(frozen=True)
class Origin:
    """Where a row was read.

    Attributes:
        file: its path, below the data folder as the task was given it.
        row: its number in that file, from 1; 0 where the file is the row, as an image in a folder is.
    """

    file: str
    row: int = 0

    def __str__(self) -> str:
        return f"row {self.row} of {self.file}" if self.row else self.file


@dataclass(frozen=True)
class Example:
    """One row of a data set, as it was read. What is known of it beside its columns has fields of its own.

    Attributes:
        values: its columns by name, all of them.
        origin: its file and row, for messages and for the privacy ledger; None where it was not read from a file.
        folder: where relative paths in its columns begin.
        class_names: of all classes of its data set, by number; empty where the data set names none.
    """

    values: Mapping[str, Any]
    origin: Origin | None = None
    folder: str = "."
    class_names: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """How a message names it: by its origin, else by its columns."""
        return str(self.origin) if self.origin else f"a row with {', '.join(self.values)}"

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> list[Example]:
        """Examples of rows that were not read from a file."""
        return [Example(row) for row in rows]


Examples = Sequence[Example]


@dataclass(frozen=True)
class Share:
    """One site's part of a data folder: partition `index` of `count`. The run config says how the rows are divided."""

    index: int
    count: int


@dataclass(frozen=True)
class Prepared:
    """What a site trains on.

    Attributes:
        rows: as the task's model takes them.
        origins: where each example behind them was read, in their order; for the privacy ledger, which asks only where
            a claim is made.
    """

    rows: Rows
    origins: Callable[[], Iterable[Origin | None]]


@dataclass(frozen=True)
class Step:
    """The progress of a local training.

    Attributes:
        step, steps: steps done, and steps planned.
        loss: mean over the latest steps.
        tokens: read so far, without padding; 0 for a task without tokens.
        seconds: since the first step began.
    """

    step: int
    steps: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """A model's output for one row, on the CPU, fp32.

    Attributes:
        logits: (positions, classes) by slice. In "target" each position predicts one token of the row's target, with
            the end token; a classifier has one position. Some tasks add "image" (the positions of the image's tokens)
            and "generated" (each position predicts one token that the model generated).
        wanted: (positions,) the target's tokens or class, for the slice "target".
    """

    logits: Mapping[str, Tensor]
    wanted: Tensor


Watch = Callable[[Step], None]  # gets the progress; an exception that it raises ends the training


def unwatched(step: Step) -> None:
    """Ignores the step: for a training that nobody follows."""


@dataclass(frozen=True)
class Metric:
    """A score of a task's `evaluate`.

    Attributes:
        better: which way a better model's value lies.
        generated: only evaluations that generate have it.
    """

    better: Literal["lower", "higher"]
    generated: bool = False


Metrics = Mapping[str, Metric]


def of_loss(task: TaskConfig, higher: Sequence[str] = ()) -> Metrics:
    """The loss, and scores of generated texts, of which higher is better."""
    return {"loss": Metric("lower"), **{name: Metric("higher", generated=True) for name in higher}}


def of_classes(task: TaskConfig) -> Metrics:
    """Those of a task that tells classes apart."""
    return {"loss": Metric("lower"), "accuracy": Metric("higher")}


@dataclass(frozen=True)
class TaskInfo:
    """What a task says of itself before a model or a row is read. The module of each task has one, `INFO`.

    Attributes:
        mounts: what its models offer to adapters.
        columns: the columns that it reads of every row, under that section of the run config.
        tiny: where its own small model lies, for task.model = "tiny"; None where it makes one in code, or where the
            folder is not installed.
        train_keys: of the train section, the keys that only some tasks have and this one has: "loss-on", "packing".
        chats: whether its rows may stand in the words of a chat template (task.chat-template).
        divisible: whether more processes make its training faster, each with a part of a batch's rows.
        metrics: every score of its `evaluate` by name, under that section of the run config; the loss always.
    """

    mounts: tuple[Mount, ...]
    columns: Callable[[TaskConfig], tuple[str, ...]]
    tiny: Callable[[], Path | None]
    train_keys: tuple[str, ...] = ()
    chats: bool = False
    divisible: bool = True
    metrics: Callable[[TaskConfig], Metrics] = of_loss


class Task(ABC):
    """A base model with an adapter, and how it is trained and evaluated.

    The task loads its base once, when it first needs it. It takes and gives the adapter's tensors by name. Two tasks
    share nothing, so two sites can run in one process.
    """

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """Names, shapes and dtypes of what is trained."""

    @property
    def accelerator(self) -> torch.device | None:
        """The device other than the CPU that its model computes on, if there is one."""
        return None

    @abstractmethod
    def initial(self, rng: Stream) -> Weights:
        """Initial adapter weights, drawn from `rng` (LoRA: A random, B zero) or read from the base (all weights)."""

    @abstractmethod
    def examples(self, data: Path, split: str, share: Share | None = None) -> Examples:
        """Rows of one split ("train", "test") of a data folder or file; `share` selects one site's part.

        Raises:
            TaskError: the path, a split or a column is missing.
        """

    @abstractmethod
    def encode(self, examples: Examples) -> Rows:
        """The examples as the model takes them, tokenised or decoded. Costs time: once for all rounds.

        Raises:
            TaskError: a row cannot be read; the message names its column.
        """

    def prepare(self, data: Path, split: str, share: Share | None = None, shelf: Path | None = None) -> Prepared:
        """The rows of `examples`, encoded. `shelf` is a private folder in which a task may keep them for another time.

        Raises TaskError as `examples` and `encode`, StateError where the folder cannot be written.
        """
        found = self.examples(data, split, share)
        return Prepared(self.encode(found), lambda: (example.origin for example in found))

    @abstractmethod
    def trainer(self, rows: Rows, rng: Stream, watch: Watch = unwatched, round_: int = 0) -> Trainer:
        """One client's training on prepared rows; `rng` orders the batches, `watch` gets the progress.

        `round_` is the run's, 0-based, from which train.schedule and train.warmup follow.

        Raises:
            TaskError: there are no rows.
        """

    @abstractmethod
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Scores of the model with `weights`: always "loss"; with `generate` also the task's quality metrics."""

    def save(self, weights: Weights, folder: Path) -> None:  # noqa: B027  # a task need not have a form for others
        """Writes the model with `weights` to a folder, which is there, in the form that other programs load.

        Raises:
            TaskError: the weights are not those of the spec.
        """

    def release(self) -> None:  # noqa: B027  # nothing, where a task holds nothing worth freeing
        """Frees the weights that were put in last, as far as that is worth it; the next use puts in its own."""

    @abstractmethod
    def predict(self, weights: Weights, rows: Rows, generate: bool = False) -> Iterator[Prediction]:
        """The output of the model with `weights` for each row, in order; `generate` adds the slice "generated".

        The iterator works batch by batch, so the logits of all rows are never in memory at once.

        Raises:
            TaskError: the weights are not those of the spec.
        """


@runtime_checkable
class Writes(Protocol):
    """A task whose model writes texts, about what somebody asks and not about a data set's rows."""

    def write(self, weights: Weights, prompts: Sequence[str], images: Sequence[tuple[str, bytes]]) -> list[str]:
        """What the model with `weights` writes: one text a prompt, or one an image, as the task has it.

        `images` are files' names and bytes. Raises ConfigError for prompts or images that the task does not take.
        """
        ...
