"""A client's own side of the contract: its rows and its model, as a method sees them.

`Trainer` trains as the run config says. `RowGradients` lets a method, or a privacy mechanism, make steps of its own on rows
that it can tell apart. What stands in front of one of them implements that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from fedveil.contract.budget import Sampling
from fedveil.contract.spec import Spec, Weights
from fedveil.rng import Stream

# A term that a method adds to the loss of every step: of the trained tensors as they are, a scalar with a gradient.
Penalty = Callable[[Weights], Tensor]


@dataclass(frozen=True)
class Trained:
    """What local training returns: new weights (or a gradient) under the spec's names, and figures to report."""

    weights: Weights
    report: Mapping[str, float]


@dataclass(frozen=True)
class Batch:
    """Rows of one step, as indices into the client's rows; none where Poisson sampling drew none."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class PerSample:
    """What each row of a batch says by itself, never to leave the site without clipping and noise.

    Attributes:
        gradients: (rows, *shape) by the spec's names: of each row's own loss.
        losses: (rows,).
    """

    gradients: Mapping[str, Float[Tensor, "rows ..."]]
    losses: Float[Tensor, " rows"]


@dataclass(frozen=True)
class FeatureGradients:
    """What each row of a batch says of the features that the weights alone make, such as the texts of all classes.

    Attributes:
        left, right: the gradient of row i's own loss in the features (n x m) is left_i right_i^T.
        pull: the gradient of the weights, by the spec's names, that one of the features makes; it looks at no row.
    """

    left: Float[Tensor, "rows n"]
    right: Float[Tensor, "rows m"]
    pull: Callable[[Tensor], Weights]


class RowGradients(Protocol):
    """Steps on rows apart. Nothing of them is reported beside the payload but their number."""

    @property
    def num_examples(self) -> int:
        """Training examples of this client, at least 1."""
        ...

    @property
    def batch_size(self) -> int:
        """train.batch-size: rows that a step is meant to have. Noisy sums are divided by it, whatever was drawn."""
        ...

    @property
    def steps(self) -> int:
        """Steps of a participation: train.epochs passes of whole batches, at most train.max-steps where that is set."""
        ...

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        """The rows of `steps` steps, drawn from `rng`; the same stream and arguments draw the same.

        "poisson": every row in every batch with probability batch_size / num_examples, independently. "fixed": batch_size
        distinct rows, each batch drawn anew. "disjoint": consecutive parts of a permutation, a new one after every
        num_examples // batch_size batches; rows that fill no batch are left out. The first `skip` batches are drawn and
        left away.

        Raises:
            ConfigError: a batch that is larger than the site.
        """
        ...

    def per_sample(self, weights: Weights, batch: Batch) -> PerSample:
        """The gradient of every row's own loss at `weights` (every tensor of the spec), which stay as they are.

        Raises:
            TaskError: a task that has no loss of a single row.
        """
        ...

    def feature(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """The same in the features that `weights` make without any row: one backward for all rows, by `pull`.

        Raises:
            TaskError: a task whose rows meet the weights in more than such features.
        """
        ...


class Trainer(Protocol):
    """A client's own data and model, as a method sees them."""

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
        """The same rows, for steps that tell them apart."""
        ...

    def train(self, weights: Weights, frozen: Weights | None = None, penalty: Penalty | None = None) -> Trained:
        """Trains from `weights` (every tensor of the spec) for the configured local epochs; `weights` stay as they are.

        `frozen`: booleans that broadcast over tensors of the spec. Where one is True the entry comes back bit for bit: no
        step moves it, and no weight decay.
        `penalty`: is added to the mean loss of every step (once a step, whatever train.accumulate is). Losses that are
        reported are without it.
        """
        ...

    def gradient(self, weights: Weights) -> Trained:
        """The gradient of the mean loss of one batch at `weights` (every tensor of the spec), under the spec's names.

        The batch is this exchange's: train.batch-size rows that the client's stream draws. `weights` stay as they are.
        """
        ...
