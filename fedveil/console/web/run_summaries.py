"""Summaries of runs for the Runs page, kept until a file of the run changes: 200 runs cost little more than one.

| a run | its row |
|---|---|
| whose files are as they were at the last look | from memory |
| that is new or has changed | read at once, while the page has time left (`_BUDGET_SECONDS`) |
| beyond that time | the old row, or "being read"; it is read in the background, and the page then updates itself |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fedveil.console.runs import per_site
from fedveil.console.runs.run_reader import Row, RunView, status_of
from fedveil.console.runs.summary import protection
from fedveil.console.web import safe_files
from fedveil.console.web.background import BackgroundQueries
from fedveil.console.web.safe_files import RunLocation, Stamp
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

__all__ = ["RunSummaries", "RunSummary", "SummariesRead", "summarize_run"]

_BUDGET_SECONDS = 1.0
_PACE_ROUNDS = 5  # the last rounds whose seconds predict the next ones
_MOST_ROUNDS = 10**7


@dataclass(frozen=True)
class RunSummary:
    """A run's row on the Runs page. Texts are sanitized and bounded.

    Attributes:
        place: where the run is.
        state: its state, such as "running".
        sites_left: how many sites remain in a running or completed run; "" if all do.
        rounds: number of rounds asked for; None if unknown.
        loss: the server's last test loss; None if it was not scored.
        pace: seconds of the last finished rounds, without scoring on the server.
        lasted: seconds from start to end; None for a run that has not ended, or without valid times.
    """

    place: RunLocation
    method: str
    protection: str
    state: str
    sites_left: str
    rounds_done: int
    rounds: int | None
    loss: float | None
    sites: int
    upload_bytes: int
    started: str
    lasted: float | None
    reason: str
    pace: tuple[float, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Return whether the run ended without completing and without having been told to."""
        return self.state not in ("running", "completed", "stopped")


@dataclass(frozen=True)
class SummariesRead:
    """Runs that were read, in order; the key and the reason of each that cannot be; and those not read yet."""

    runs: list[RunSummary]
    broken: list[tuple[str, str]]
    unread: list[RunLocation]


def summarize_run(place: RunLocation, run: RunView) -> RunSummary:
    """Return the summary of a run that `safe_files.find_run` has read."""
    status, started = run.status, sanitize(run.config.get("started") or "", 40)
    state = sanitize(status.get("state", "unknown"), 20)
    loss = run.final.get("loss")
    return RunSummary(
        place, sanitize(run.method, 60), protection(run), state,
        per_site.sites_left(run) if state in ("running", "completed") else "",
        run.rounds_done, rounds_asked(status), loss if isinstance(loss, int | float) else None, len(run.sites),
        run.upload_bytes, started, _seconds_between(started, status.get("ended")),
        sanitize(status.get("reason") or "", 300),
        tuple(float(a.get("seconds", 0.0)) for a in run.finished_rounds[-_PACE_ROUNDS:]),
    )  # fmt: skip


def rounds_asked(status: Row) -> int | None:
    """Return the number of rounds that a run's status asks for; None if it is no valid number."""
    rounds = status.get("rounds")
    return rounds if type(rounds) is int and 0 < rounds <= _MOST_ROUNDS else None


def _seconds_between(started: object, ended: object) -> float | None:
    try:
        return (datetime.fromisoformat(str(ended)) - datetime.fromisoformat(str(started))).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


@dataclass
class RunSummaries:
    """Keeps a summary, or the reason why there is none, for each run that is listed."""

    later: BackgroundQueries
    _kept: dict[str, tuple[Stamp, RunSummary | str]] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def read(self, places: Sequence[RunLocation]) -> SummariesRead:
        """Return the summaries of these runs, within a second even if none is known yet."""
        stamps = {place.key: safe_files.run_stamp(place) for place in places}
        self._forget(stamps)
        stale = [place for place in places if self._kept.get(place.key, ((), ""))[0] != stamps[place.key]]
        end = time.monotonic() + _BUDGET_SECONDS
        while stale and time.monotonic() < end:
            self._summarize(stale.pop(0), stamps)
        if stale:
            asked = tuple(stamps[place.key] for place in stale)
            self.later.ask("summaries", asked, lambda: self._summarize_all(stale, stamps), 0.0)
        runs, broken, unread = list[RunSummary](), list[tuple[str, str]](), list[RunLocation]()
        for place in places:
            entry = self._kept.get(place.key)
            if entry is None:
                unread.append(place)
            elif isinstance(entry[1], str):
                broken.append((place.key, entry[1]))
            else:
                runs.append(_with_state(entry[1]))
        return SummariesRead(runs, broken, unread)

    def _summarize_all(self, places: Sequence[RunLocation], stamps: dict[str, Stamp]) -> int:
        for place in places:
            self._summarize(place, stamps)
        return len(places)

    def _summarize(self, place: RunLocation, stamps: dict[str, Stamp]) -> None:
        entry: RunSummary | str
        try:
            entry = summarize_run(place, safe_files.find_run(place))
        except (FedVeilError, OSError) as error:
            entry = sanitize(error)
        with self._lock:
            self._kept[place.key] = stamps[place.key], entry

    def _forget(self, listed: dict[str, Stamp]) -> None:
        """Drop what is kept of runs that are no longer listed, so that at most `safe_files.MOST_RUNS` are kept."""
        with self._lock:
            for key in self._kept.keys() - listed.keys():
                del self._kept[key]


def _with_state(summary: RunSummary) -> RunSummary:
    """Return the summary with its current state: a running run's process can die without a write."""
    if summary.state != "running":
        return summary
    try:
        status = status_of(summary.place.folder)
    except (FedVeilError, OSError):
        return summary
    state = sanitize(status.get("state", "unknown"), 20)
    return replace(
        summary, state=state, reason=sanitize(status.get("reason") or "", 300),
        sites_left=summary.sites_left if state in ("running", "completed") else "",
    )  # fmt: skip
