"""Show a run's progress from its run folder: a bar on a terminal, plain lines elsewhere.

Within a round, it shows which sites have answered, from progress.json (server_app/round_progress.py). A
terminal is updated on every change, other outputs once a minute. A malformed progress file is ignored: nothing is
shown, and nothing stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedveil.console.runs import per_site, secagg_summary
from fedveil.console.runs.run_reader import Row, new_lines, progress_of
from fedveil.records.process_exit import group_by_reason
from fedveil.sanitize import sanitize

_NAMED = 3  # sites per line
_LINE_SECONDS = 60.0  # seconds between lines about a round when there is no terminal


@dataclass(frozen=True)
class RoundCountdown:
    """The state of a round as text around a number of seconds: `before`, `seconds`, `after`.

    Attributes:
        seconds: "" if the text includes none.
        step: change per second; 1, or -1 for a countdown.
    """

    before: str = ""
    seconds: str = ""
    after: str = ""
    step: int = 1

    def __str__(self) -> str:
        return f"{self.before}{self.seconds}{self.after}"


def round_underway(folder: Path, now: float | None = None) -> str:
    """Describe the current round, as in "2 of 4 have answered, waiting for south (41 s of 600)"; "" if unknown.

    `now`: seconds since 1970.
    """
    return str(countdown_words(folder, now))


def countdown_words(folder: Path, now: float | None = None) -> RoundCountdown:
    """Return the text of `round_underway`, with its seconds as a separate part."""
    try:
        progress, now = progress_of(folder), time.time() if now is None else now
        asked, done = int(progress["asked"]), int(progress["accepted"]) + int(progress["failed"])
        since, deadline = float(progress["since"]), float(progress["deadline_seconds"])
        phase, waiting = progress["phase"], [sanitize(site, 80) for site in list(progress["waiting"])[:_NAMED]]
        if phase == "waiting":
            return _awaited(progress, now)
        if phase != "round" or not asked:
            return RoundCountdown()
        if done >= asked:
            then = (
                "the sites reveal shares of the masks, then the server"
                if progress.get("unseen") is True
                else "the server"
            )
            return RoundCountdown(f"all {asked} have answered; {then} aggregates and evaluates")
        more = f" and {asked - done - len(waiting)} more" if asked - done > len(waiting) else ""
        words = f"{done} of {asked} have answered, waiting for {', '.join(waiting)}{more} ("
        return RoundCountdown(words, _whole(now - since), f" s of {deadline:.0f})")
    except (ValueError, KeyError, TypeError, OverflowError):  # no progress yet, or of an unknown form
        return RoundCountdown()


def _whole(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f}"


def round_stage(status: Row, folder: Path | None = None) -> str:
    """Describe the current round and its progress, as in "round 2 of 5; 2 of 4 have answered, ...".

    Args:
        status: status.json, with the last round that began (counted from 0; -1 before the first).
        folder: the run folder, which has the round's progress; None if unknown.
    """
    if not status:
        return "no status written yet"
    number, rounds = status.get("round"), sanitize(status.get("rounds", "?"), 20)
    words = f"before round 1 of {rounds}"
    if isinstance(number, int) and number >= 0:
        words = f"round {sanitize(number + 1, 20)} of {rounds}"
    return "; ".join(filter(None, (words, round_underway(folder) if folder else "")))


def _awaited(said: Row, now: float) -> RoundCountdown:
    """Describe what a round is waiting for before it contacts sites. Raises errors that `countdown_words` catches."""
    if "until" not in said:
        return RoundCountdown("waiting for sites")
    before = f"waiting for sites: {int(said['there'])} of {int(said['quorum'])} take part ("
    left = _whole(float(said["until"]) - now)
    refused = {sanitize(site, 80): sanitize(by, 80) for site, by in list(dict(said["refused"]).items())[:_NAMED]}
    if not refused:
        return RoundCountdown(before, left, " s left)", -1)
    more = f" and {len(said['refused']) - _NAMED} more" if len(said["refused"]) > _NAMED else ""
    step = "fix the policy and submit again, or resume" if "its policy" in refused.values() else "see its log"
    named = "; ".join(f"{site}, refused by {by}" for site, by in refused.items())
    return RoundCountdown(before, left, f" s left); not waited for: {named}{more}; {step}", -1)


class _Bar(Progress):
    """Progress bar with a note below it, where it can wrap: with 80 columns, there is too little room next to it."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["note"]) for task in self.tasks)


