"""An upper bound on a run's cost for one site's records, computed only from the server's logs and the site's reports.

`promised_epsilon` is the maximum that a run may charge a record: the budget of its guarantee, which the site's ledger
enforces.

| case | epsilon |
|---|---|
| a run without a guarantee, or that only counts its charges | infinite |
| the site sends values before the noise (`PrivacyBudget.server_trusted`) | infinite: a site need not trust the server |
| run.deterministic | infinite: seeded noise hides nothing |
| `delta` is below the budget's | infinite: the run gives no guarantee at that delta |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.contract.privacy import PrivacyGuarantee, SamplingPlan, Spent
from fedveil.errors import ConfigError
from fedveil.privacy import accounting
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.guarantee_source import guarantee_of

_MOST_ROWS = 100_000_000  # the limit in the server's upload validation
# For all participations together: beyond these limits, accounting takes minutes and then exhausts memory.
_MOST_STEPS, _MOST_LOSS = 3_000_000, 1200.0


@dataclass(frozen=True)
class ServerSideBound:
    """An upper bound on one run's charge to any record of a site.

    Attributes:
        rows, participations: the site's numbers of examples and participations.
        steps: steps per participation.
        charges: every use of the most frequently used record.
        epsilon: epsilon at the budget's delta and adjacency; infinite if none is known.
        against_all: epsilon against the server and all other sites together; None if the noise is not in the sum.
    """

    rows: int
    participations: int
    steps: int
    charges: Spent
    epsilon: float
    against_all: float | None


def server_side_bound(
    claim: PrivacyGuarantee, batch: int, attempts: Sequence[Mapping[str, Any]], site: str
) -> ServerSideBound | str:
    """Return the run's cost to the site's records, or a sentence that says why it is not known.

    Args:
        batch: the value of train.batch-size.
        attempts: the run's attempts at rounds, as in metrics.jsonl. The site writes their reports, so this function
            bounds the reported values.
    """
    asked = [int(a["round"]) for a in attempts if site in a.get("cohort", [])]
    reports = [a["reports"][site] for a in attempts if site in a.get("reports", {})]
    if not reports and any(a.get("unseen") and site in a["accepted"] for a in attempts):
        return (
            "the server saw only sums, so it does not know the site's number of examples; the site's own ledger does."
        )
    if not reports:
        return (
            "no upload was accepted, so the server does not know the site's number of examples; the site's own "
            "ledger does."
        )
    counts = [(_count(r.get("num_examples"), 1, _MOST_ROWS), _count(r.get("steps"), 0, _MOST_STEPS)) for r in reports]
    if any(rows is None or steps is None for rows, steps in counts):
        return (
            f"not known. Its reports lack the number of examples or steps, or give more than {_MOST_STEPS:,} steps; "
            "see the site's own ledger. Until then, treat epsilon as infinite."
        )
    rows, steps = min(n for n, _ in counts if n is not None), max(n for _, n in counts if n is not None)
    budget = claim.budget
    try:
        # Count every round up to the last: if an epoch spans rounds, a site that skips some takes part in more epochs.
        plan = SamplingPlan(max(asked) + 1, max(steps, 1), batch, rows, budget.neighbours)
        once = SamplingPlan(1, plan.steps, plan.batch, rows, budget.neighbours)
        charges = Counter(dict(claim.privacy_spent(plan)))
        for _ in range(len(asked) - len(set(asked))):
            charges.update(dict(claim.privacy_spent(once)))
    except ConfigError as error:
        return f"not known, because its reports do not fit the run ({error}). Treat epsilon as infinite."
    is_closed = all(kind == "gaussian" for kind, *_ in charges)  # these have a closed form for any number of steps
    if not is_closed and (sum(charges.values()) > _MOST_STEPS or accounting.mean_loss(charges) > _MOST_LOSS):
        return (
            f"{rows} examples, {len(asked)} participations of {steps} steps: more than the accountant supports (a "
            f"mean privacy loss of at most {_MOST_LOSS:g} in {_MOST_STEPS:,} steps). Treat epsilon as infinite."
        )
    epsilon = accounting.compute_epsilon(charges, budget.delta, budget.neighbours)
    alone = accounting.compute_epsilon(accounting.epsilon_against_all(charges), budget.delta, budget.neighbours)
    return ServerSideBound(
        rows,
        len(asked),
        steps,
        dict(charges),
        epsilon,
        alone if isinstance(claim, DistributedDiscreteGaussian) else None,
    )


def _count(value: object, least: int, most: int) -> int | None:
    """Return a number reported by a site, or None unless it is a whole number from `least` to `most`."""
    known = isinstance(value, int | float) and least <= value <= most and value == int(value)
    return int(value) if known else None  # type: ignore[call-overload]


def promised_epsilon(method: Method, config: RunConfig, delta: float) -> float:
    """Return the largest epsilon at `delta` that the run may charge a record, under the budget's adjacency."""
    claim = guarantee_of(method, config)
    if claim is None or claim.budget.server_trusted or config.run.deterministic or delta < claim.budget.delta:
        return math.inf
    return claim.budget.epsilon
