"""The most that a run may cost a record of a site: the claim's own budget, which the site's ledger keeps.

| case | epsilon |
|---|---|
| a run without a claim, or one that only counts | infinite |
| what leaves the site has no noise yet (`Budget.server_trusted`) | infinite: the site does not have to trust the server |
| run.deterministic: seeded noise hides nothing | infinite |
| asked at a delta below the budget's | infinite: nothing was promised there |
"""

from __future__ import annotations

import math

from fedveil.config import RunConfig
from fedveil.contract.method import Method
from fedveil.privacy.dp_sgd import DpSgd, claim_of


def epsilon(method: Method, config: RunConfig, delta: float) -> float:
    """epsilon at `delta` of everything that the run may ask of a record, under the budget's own neighbouring relation."""
    claim = claim_of(method, DpSgd.of(config.dp))
    if claim is None or claim.budget.server_trusted or config.run.deterministic or delta < claim.budget.delta:
        return math.inf
    return claim.budget.epsilon
