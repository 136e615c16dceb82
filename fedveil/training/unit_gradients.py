"""Training by unit, such as by patient: a trainer whose examples are a site's units rather than its rows.

    step:  draw each of the U units with probability q = M / U, independently;   M: train.batch-size
           v_u = (1 / |R_u|) sum_i g_i,   R_u: all rows of unit u, or k = dp.unit-rows of them at random

The caller clips v_u just as it would clip a row's gradient, so each unit is clipped once per step, and "row" in the
accountant means "unit". k bounds work and skew. It does not change epsilon, because v_u is a function of one unit's
rows in any case.

Everything that depends on a number of examples uses U: the batches, the steps per participation, the number of examples
reported with an upload, and the examples that a policy counts. The number of rows in a unit affects only its gradient.

The rows' gradients are computed at most train.batch-size at a time and added to their unit's sum, so a unit may have
more rows than fit into memory at once.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from fedveil.config import RunConfig
from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import Sampling
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    Trainer,
    TrainingResult,
)
from fedveil.contract.trainer_wrappers import PerExampleTrainerWrapper
from fedveil.data.units import UnitRows
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream
from fedveil.training.per_example import count_steps, draw_batches

__all__ = ["UnitGradientSource", "UnitTrainer"]


@final
class UnitGradientSource(PerExampleGradientSource):
    """The gradients of a site's units. To the caller, each unit is one example.

    Args:
        rows: the source of the gradients of individual rows.
        units: the rows of each unit.
        config: train.* determines batches and steps; dp.unit-rows is k.
    """

    def __init__(self, rows: PerExampleGradientSource, units: UnitRows, config: RunConfig) -> None:
        self._rows, self._units, self._config = rows, units, config

    @property
    @override
    def num_examples(self) -> int:
        """Return U, the number of units."""
        return len(self._units)

    @property
    @override
    def batch_size(self) -> int:
        """Return M, the configured number of units per step."""
        return self._config.train.batch_size

    @property
    @override
    def steps(self) -> int:
        train = self._config.train
        return count_steps(len(self._units), train.batch_size, train.epochs, train.max_steps)

    @override
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        """Draw units, and the rows of each. Raises ConfigError unless the sampling is "poisson"."""
        if sampling != "poisson":
            raise ConfigError(f'sampling: dp.unit-column requires "poisson", found "{sampling}"; change it')
        drawn = draw_batches(sampling, len(self._units), self.batch_size, steps, rng, skip)
        chosen = rng.split("rows of units")
        return [BatchIndices(step.rows, tuple(self._choose_rows(unit, chosen) for unit in step.rows)) for step in drawn]

    def _choose_rows(self, unit: int, rng: RandomStream) -> tuple[int, ...]:
        rows, most = self._units[unit], self._config.dp.unit_rows
        return rows if len(rows) <= most else tuple(rows[i] for i in rng.choice(len(rows), most))

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Return the mean gradient and loss of each unit's drawn rows."""
        rows, owners = _rows_and_owners(batch)
        means, losses = dict[str, Tensor](), torch.zeros(0)
        for start in range(0, max(1, len(rows)), self.batch_size):
            part = slice(start, start + self.batch_size)
            of_rows = self._rows.per_sample(weights, BatchIndices(tuple(rows[part])))
            if not means:
                means = {name: g.new_zeros((len(batch.rows), *g.shape[1:])) for name, g in of_rows.gradients.items()}
                losses = of_rows.losses.new_zeros(len(batch.rows))
            owner = torch.tensor(owners[part], dtype=torch.long, device=losses.device)
            # Not a product with a 0-1 matrix, through which one non-finite row would contaminate every unit.
            for name, gradient in of_rows.gradients.items():
                means[name].index_add_(0, owner, gradient / _sizes(batch, owner, gradient))
            losses.index_add_(0, owner, of_rows.losses / _sizes(batch, owner, of_rows.losses))
        return PerExampleGradients(means, losses)

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """Return each unit's gradient as a sum of outer products, one for each drawn row, padded with zeros."""
        rows, owners = _rows_and_owners(batch)
        of_rows = self._rows.feature(weights, BatchIndices(tuple(rows)))
        owner = torch.tensor(owners, dtype=torch.long, device=of_rows.left.device)
        place = torch.tensor([i for of_unit in batch.members for i in range(len(of_unit))], device=owner.device).long()
        shape = (len(batch.rows), max(map(len, batch.members), default=0))
        left, right = (side.new_zeros((*shape, side.shape[1])) for side in (of_rows.left, of_rows.right))
        left[owner, place], right[owner, place] = of_rows.left / _sizes(batch, owner, of_rows.left), of_rows.right
        return PerExampleFeatureGradients(left, right, of_rows.pull)


def _rows_and_owners(batch: BatchIndices) -> tuple[list[int], list[int]]:
    """Return the drawn rows of all units of a batch, and for each row the position of its unit in the batch."""
    if len(batch.members) != len(batch.rows):
        raise ValueError(f"batch: it has {len(batch.rows)} units, but rows of {len(batch.members)}")
    pairs = [(row, place) for place, of_unit in enumerate(batch.members) for row in of_unit]
    return [row for row, _ in pairs], [place for _, place in pairs]


def _sizes(batch: BatchIndices, owner: Tensor, like: Tensor) -> Tensor:
    """Return |R_u| for the unit u of each row, in the shape that divides `like`."""
    sizes = torch.tensor([len(of_unit) for of_unit in batch.members], dtype=like.dtype, device=like.device)
    return sizes[owner.to(like.device)].reshape(-1, *(1 for _ in like.shape[1:]))


@final
class UnitTrainer(PerExampleTrainerWrapper):
    """A trainer whose examples are units. It offers only their gradients, because other training is by rows.

    Args:
        trainer: trains on the rows.
        units, config: see UnitGradientSource.
    """

    def __init__(self, trainer: Trainer, units: UnitRows, config: RunConfig) -> None:
        super().__init__(trainer.spec, UnitGradientSource(trainer.rows, units, config))

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Raise ConfigError, because plain training does not support units."""
        raise _by_rows()

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        """Raise ConfigError, as `train` does."""
        raise _by_rows()


def _by_rows() -> ConfigError:
    return ConfigError(
        "dp.unit-column: this method trains on rows, not on units; leave dp.unit-column out, or choose a method "
        "that takes noisy steps on units"
    )
