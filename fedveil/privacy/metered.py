"""A client's Local whose every look at the rows is in the ledger first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from fedveil.contract.budget import Budget, Plan, Sampling
from fedveil.contract.method import Method
from fedveil.contract.spec import Weights
from fedveil.contract.trainer import Around, Batch, FeatureGradients, Local, PerSample, Trained
from fedveil.errors import BudgetError
from fedveil.privacy.ledger import Ledger
from fedveil.rng import Stream


@final
class Accounted(Around):
    """Charges the batches when they are drawn; a batch may be looked at once, and nothing but batches may be.

    Attributes:
        records: the ledger's names of the rows, in the rows' order.
    """

    def __init__(self, local: Local, method: Method, ledger: Ledger, budget: Budget, records: Sequence[str]) -> None:
        if len(records) != local.num_examples:
            raise ValueError(f"records: expected {local.num_examples} names, one a row, found {len(records)}")
        super().__init__(local)
        self._method, self._ledger, self._budget, self._records = method, ledger, budget, records
        self._paid: list[Batch] = []

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        """See Local. Raises BudgetError before anything is looked at."""
        drawn = self._local.batches(sampling, steps, rng, skip)
        plan = Plan(1, max(len(drawn), 1), self.batch_size, self.num_examples, self._budget.neighbours)
        charges = self._method.privacy_spent(plan)
        rows = (
            sorted({i for batch in drawn for i in batch.rows}) if sampling == "disjoint" else range(self.num_examples)
        )
        self._ledger.charge([self._records[i] for i in rows], charges, self._budget)
        self._paid += drawn
        return drawn

    def per_sample_gradients(self, weights: Weights, batch: Batch) -> PerSample:
        """See Local. Raises BudgetError for a batch that was not drawn here, or was used already."""
        self._use(batch)
        return self._local.per_sample_gradients(weights, batch)

    def feature_gradients(self, weights: Weights, batch: Batch) -> FeatureGradients:
        """See Local. Raises as `per_sample_gradients`."""
        self._use(batch)
        return self._local.feature_gradients(weights, batch)

    def _use(self, batch: Batch) -> None:
        if not any(batch is paid for paid in self._paid):
            raise BudgetError("batch: expected one that was drawn and not used yet, found another; draw one more")
        self._paid = [paid for paid in self._paid if paid is not batch]

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        """Refused: nothing accounts for it."""
        raise BudgetError("train: expected noisy steps only under a privacy ledger, found plain training")

    def gradient(self, weights: Weights) -> Trained:
        """Refused: nothing accounts for it."""
        raise BudgetError("gradient: expected noisy steps only under a privacy ledger, found a plain gradient")
