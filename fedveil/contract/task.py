"""The interface of a task, for the apps, the in-process runner and the benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from fedveil.config import TaskConfig
from fedveil.contract.adapter import Mount
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.row_counts import RowCounts
from fedveil.contract.trainer import Trainer
from fedveil.rng import RandomStream

__all__ = [
    "CanGenerate",
    "DatasetShard",
    "Example",
    "ExampleOrigin",
    "ExamplePrediction",
    "Examples",
    "Metrics",
    "PreparedData",
    "Rows",
    "Task",
    "TaskInfo",
    "TaskMetric",
    "TrainingProgress",
    "Watch",
    "class_metrics",
    "ignore_progress",
    "loss_metric",
]

Rows = Sequence[Any]  # examples in the form that the task's model takes


@dataclass(frozen=True)
class ExampleOrigin:
    """The file position from which an example was read.

    Attributes:
        file: its path, relative to the data folder given to the task.
        row: its number in that file, from 1; 0 if the file itself is the example, such as an image in a folder.
    """

    file: str
    row: int = 0

    def __str__(self) -> str:
        return f"row {self.row} of {self.file}" if self.row else self.file


@dataclass(frozen=True)
class Example:
    """One example of a data set, as read. Metadata outside the columns has separate fields.

    Attributes:
        values: all columns of the example, by name.
        origin: its file and row, for messages and the privacy ledger; None if it was not read from a
            file.
        folder: the base folder for relative paths in its columns.
        class_names: names of all classes that its data set declares, by number; empty if it declares none.
    """

    values: Mapping[str, Any]
    origin: ExampleOrigin | None = None
    folder: str = "."
    class_names: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Return the example's name for messages: its origin, or else its columns."""
        return str(self.origin) if self.origin else f"a row with {', '.join(self.values)}"

    @staticmethod
    def from_columns(rows: Iterable[Mapping[str, Any]]) -> list[Example]:
        """Return examples for rows that were not read from a file."""
        return [Example(row) for row in rows]


Examples = Sequence[Example]


@dataclass(frozen=True)
class DatasetShard:
    """One site's part of a data folder: partition `index` of `count`. The run config sets how the rows are divided."""

    index: int
    count: int


