"""The most that a run may cost a record of a site: the budget of its claim, which the site's ledger enforces.

| case | epsilon |
|---|---|
| a run without a claim, or one that only counts its charges | infinite |
| the site sends values before the noise (`Budget.server_trusted`) | infinite: a site need not trust the server |
| run.deterministic | infinite: seeded noise hides nothing |
| `delta` is below the budget's | infinite: the run promises nothing there |
"""

from __future__ import annotations

import math

from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.privacy.claims import claim_of


def epsilon(method: Method, config: RunConfig, delta: float) -> float:
    """The epsilon at `delta` of all that the run may ask of a record, under the budget's neighbouring relation."""
    claim = claim_of(method, config)
    if claim is None or claim.budget.server_trusted or config.run.deterministic or delta < claim.budget.delta:
        return math.inf
    return claim.budget.epsilon