class RunProgress(AbstractContextManager["RunProgress"]):
    """Follows a run's metrics.jsonl; call `tick` regularly.

    `steps`: returns lines about training at the sites, for a federation whose sites run on this machine.
    """

    def __init__(
        self, console: Console, folder: Path, name: str, rounds: int, steps: Callable[[], str] = lambda: ""
    ) -> None:
        self._console, self._file, self._name, self._rounds = (
            console,
            folder / "metrics.jsonl",
            sanitize(name, 80),
            rounds,
        )
        self._steps, self._note, self._told_of = steps, "starting", set[str]()
        self._said = time.monotonic()  # when something was last printed
        self._read = 0  # bytes
        self._bar = _Bar(
            TextColumn("{task.description:<14}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._name, total=rounds, note="starting")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tick(self, status: dict[str, Any]) -> None:
        """Show new progress, given the run's status.json as `status`."""
        if not status:
            return
        rows, self._read = new_lines(self._file, self._read)
        for row in rows:
            self._show(row)
        sinks = status.get("sinks")
        for sink, why in sinks.items() if isinstance(sinks, dict) else ():
            if sink not in self._told_of:
                self._told_of.add(sink)
                words = f"{self._name}: the sink {sanitize(sink, 40)} stopped: {sanitize(why)}; the run continues"
                self._console.print(words, markup=False, soft_wrap=True)
        self._within(status)

    def _within(self, status: dict[str, Any]) -> None:
        """Show the progress of the current round."""
        words = round_underway(self._file.parent) if status.get("state") == "running" else ""
        if self._console.is_terminal:
            steps = self._steps() if words else ""
            self._bar.update(self._task, note="\n".join(filter(None, (words, steps))) or self._note)
        elif words and time.monotonic() - self._said >= _LINE_SECONDS:
            round_ = status.get("round")
            number = round_ + 1 if isinstance(round_, int) else 0
            self._print(number, words)

    def _show(self, row: Row) -> None:
        loss = _loss_of(row)
        if row.get("resumed"):
            self._tell(int(row["round"]), "resumed here", int(row["round"]) + 1)
            return
        note = "" if loss is None else f"loss {loss:.4f}"
        if row["round"] < 0:
            note = f"before round 1: {note}"
        else:
            cohort = row["cohort"]
            accepted = f"{len(row['accepted'])} of {len(cohort)} sites" if cohort else "no site was asked to train"
            accepted += "" if row.get("weights") else ", too few"
            failed = {sanitize(site, 80): sanitize(why) for site, why in row["failed"].items()}
            failures = "".join(f"; {words}" for words in group_by_reason(failed))
            masked = f"; {secagg_summary.secagg_note(row['unseen'])}" if row.get("unseen") else ""
            if loss is None and (site_loss := per_site.describe_loss(row)) is not None:
                note = f"loss at the sites before training: {site_loss:.4f}"
            note += per_site.failure_note(row.get("reports") or {})
            loss_too = f"  {note}" if note else ""
            note = f"{row['seconds']:5.1f} s  {accepted}  up {row['upload_bytes']:,} B{loss_too}{masked}{failures}"
        done = row["round"] + 1 if row["round"] < 0 or row.get("weights") else row["round"]
        self._tell(done, note, row["round"] + 1)

    def _tell(self, done: int, note: str, number: int | None = None) -> None:
        """Print a note. `done`: rounds finished, for the bar; `number`: the note's round, counted from 1."""
        self._note = note
        self._bar.update(self._task, completed=done, note=note)
        if not self._console.is_terminal:
            self._print(done if number is None else number, note)

    def _print(self, number: int, note: str) -> None:
        self._said = time.monotonic()
        self._console.print(f"{self._name}: round {number}/{self._rounds}  {note}", markup=False, soft_wrap=True)


def _loss_of(attempt: Row) -> float | None:
    """Return the server model's loss after an attempt, or None if it was not scored."""
    scores = attempt.get("scores") or {}
    view: Row = scores.get("server") or next(iter(scores.values()), {})
    loss = view.get("loss")
    return None if loss is None else float(loss)
