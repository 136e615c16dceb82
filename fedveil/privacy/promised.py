"""The most that a run may cost a record of a site: the method's own budget, which the site's ledger keeps.

| case | epsilon |
|---|---|
| a method without a budget, or one that only counts | infinite |
| what leaves the site has no noise yet (`Budget.server_trusted`) | infinite: the site does not have to trust the server |
| run.deterministic: seeded noise hides nothing | infinite |
| asked at a delta below the budget's | infinite: nothing was promised there |
"""

from __future__ import annotations

import math

from fedveil.config import RunConfig
from fedveil.contract.method import Method


def epsilon(method: Method, config: RunConfig, delta: float) -> float:
    """epsilon at `delta` of everything that the run may ask of a record, under the budget's own neighbouring relation."""
    budget = method.budget
    if budget is None or budget.server_trusted or config.run.deterministic or delta < budget.delta:
        return math.inf
    return budget.epsilon