@dataclass(frozen=True)
class PreparedData:
    """A site's training data.

    Attributes:
        rows: the examples, in the form that the task's model takes.
        origins: origin of each example, in the same order; for the privacy ledger, which uses them only
            with a privacy guarantee.
        dropped: number of rows that were dropped because a text is missing or empty.
        cut: whether each of `rows` was truncated because it has too many tokens; None in a task that never truncates.
    """

    rows: Rows
    origins: Callable[[], Iterable[ExampleOrigin | None]]
    dropped: int = 0
    cut: Bool[np.ndarray, " rows"] | None = None

    @property
    def counts(self) -> RowCounts | None:
        """Return how many rows were truncated and dropped; None in a task that does neither."""
        if self.cut is None:
            return None
        return RowCounts(len(self.rows) + self.dropped, int(self.cut.sum()), self.dropped)


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of local training.

    Attributes:
        step, steps: number of completed steps, and number of planned steps.
        loss: mean loss over the latest steps.
        tokens: tokens read so far, without padding; 0 for a task without tokens.
        seconds: time since the first step began.
    """

    step: int
    steps: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ExamplePrediction:
    """A model's output for one example, on the CPU, fp32.

    Attributes:
        logits: (positions, classes) by slice. In "target" each position predicts one token of the target, including
            the end token; a classifier has one position. Some tasks add "image" (the positions of the image's tokens)
            and "generated" (each position predicts one token that the model generated).
        wanted: (positions,), the target's tokens or class, for the slice "target".
    """

    logits: Mapping[str, Tensor]
    wanted: Tensor


Watch = Callable[[TrainingProgress], None]  # receives the progress; an exception that it raises ends the training


def ignore_progress(step: TrainingProgress) -> None:
    """Ignore the step; the callback for training without progress reports."""


@dataclass(frozen=True)
class TaskMetric:
    """A score of a task's `evaluate`.

    Attributes:
        better: whether a lower or a higher value is better.
        generated: True if only evaluations that generate text have this score.
    """

    better: Literal["lower", "higher"]
    generated: bool = False


Metrics = Mapping[str, TaskMetric]


def loss_metric(task: TaskConfig, higher: Sequence[str] = ()) -> Metrics:
    """Return the loss metric and the metrics of generated text named in `higher`, for which higher is better."""
    return {"loss": TaskMetric("lower"), **{name: TaskMetric("higher", generated=True) for name in higher}}


def class_metrics(task: TaskConfig) -> Metrics:
    """Return the metrics of a classification task: loss and accuracy."""
    return {"loss": TaskMetric("lower"), "accuracy": TaskMetric("higher")}


@dataclass(frozen=True)
class TaskInfo:
    """A task's description, available before a model or an example is read. Each task module has one, `INFO`.

    Attributes:
        mounts: the mounts that its models offer to adapters.
        columns: returns the columns that the task reads from every example, given the run config's task section.
        tiny: folder of the task's own small model, for task.model = "tiny"; None if code builds that
            model, or if the folder is not installed.
        train_keys: task-dependent keys of the train section that this task supports: "loss-mask", "packing".
        chats: whether a chat template may format its examples (task.chat-template).
        drops: whether the task can drop rows without text (task.empty-texts).
        templates: whether a source may be formed from several columns (task.source-template).
        texts: the columns in which numbers are text for its model, so that they keep their form in the file.
        labels: whether an example may have any number of classes (task.multi-label).
        tags: whether its examples have word tags (task.tag-scheme).
        divisible: whether several processes, each with part of a batch, speed up its training.
        metrics: returns every score of its `evaluate` by name, given the run config's task section; always includes
            the loss.
    """

    mounts: tuple[Mount, ...]
    columns: Callable[[TaskConfig], tuple[str, ...]]
    tiny: Callable[[], Path | None]
    train_keys: tuple[str, ...] = ()
    chats: bool = False
    drops: bool = False
    templates: bool = False
    texts: Callable[[TaskConfig], tuple[str, ...]] = lambda _: ()
    labels: bool = False
    tags: bool = False
    divisible: bool = True
    metrics: Callable[[TaskConfig], Metrics] = loss_metric


class Task(ABC):
    """A base model with an adapter, with the code to train and evaluate it.

    The task loads its base once, on first use. It receives and returns the adapter's tensors by name. Tasks
    share no state, so two sites can run in one process.
    """

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """Return the names, shapes and dtypes of the trained tensors."""

    @property
    def accelerator(self) -> torch.device | None:
        """Return the device that the model runs on, or None for the CPU."""
        return None

    @abstractmethod
    def initial(self, rng: RandomStream) -> Weights:
        """Return initial adapter weights, drawn from `rng` (LoRA: A random, B zero) or read from the base."""

    @abstractmethod
    def examples(self, data: Path, split: str, share: DatasetShard | None = None) -> Examples:
        """Return the examples of one split ("train", "test") of a data folder or file; `share` selects one site's part.

        Raises:
            TaskError: the path, a split or a column is missing.
        """

    @abstractmethod
    def encode(self, examples: Examples) -> Rows:
        """Return the tokenized or decoded examples for the model. This is slow; call it once for all rounds.

        Raises:
            TaskError: an example cannot be read; the message names its column.
        """

    def prepare(
        self, data: Path, split: str, share: DatasetShard | None = None, shelf: Path | None = None
    ) -> PreparedData:
        """Return the encoded `examples`. `shelf` is a private folder where a task may cache them.

        Raises TaskError like `examples` and `encode`, and StateError if the folder cannot be written.
        """
        examples = self.examples(data, split, share)
        rows = self.encode(examples)
        return PreparedData(rows, lambda: (example.origin for example in examples), cut=self.find_cut(rows))

    def find_cut(self, rows: Rows) -> Bool[np.ndarray, " rows"] | None:
        """Return whether each prepared example was truncated; None, the default, in a task that never truncates."""
        return None

    def require_shared_classes(self) -> None:  # noqa: B027  # a task need not have classes
        """Check that all sites number the classes of the examples read so far in the same way as this task.

        Raises:
            TaskError: only this data set's own class names number the classes; the message names the key to set.
        """

    @abstractmethod
    def trainer(self, rows: Rows, rng: RandomStream, watch: Watch = ignore_progress, round_: int = 0) -> Trainer:
        """Return one client's trainer on prepared examples; `rng` orders the batches, `watch` receives the progress.

        `round_` is the run's round, 0-based; train.lr-schedule and train.warmup-ratio depend on it.

        Raises:
            TaskError: there are no examples.
        """

    @abstractmethod
    def evaluate(self, weights: Weights, examples: Examples, generate: bool) -> dict[str, float]:
        """Return scores of the model with `weights`: always "loss"; with `generate`, the task's quality metrics too."""

    def save(self, weights: Weights, folder: Path) -> None:  # noqa: B027  # a task need not have an export format
        """Write the model with `weights` to an existing folder, in the format that other programs load.

        Raises:
            TaskError: the weights do not match the spec.
        """

    def release(self) -> None:  # noqa: B027  # does nothing if a task holds nothing worth freeing
        """Free the last loaded weights, if that is worthwhile; the next use loads its own weights."""

    @abstractmethod
    def predict(self, weights: Weights, rows: Rows, generate: bool = False) -> Iterator[ExamplePrediction]:
        """Yield the output of the model with `weights` for each example, in order; `generate` adds "generated".

        The iterator works batch by batch, so the logits of all examples are never in memory at once.

        Raises:
            TaskError: the weights do not match the spec.
        """


@runtime_checkable
class CanGenerate(Protocol):
    """A task whose model generates text for a user's own prompts instead of a data set's examples."""

    def write(self, weights: Weights, prompts: Sequence[str], images: Sequence[tuple[str, bytes]]) -> list[str]:
        """Generate text with the model and `weights` for each prompt or each image, depending on the task.

        `images` are file names and bytes. Raises ConfigError for prompts or images that the task does not support.
        """
        ...
