"""The epsilon of a whole run, from the method's own dp-accounting event. Nothing here computes one.

| case | epsilon |
|---|---|
| a method without a guarantee (NonPrivateDpEvent) | infinite |
| run.deterministic: seeded noise hides nothing | infinite |
| an event that the accountant does not know | EpsilonError |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import FedVeilError
from fedveil.method import Method


class EpsilonError(FedVeilError):
    """An event that the accountant does not know."""


@dataclass(frozen=True)
class Plan:
    """What a method's event may depend on beside its own fields: the run config, and the number of rounds."""

    config: RunConfig
    rounds: int


def epsilon(method: Method, plan: Plan, delta: float) -> float:
    """epsilon at `delta` of all the plan's rounds together, by Renyi accounting. Raises EpsilonError."""
    from dp_accounting import DpEvent, NonPrivateDpEvent, UnsupportedEventError
    from dp_accounting.rdp import RdpAccountant

    event: Any = method.dp_event(plan)
    if plan.config.run.deterministic or isinstance(event, NonPrivateDpEvent):
        return math.inf
    if not isinstance(event, DpEvent):
        raise EpsilonError(f"dp_event: expected an event of dp-accounting, found {type(event).__name__}")
    try:
        return float(RdpAccountant().compose(event).get_epsilon(delta))
    except UnsupportedEventError as error:
        raise EpsilonError(f"dp_event: expected one that dp-accounting can count, found {event!r} ({error})") from None
