"""The runs in a folder, each as one line of `fedveil status`, and as JSON for other programs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedveil.console.runs import per_site
from fedveil.console.runs.progress_bar import round_underway
from fedveil.console.runs.run_lookup import flower_run
from fedveil.console.runs.run_reader import Row, RunView, load_run
from fedveil.errors import FedVeilError
from fedveil.sanitize import sanitize

_SILENT_SECONDS = 1800.0
_NAME_WIDTH = (24, 40)  # columns: minimum and maximum
_MAX_NUMBER = 1 << 53  # integers that every JSON reader keeps


@dataclass(frozen=True)
class ListedRun:
    """A run's state, progress and result.

    Attributes:
        name: the run folder's path within the folder of runs.
        folder: the absolute path.
        state: running, completed, failed, stopped, died, silent (no output for half an hour), unreadable, or unknown.
        is_healthy: false if the run failed, died, went silent or cannot be read.
        rounds_done: rounds that reached their quorum.
        rounds: rounds in total; None if unknown.
        elapsed_seconds: from the start to the end, or until now; None if unknown.
        loss: the last loss; None if there is none, or if it is not finite.
        loss_of: "test data" (the server's), "training examples" (the sites', before training on them), or "".
        flower_run: Flower's run ID; "" if unknown.
        note: the reason, missing sites, or the progress of the current round; "" if there is nothing to say.
    """

    name: str
    folder: str
    state: str
    is_healthy: bool
    rounds_done: int = 0
    rounds: int | None = None
    elapsed_seconds: float | None = None
    loss: float | None = None
    loss_of: str = ""
    flower_run: str = ""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, under the names above."""
        return asdict(self)


def list_runs(folder: Path, now: float | None = None) -> list[ListedRun]:
    """Return all runs under `folder`, the latest last. `now`: seconds since 1970."""
    files = sorted(folder.rglob("status.json"), key=lambda file: file.stat().st_mtime)
    return [_summary(file.parent, folder, time.time() if now is None else now) for file in files]


def head_line(runs: Sequence[ListedRun]) -> str:
    """Return the column titles of `run_line`."""
    return _columns(name_width(runs), "run", "state", "rounds", "elapsed", "loss")


def run_line(run: ListedRun, runs: Sequence[ListedRun]) -> str:
    """Return a run's line without its note; `runs` are all runs of the table. A loss at the sites has a "*"."""
    total = "?" if run.rounds is None else str(run.rounds)
    loss = "-" if run.loss is None else f"{run.loss:.4f}{'*' if run.loss_of == SITES_LOSS else ''}"
    done = "-" if run.state == "unreadable" else f"{run.rounds_done}/{total}"
    return _columns(name_width(runs), run.name, run.state, done, elapsed_words(run.elapsed_seconds), loss)


TEST_LOSS, SITES_LOSS = "test data", "training examples"
LOSS_NOTE = "* at the sites, on their training examples, because the server scored no model"


def elapsed_words(seconds: float | None) -> str:
    """Return a duration in its two largest units, such as "2 h 05 min"; "-" if unknown."""
    if seconds is None:
        return "-"
    minutes, hours = divmod(round(seconds), 60)[0], round(seconds) // 3600
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _columns(width: int, name: str, state: str, rounds: str, elapsed: str, loss: str) -> str:
    return f"{name:<{width}} {state:<10} {rounds:<7} {elapsed:>10} {loss:>9}"


def name_width(runs: Sequence[ListedRun]) -> int:
    """Return the columns that names take in a table of these runs."""
    least, most = _NAME_WIDTH
    return max(least, *(min(most, len(run.name)) for run in runs)) if runs else least


def _summary(place: Path, folder: Path, now: float) -> ListedRun:
    name = sanitize(place.relative_to(folder) if place != folder else place.resolve().name, 200)
    at = sanitize(place.absolute(), 4000)
    try:
        view = load_run(place)
    except FedVeilError as error:
        return ListedRun(name, at, "unreadable", False, note=f"cannot be read: {sanitize(error)}")
    newest = max(file.stat().st_mtime for file in place.iterdir())
    state = sanitize(view.status.get("state", "unknown"), 20)
    if state == "running" and now - newest > _SILENT_SECONDS:
        state = "silent"
    loss, loss_of = _loss(view)
    rounds = view.status.get("rounds")
    return ListedRun(
        name, at, state, state in ("running", "completed", "stopped"),
        rounds_done=view.rounds_done,
        rounds=rounds if type(rounds) is int and 0 <= rounds < _MAX_NUMBER else None,
        elapsed_seconds=_elapsed(view, state, newest, now),
        loss=loss, loss_of=loss_of, flower_run=flower_run(place), note=_note(view, state, now - newest),
    )  # fmt: skip


def _note(view: RunView, state: str, quiet: float) -> str:
    why = view.status.get("reason") or _last_failures(view.attempts) or view.of_round
    why = _silent(quiet) if state == "silent" else sanitize(why)
    if state in ("running", "completed") and (left := per_site.sites_left(view)):
        why = f"{left}; {why}" if why else left
    if state == "running" and (now_at := round_underway(view.folder)):
        why = f"{now_at}; last attempt: {why}" if why else now_at
    return why


def _silent(seconds: float) -> str:
    return f"no output for {seconds / 60:.0f} minutes; get its state from Flower with fedveil watch --federation"


def _last_failures(attempts: Sequence[Row]) -> str:
    """List the sites that failed in the last attempt, with reasons."""
    failed = attempts[-1].get("failed", {}) if attempts else {}
    return "; ".join(f"{site}: {reason}" for site, reason in failed.items())


def _loss(view: RunView) -> tuple[float | None, str]:
    """Return the last loss that is finite, and the data that it is of."""
    value = view.final.get("loss")
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value), TEST_LOSS
    losses = [] if "loss" in view.final else per_site.site_losses(view)
    return (losses[-1][1], SITES_LOSS) if losses else (None, "")


def _elapsed(view: RunView, state: str, newest: float, now: float) -> float | None:
    """Return the seconds since the start: until the end, the last output of a run that died, or now."""
    started, ended = _seconds(view.config.get("started")), _seconds(view.status.get("ended"))
    if started is None:
        return None
    until = now if state == "running" else newest if state in ("died", "silent") or ended is None else ended
    return round(until - started, 1) if until >= started else None


def _seconds(value: object) -> float | None:
    """Return a time of a run folder in seconds since 1970; None if it is none."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
        return moment.timestamp() if moment is not None and moment.tzinfo else None
    except (ValueError, OverflowError, OSError):
        return None
