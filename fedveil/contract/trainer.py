"""The client's side of the contract: its rows and its model, as a method sees them.

`Trainer` trains as the run config says. `RowGradients` gives the gradient of each row, so that a method or a privacy
mechanism can make its own steps. A wrapper implements the one of the two interfaces that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from fedveil.contract.budget import Sampling
from fedveil.contract.spec import Spec, Weights
from fedveil.rng import Stream

# A term that a method adds to the loss of every step: it maps the current trained tensors to a scalar with a gradient.
Penalty = Callable[[Weights], Tensor]
# Booleans that broadcast over tensors of the spec, True where an entry stays; of several such sets, step k has k mod n.
Frozen = Weights | Sequence[Weights]


@dataclass(frozen=True)
class Looked:
    """The rows that a training made its steps from.

    Attributes:
        rows: different ones, as indices into the client's rows.
        least: rows of the smallest step; 0 without a step.
    """

    rows: frozenset[int] = frozenset()
    least: int = 0

    @classmethod
    def of(cls, steps: Iterable[Sequence[int]]) -> Looked:
        """Of the rows of each step."""
        taken = list(steps)
        return cls(frozenset(row for step in taken for row in step), min(map(len, taken), default=0))


@dataclass(frozen=True)
class Trained:
    """The result of local training: new weights (or a gradient) under the spec's names, and figures to report.

    `looked` stays at the site, whose policy may ask for a number of rows; a trainer that leaves it out has none.
    """

    weights: Weights
    report: Mapping[str, float]
    looked: Looked = Looked()


@dataclass(frozen=True)
class Batch:
    """Rows of one step, as indices into the client's rows; empty if Poisson sampling drew none."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class PerSample:
    """Gradient and loss of each row of a batch. They must not leave the site without clipping and noise.

    Attributes:
        gradients: (rows, *shape) by the spec's names: the gradient of each row's own loss; none of a fixed tensor.
        losses: (rows,).
    """

    gradients: Mapping[str, Float[Tensor, "rows ..."]]
    losses: Float[Tensor, " rows"]


@dataclass(frozen=True)
class FeatureGradients:
    """Gradients of each row in features that depend on the weights alone, such as the texts of all classes.

    Attributes:
        left, right: the gradient of row i's own loss in the features (n x m) is left_i right_i^T.
        pull: maps a gradient in the features (n x m) to one in the weights, by the spec's names; it uses no row.
    """

    left: Float[Tensor, "rows n"]
    right: Float[Tensor, "rows m"]
    pull: Callable[[Tensor], Weights]


def turns(frozen: Frozen | None) -> Sequence[Weights]:
    """The sets that take turns, at least one. Raises ValueError for none at all."""
    sets = [frozen or {}] if frozen is None or isinstance(frozen, Mapping) else list(frozen)
    if not sets:
        raise ValueError("frozen: expected at least one set of tensors to take turns, found none")
    return sets


class RowGradients(Protocol):
    """Gradients of single rows, for a caller that makes its own steps. Only the number of steps is reported."""

    @property
    def num_examples(self) -> int:
        """Training examples of this client, at least 1."""
        ...

    @property
    def batch_size(self) -> int:
        """train.batch-size, the configured rows of a step. Noisy sums are divided by it, whatever was drawn."""
        ...

    @property
    def steps(self) -> int:
        """Steps of a participation: train.epochs passes of whole batches, at most train.max-steps if that is set."""
        ...

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        """The rows of `steps` steps, drawn from `rng`; the same stream and arguments give the same rows.

        "poisson": every row is in every batch with probability batch_size / num_examples, independently. "fixed":
        batch_size distinct rows, each batch drawn anew. "disjoint": consecutive parts of a permutation, with a new
        permutation after every num_examples // batch_size batches; rows that do not fill a batch are left out. The
        first `skip` batches are drawn and dropped.

        Raises:
            ConfigError: a batch has more rows than the site.
        """
        ...

    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        """The gradient of every row's own loss at `weights` (every tensor of the spec), which are only read.

        Raises:
            TaskError: the task has no loss of a single row.
        """
        ...

    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """The same gradients in features that depend on `weights` alone; `pull` is one backward pass for all rows.

        Raises:
            TaskError: in this task, a row's loss depends on the weights in another way too.
        """
        ...


class Trainer(Protocol):
    """A client's data and model, as a method sees them."""

    @property
    def num_examples(self) -> int:
        """Training examples of this client, at least 1."""
        ...

    @property
    def spec(self) -> Spec:
        """What is trained: names, shapes and dtypes."""
        ...

    @property
    def rows(self) -> RowGradients:
        """The gradients of single rows, over the same data."""
        ...

    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        """Trains from `weights` (every tensor of the spec) for the configured local epochs; `weights` are only read.

        `frozen`: booleans that broadcast over tensors of the spec. Entries where they are True come back bit for bit;
        neither a step nor weight decay moves them. Several such sets, at least one, take turns, one a step.
        `penalty`: a term added to the mean loss of every step (once a step, whatever train.accumulate is). Reported
        losses do not contain it.
        """
        ...

    def gradient(self, weights: Weights) -> Trained:
        """The gradient of the mean loss of one batch at `weights` (every tensor of the spec), under the spec's names.

        The client's stream draws its train.batch-size rows anew for every exchange. `weights` are only read. The
        gradient lies where the trainer computes, wherever they lie.
        """
        ...


@runtime_checkable
class ScoresRows(Protocol):
    """A trainer that can score rows which it does not train on."""

    def mean_loss(self, weights: Weights, rows: Sequence[Any]) -> float:
        """Mean loss of the rows at `weights` (every tensor of the spec), which are only read."""
        ...
