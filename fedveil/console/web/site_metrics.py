"""Compute a site's metrics: whether the server hears it, and what its log and its ledger hold."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.console.runs.ledger_summary import LedgerStanding
from fedveil.console.web.metrics import GaugeSample
from fedveil.guard import last_heartbeat

__all__ = ["event_samples", "heartbeat_samples", "ledger_samples"]

EVENTS = ("admitted", "sent", "refused", "withheld", "failed")
_DAY = 86_400.0


def heartbeat_samples(files: Mapping[tuple[str, str], Path]) -> Iterator[GaugeSample]:
    """Yield the time of each site's last answered heartbeat, and whether that is recent; by (federation, site)."""
    for labels, file in files.items():
        at = last_heartbeat.last_answer(file)
        if at is not None:
            yield GaugeSample("fedveil_site_last_heartbeat_timestamp_seconds", at, labels)
            yield GaugeSample("fedveil_site_heard", not last_heartbeat.describe_silence(file), labels)


def event_samples(lines: Iterable[Mapping[str, Any]], now: float | None = None) -> Iterator[GaugeSample]:
    """Yield the number of a log's lines in the last 24 hours, for each event that says what happened to a message."""
    since, counted = (time.time() if now is None else now) - _DAY, Counter[str]()
    for line in lines:
        try:
            is_recent = datetime.fromisoformat(str(line.get("time"))).astimezone(UTC).timestamp() >= since
        except (ValueError, OverflowError, OSError):
            continue  # not a line that FedVeil wrote; fedveil log verify says so
        counted[str(line.get("event"))] += is_recent
    for event in EVENTS:
        yield GaugeSample("fedveil_site_events", counted[event], (event,))


def ledger_samples(standing: LedgerStanding | None) -> Iterator[GaugeSample]:
    """Yield the ledger's limit and what is reserved of it, by adversary. None: the ledger cannot be read."""
    yield GaugeSample("fedveil_ledger_readable", standing is not None and not standing.problem)
    if standing is None:
        return
    limit = standing.budget.epsilon
    yield GaugeSample("fedveil_ledger_epsilon_limit", limit)
    for one in standing.parties:
        # A run without a guarantee makes epsilon infinite, whatever the other runs have reserved.
        reserved = math.inf if one.because else one.reserved
        if reserved is None:
            continue  # no limit applies to this adversary
        yield GaugeSample("fedveil_ledger_epsilon_reserved", reserved, (one.party.value,))
        if 0 < limit < math.inf:
            yield GaugeSample("fedveil_ledger_share_reserved", reserved / limit, (one.party.value,))
