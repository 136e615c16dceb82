"""What needs a person, for the top of the Runs page: failed runs, absent sites, keys near their end, broken logs.

Each entry says what is wrong, and what to do. Nothing is called well that has not been looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedveil.console.provisioning.server_certificate import read_certificate
from fedveil.console.web.components import LogVerdict, command_line
from fedveil.console.web.report.html import Html, html_tag
from fedveil.console.web.run_summaries import RunSummary
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

__all__ = ["KEY_DAYS", "Need", "certificate_needs", "key_days_left", "log_needs", "run_needs"]

KEY_DAYS = 30  # a key or certificate with fewer days left is near its end, as in docs/deploy/monitoring/alerts.yml
RECENT_DAYS = 7  # a failure is urgent for this long; after that, the list of runs still has it
_MOST = 10  # entries of a kind
_DAY = 86_400.0
_LONGEST = 400
_ON_ITS_PAGE = html_tag("span", "Its page has the causes by site and the next command.", "note")


@dataclass(frozen=True)
class Need:
    """One thing that needs a person.

    Attributes:
        what: the run, site or log, as a link if it has a page.
        why: what is wrong.
        step: what to do, or the command for it; "" if `why` says it.
        is_urgent: whether something has failed or was changed, and not only waits.
    """

    what: object
    why: str
    step: Html = Html("")
    is_urgent: bool = True


def run_needs(
    runs: Sequence[RunSummary],
    broken: Sequence[tuple[str, str]],
    link: Callable[[RunSummary], Html],
    now: float | None = None,
) -> list[Need]:
    """Return the runs that failed in the last days, those that run without one of their sites, and unreadable ones.

    `now`: seconds since 1970.
    """  # fmt: skip
    since = (time.time() if now is None else now) - RECENT_DAYS * _DAY
    failed = [run for run in runs if run.is_failure and run.place.changed >= since]
    needs = [
        Need(link(run), sanitize(f"{run.state} after {run.rounds_done} of {run.rounds or '?'} rounds"
                                 f"{': ' if run.reason else ''}{run.reason}", _LONGEST), _ON_ITS_PAGE)
        for run in failed
    ]  # fmt: skip
    needs += [
        Need(link(run), f"goes on with {run.sites_left}; its page says why the others are missing", is_urgent=False)
        for run in runs
        if run.state == "running" and run.sites_left
    ]
    needs += [Need(sanitize(name, 100), f"cannot be read: {sanitize(why, _LONGEST)}") for name, why in broken]
    return _bounded(needs, "runs")


def log_needs(verdicts: Sequence[tuple[str, LogVerdict]], link: Callable[[str], Html]) -> list[Need]:
    """Return the logs that were changed or damaged."""
    return _bounded([Need(link(name), verdict.words) for name, verdict in verdicts if verdict.kind == "alert"], "logs")


def key_days_left(entry: Mapping[str, Any], now: datetime | None = None) -> int | None:
    """Return the whole days until a registered site's key ends; None without a valid time. Negative: it has ended."""
    try:
        until = datetime.fromisoformat(str(entry.get("until", ""))).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return (until - (datetime.now(UTC) if now is None else now)).days


def certificate_needs(federation: str, folder: Path) -> list[Need]:
    """Return the server's certificates that have ended or soon will, or that cannot be read."""
    needs, what = [], f"The server of {sanitize(federation, 80)}"
    for name in ("server.pem", "ca.crt"):
        try:
            until = read_certificate(folder / "server" / name).not_valid_after_utc
        except FedVeilError as error:
            needs.append(Need(what, sanitize(error, _LONGEST)))
            continue
        days = (until - datetime.now(UTC)).days
        if days < KEY_DAYS:
            step = command_line("fedveil", "members", "renew-server", folder) if name == "server.pem" else Html("")
            needs.append(Need(what, f"its {name} {describe_days(days, f'{until:%Y-%m-%d}')}", step, days < 0))
    return needs


def describe_days(days: int, until: str) -> str:
    """Return when a key or certificate ends, as the rest of a sentence."""
    if days < 0:
        return f"ended on {until}"
    return f"ends {'today' if days == 0 else 'tomorrow' if days == 1 else f'in {days} days'} ({until})"


def _bounded(needs: list[Need], kind: str) -> list[Need]:
    more = len(needs) - _MOST
    return needs if more <= 0 else [*needs[:_MOST], Need(f"{more:,} more {kind}", "see the list below")]
