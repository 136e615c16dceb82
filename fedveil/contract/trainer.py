"""The client's side of the contract: its examples and its model, as a method sees them.

`Trainer` trains as the run config specifies. `PerExampleGradientSource` gives per-example gradients, so that a method
or a privacy mechanism can take its own steps. A wrapper implements the interface that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.privacy import Sampling
from fedveil.rng import RandomStream

__all__ = [
    "BatchIndices",
    "ExamplesUsed",
    "Frozen",
    "Penalty",
    "PerExampleFeatureGradients",
    "PerExampleGradientSource",
    "PerExampleGradients",
    "ScoresExamples",
    "Trainer",
    "TrainingResult",
    "alternating_sets",
]

# A term that a method adds to the loss of every step: it maps the current trained tensors to a scalar with a gradient.
Penalty = Callable[[Weights], Tensor]
# Booleans that broadcast over tensors of the spec, True where an entry is frozen; step k uses set k mod n of n sets.
Frozen = Weights | Sequence[Weights]


@dataclass(frozen=True)
class ExamplesUsed:
    """The examples used in the steps of local training.

    Attributes:
        rows: distinct examples, as indices into the client's examples.
        min_batch: number of examples in the smallest step; 0 without a step.
    """

    rows: frozenset[int] = frozenset()
    min_batch: int = 0

    @classmethod
    def from_steps(cls, steps: Iterable[Sequence[int]]) -> ExamplesUsed:
        """Create the record from the example indices of each step."""
        taken = list(steps)
        return cls(frozenset(row for step in taken for row in step), min(map(len, taken), default=0))


@dataclass(frozen=True)
class TrainingResult:
    """The result of local training: new weights (or a gradient) under the spec's names, and metrics to report.

    `looked` stays at the site, whose policy may set a minimum number of examples; if missing, no examples count.
    """

    weights: Weights
    report: Mapping[str, float]
    looked: ExamplesUsed = ExamplesUsed()


@dataclass(frozen=True)
class BatchIndices:
    """Examples in one step, as indices into the client's examples; empty if Poisson sampling drew none.

    Attributes:
        rows: the examples, or the units under dp.unit-column.
        members: the drawn rows of each of these units under dp.unit-column; otherwise empty.
    """

    rows: tuple[int, ...]
    members: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PerExampleGradients:
    """Gradient and loss of each example in a batch. They must not leave the site without clipping and noise.

    Attributes:
        gradients: (rows, *shape) by the spec's names: the gradient of each example's own loss; none for fixed tensors.
        losses: (rows,).
    """

    gradients: Mapping[str, Float[Tensor, "rows ..."]]
    losses: Float[Tensor, " rows"]


@dataclass(frozen=True)
class PerExampleFeatureGradients:
    """Per-example gradients with respect to features that depend only on the weights, such as all class texts.

    Attributes:
        left, right: the gradient of example i's own loss with respect to the features (n x m) is left_i right_i^T.
            Under dp.unit-column it is the sum of left_ij right_ij^T over the parts j, and both have a dimension for j.
        pull: maps a gradient in the features (n x m) to a gradient in the weights, by the spec's names, without using
            any example.
    """

    left: Float[Tensor, "rows *parts n"]
    right: Float[Tensor, "rows *parts m"]
    pull: Callable[[Tensor], Weights]


def alternating_sets(frozen: Frozen | None) -> Sequence[Weights]:
    """Return the sets that the steps use in turn. Raises ValueError if there are none."""
    sets = [frozen or {}] if frozen is None or isinstance(frozen, Mapping) else list(frozen)
    if not sets:
        raise ValueError("frozen: at least one set of tensors must take turns")
    return sets


class PerExampleGradientSource(Protocol):
    """Per-example gradients, for a caller that takes its own steps. Only the number of steps is reported."""

    @property
    def num_examples(self) -> int:
        """Return the number of this client's training examples, at least 1."""
        ...

    @property
    def batch_size(self) -> int:
        """Return train.batch-size, the configured examples per step. Noisy sums are divided by it, not by the draw."""
        ...

    @property
    def steps(self) -> int:
        """Return the steps per participation: train.epochs passes over full batches, at most train.max-steps if set."""
        ...

    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        """Draw the examples of `steps` steps from `rng`; the same stream and arguments give the same examples.

        "poisson": every example is in every batch with probability batch_size / num_examples, independently.
        "fixed": batch_size distinct examples, each batch drawn independently. "disjoint": consecutive parts of a
        permutation, with a new permutation after every num_examples // batch_size batches; examples that do not
        fill a batch are left out. The first `skip` batches are drawn and discarded.

        Raises:
            ConfigError: a batch has more examples than the site has.
        """
        ...

    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Return the gradient of every example's own loss at `weights` (every tensor of the spec), which are only read.

        Raises:
            TaskError: the task has no per-example loss.
        """
        ...

    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """Return gradients with respect to features that depend only on `weights`; `pull` takes one backward pass.

        Raises:
            TaskError: in this task, an example's loss depends on the weights not only through these features.
        """
        ...


class Trainer(Protocol):
    """A client's data and model, as a method sees them."""

    @property
    def num_examples(self) -> int:
        """Return the number of this client's training examples, at least 1."""
        ...

    @property
    def spec(self) -> Spec:
        """Return the trained tensors: names, shapes and dtypes."""
        ...

    @property
    def rows(self) -> PerExampleGradientSource:
        """Return the per-example gradients over the same data."""
        ...

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Train from `weights` (every tensor of the spec) for the configured local epochs; `weights` are only read.

        `frozen`: boolean masks that broadcast over the spec's tensors. Entries where they are True are returned bit for
        bit; neither a step nor weight decay moves them. With several such sets (at least one), the steps use
        them in turn, one set per step.
        `penalty`: a term added to the mean loss of every step (once per step, regardless of
        train.gradient-accumulation-steps). Reported losses do not include it.
        """
        ...

    def gradient(self, weights: Weights) -> TrainingResult:
        """Return the gradient of one batch's mean loss at `weights` (every tensor of the spec), under the spec's names.

        The client's stream draws train.batch-size new examples for every exchange. `weights` are only read. The
        gradient is on the trainer's device, regardless of the weights' device.
        """
        ...


@runtime_checkable
class ScoresExamples(Protocol):
    """A trainer that can score examples that it does not train on."""

    def mean_loss(self, weights: Weights, rows: Sequence[Any]) -> float:
        """Return the mean loss of the examples at `weights` (every tensor of the spec), which are only read."""
        ...
