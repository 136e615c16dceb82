"""Per-example gradients that charge the ledger before each use of examples, and a trainer that offers only such
gradients."""

from __future__ import annotations

from typing import final

from typing_extensions import override

from fedveil.contract.param_spec import Weights
from fedveil.contract.privacy import Adjacency, PrivacyGuarantee, Sampling, SamplingPlan
from fedveil.contract.trainer import (
    BatchIndices,
    Frozen,
    Penalty,
    PerExampleFeatureGradients,
    PerExampleGradients,
    PerExampleGradientSource,
    TrainingResult,
)
from fedveil.contract.trainer_wrappers import PerExampleTrainerWrapper, WrappedGradientSource
from fedveil.errors import BudgetError
from fedveil.privacy.ledger import RunCharger
from fedveil.privacy.own_share import WITHOUT_ROSTER, OwnShareGuarantee
from fedveil.rng import RandomStream


@final
class ChargedGradientSource(WrappedGradientSource):
    """A gradient source that charges the ledger when batches are drawn. Each drawn batch can be used once.

    Args:
        rows: the site's per-example gradients.
        claim: the guarantee that determines the cost of a use.
        charger: charges the run to the site's ledger.
    """

    def __init__(self, rows: PerExampleGradientSource, claim: PrivacyGuarantee, charger: RunCharger) -> None:
        super().__init__(rows)
        self._claim, self._charger = claim, charger
        self._paid: list[BatchIndices] = []

    @override
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        """Charge the ledger, then draw batches. Raises BudgetError before any example is used."""
        own = self._charger.own
        if sampling == "fixed" and own.neighbours is Adjacency.ZERO_OUT:
            raise BudgetError(
                'sampling: no epsilon is known for "fixed" under this site\'s own adjacency, '
                f'{own.neighbours.value}; use "poisson" or "disjoint", or agree on another adjacency with the site'
            )
        neighbours = self._claim.budget.neighbours
        plan = SamplingPlan(1, max(steps, 1), self.batch_size, self.num_examples, neighbours)
        try:
            self._charger.charge(self._claim.privacy_spent(plan))
        except BudgetError as error:
            if isinstance(self._claim, OwnShareGuarantee):
                raise BudgetError(f"{error}. Note that {WITHOUT_ROSTER}") from None
            raise
        drawn = super().batches(sampling, steps, rng, skip)
        if len(drawn) > max(steps, 1):
            raise BudgetError(
                f"batches: {len(drawn)} batches were drawn, but only {steps} were charged; report this as a bug"
            )
        self._paid += drawn
        return drawn

    @override
    def per_sample(self, weights: Weights, batch: BatchIndices) -> PerExampleGradients:
        """Compute per-example gradients. Raises BudgetError for a batch that was not drawn here or was used before."""
        self._use(batch)
        return super().per_sample(weights, batch)

    @override
    def feature(self, weights: Weights, batch: BatchIndices) -> PerExampleFeatureGradients:
        """Compute feature gradients. Raises BudgetError like `per_sample`."""
        self._use(batch)
        return super().feature(weights, batch)

    def _use(self, batch: BatchIndices) -> None:
        if not any(batch is paid for paid in self._paid):
            raise BudgetError("batch: this batch was not drawn here, or was used before; draw a new one")
        self._paid = [paid for paid in self._paid if paid is not batch]


@final
class GradientsOnlyTrainer(PerExampleTrainerWrapper):
    """A trainer that offers only per-example gradients, because no accountant covers plain training."""

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        """Raise BudgetError."""
        raise BudgetError("train: a privacy ledger allows only noisy steps, not plain training")

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        """Raise BudgetError."""
        raise BudgetError("gradient: a privacy ledger allows only noisy steps, not a plain gradient")
