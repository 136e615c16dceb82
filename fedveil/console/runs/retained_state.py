"""List and purge the runs that a site stores in its state folder.

A run is purged if it is selected by name or by age and nothing prevents it:

| case | result |
|---|---|
| a client round of the run is in progress, or a worker holds the run | it stays |
| its last round was served | it may be purged immediately |
| it ended earlier, or continues (a site cannot know) | it may be purged a day after its last client round |
| its count of served rounds is damaged | it stays, because a server could request its rounds again |
| it has continued since it was listed | it stays |

Purging removes everything in the run's folder except its round count. The count then records that
the run was purged, and the site serves no further rounds of it. The privacy ledger, the audit log, the data
set IDs and the withdrawn units are never touched. Besides runs, leftovers of interrupted writes
(`.part`) are removed by age.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.client_app.state.client_state import NOT_RUNS, SECURE, ClientStateStore, open_ledger
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.console.runs.dataset_cache import list_cached_datasets, remove_cached
from fedveil.console.runs.workers import WorkerStatus, list_workers
from fedveil.console.terminal import say
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

DAY = 86_400.0
_WRITING = 3600.0  # seconds after which no process is still writing a .part file
_MARKS = frozenset({"secret", "served.json", SECURE})  # a run's folder has one of these
_STAYS = frozenset({"served.json", "served.lock", "turn.lock"})


@dataclass(frozen=True)
class RetainedRunState:
    """One site's folder for one run.

    Attributes:
        bytes: number of bytes that a purge would free.
        last: when something in it last changed, in seconds since the epoch.
        why: the reason why it may not be purged, or "".
    """

    run: str
    site: str
    folder: Path
    bytes: int
    last: float
    why: str

    @property
    def days(self) -> float:
        """Return the days since something in it last changed."""
        return (time.time() - self.last) / DAY


def list_retained(state_dir: Path) -> list[RetainedRunState]:
    """Return all runs of all sites in a state folder, sorted by run and site."""
    workers = list_workers(state_dir)
    runs = [_seen(folder, workers) for folder in run_folders(state_dir)]
    return [run if _free(run.folder) else replace(run, why="a client round is in progress") for run in runs]


def run_folders(state_dir: Path) -> Iterator[Path]:
    """Yield the run folders in a state folder, one per run and site."""
    for folder in sorted(state_dir.expanduser().glob("[!.]*/*")):
        links = folder.is_symlink() or folder.parent.is_symlink()
        if folder.parent.name not in NOT_RUNS and not links and any((folder / mark).is_file() for mark in _MARKS):
            yield folder


def list_leftovers(state_dir: Path, days: float) -> list[Path]:
    """List leftovers of interrupted writes that are at least `days` days old."""
    before, state = time.time() - max(days * DAY, _WRITING), state_dir.expanduser()
    folders = [state, state / ".ledger", state / ".withdrawn", *(state / "workers").glob("*"), *run_folders(state_dir)]
    part_files = [(path, path.lstat()) for folder in folders for path in folder.glob(".*.part")]
    return sorted(path for path, about in part_files if stat.S_ISREG(about.st_mode) and about.st_mtime <= before)


def purge_state(state_dir: Path, runs: Iterable[RetainedRunState], parts: Iterable[Path]) -> list[RetainedRunState]:
    """Remove runs and leftovers after recording each in the site's audit log. Returns the runs that stayed.

    Raises:
        StateError: the audit log cannot be written; whatever is not yet recorded is kept.
    """
    log, stayed = state_dir.expanduser() / audit_log.NAME, []
    for run in runs:
        with ClientStateStore(run.folder).alone() as alone:
            if not alone or _seen(run.folder, list_workers(state_dir)) != run:
                stayed.append(run)
                continue
            audit_log.append_entry(log, "purged", {"run": run.run, "site": run.site, "bytes": run.bytes})
            ReplayGuard(run.folder).forget()
            for path in _goes(run.folder):
                _remove(path)
    for part in parts:
        name, size = part.relative_to(state_dir.expanduser()).as_posix(), part.stat().st_size
        audit_log.append_entry(log, "purged", {"file": name, "bytes": size})
        part.unlink()
    return stayed


def offer_purge(state_dir: Path, names: Sequence[str], older_than: float | None, agreed: Callable[[], bool]) -> int:
    """List what a purge would remove, and remove it if `agreed` returns True. Returns the exit code."""
    if not names and older_than is None:
        raise ConfigError("--older-than: expected a number of days, or --run NAME, found neither; set one of them")
    if older_than is not None and not older_than >= 0:
        raise ConfigError(f"--older-than: expected a number of days, at least 0, found {older_than}")
    open_ledger(state_dir).require_whole()
    there, days = list_retained(state_dir), older_than or 0.0
    if unknown := set(names) - {run.run for run in there}:
        raise ConfigError(
            f"--run: expected a run in {state_dir}, found {min(unknown)!r}; fedveil site status lists them"
        )
    chosen = [run for run in there if (run.run in names if names else run.bytes > 0)]
    chosen = [run for run in chosen if older_than is None or run.days >= older_than]
    goes = [run for run in chosen if not run.why]
    parts = [] if names else list_leftovers(state_dir, days)
    parts = [part for part in parts if part.parent not in {run.folder for run in goes}]
    sets = [] if names else [of for of in list_cached_datasets(state_dir) if of.days >= days]
    for run in chosen:
        say(f"{'stays' if run.why else 'goes':<6}{purge_line(run)}{f': {sanitize(run.why)}' if run.why else ''}")
    for part in parts:
        say(f"goes  {sanitize(part)}, {part.stat().st_size:,} bytes, left by an interrupted write")
    for of in sets:
        say(f"goes  prepared examples of {sanitize(of.data_set)}, {of.bytes:,} bytes, rebuilt when needed")
    if not goes and not parts and not sets:
        say("nothing to remove")
        return 0
    if not agreed():
        say("nothing was removed")
        return 1
    remove_cached(state_dir, sets)
    stayed = purge_state(state_dir, goes, parts)
    for run in stayed:
        say(f"stays {purge_line(run)}: it resumed in the meantime")
    size = sum(run.bytes for run in goes if run not in stayed)
    say(
        f"removed {len(goes) - len(stayed)} runs, {size:,} bytes, and {len(parts)} leftover files; ledger and logs stay"
    )
    return 0


def purge_line(run: RetainedRunState) -> str:
    """Describe a retained run on one line."""
    name = f"{sanitize(run.run, 80)}, site {sanitize(run.site, 80)}"
    return f"{name}: {run.bytes:,} bytes, last round {run.days:.1f} days ago"


def _seen(folder: Path, held: list[WorkerStatus]) -> RetainedRunState:
    run, site = folder.parent.name, folder.name
    size, last = 0, 0.0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # replaced by a client round in progress
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) and path.name != "turn.lock":
                last = max(last, about.st_mtime)
                size += 0 if path.parent == folder and path.name in _STAYS else about.st_size
    return RetainedRunState(run, site, folder, size, last, _why_not(folder, last, held))


def _free(folder: Path) -> bool:
    with ClientStateStore(folder).alone() as alone:
        return alone


def _why_not(folder: Path, last: float, held: list[WorkerStatus]) -> str:
    run, site = folder.parent.name, folder.name
    for worker in held:
        # A worker that does not report its run may hold this one.
        if worker.site == site and worker.card.key and worker.says.get("run", run) == run:
            return f"worker {worker.card.pid} holds it"
    try:
        if not ReplayGuard(folder).ended and time.time() - last < DAY:
            return "it may resume: its final round was not served, and its latest round is less than a day ago"
    except StateError as error:
        return str(error)
    return ""


def _goes(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in _STAYS]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
