"""What a site keeps of its runs below its state folder, and how it is removed.

A run is purged if nothing speaks against it, and if it is asked for by name or by age:

| case | result |
|---|---|
| a turn of it is under way, or a worker holds it | stays |
| its last round was served | may go at once |
| it ended earlier, or goes on: a site cannot know | may go a day after its last turn |
| the count of its served rounds is damaged | stays: a server could ask for its rounds again |
| it has gone on since it was listed | stays |

What goes is everything in the run's folder but the count of its rounds, which says then that the run was purged:
the site serves no round of it again. The privacy ledger, the audit log and the ids of data sets are touched by nothing
here. Beside runs, what an interrupted write left (`.part`) goes by its age.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.client_app.site.private import NOT_RUNS, SECURE, PrivateStore
from fedveil.client_app.site.served import Served
from fedveil.console.runs.workers import WorkerStatus, workers
from fedveil.errors import StateError
from fedveil.records import audit_log

DAY = 86_400.0
_WRITING = 3600.0  # seconds after which nobody still writes a .part
_MARKS = frozenset({"secret", "served.json", SECURE})  # of which the folder of a run has one
_STAYS = frozenset({"served.json", "served.lock", "turn.lock"})


@dataclass(frozen=True)
class Kept:
    """One site's folder of one run.

    Attributes:
        bytes: of what a purge would remove.
        last: when something in it last changed, in seconds since the epoch.
        why: it may not be purged; "" if it may.
    """

    run: str
    site: str
    folder: Path
    bytes: int
    last: float
    why: str

    @property
    def days(self) -> float:
        """Since something in it last changed."""
        return (time.time() - self.last) / DAY


def kept(state_dir: Path) -> list[Kept]:
    """Every run of every site below a state folder, by run and site."""
    held = workers(state_dir)
    found = [_seen(folder, held) for folder in run_folders(state_dir)]
    return [run if _free(run.folder) else replace(run, why="a turn of it is under way") for run in found]


def run_folders(state_dir: Path) -> Iterator[Path]:
    """The folders of runs below a state folder, a site's each."""
    for folder in sorted(state_dir.expanduser().glob("[!.]*/*")):
        links = folder.is_symlink() or folder.parent.is_symlink()
        if folder.parent.name not in NOT_RUNS and not links and any((folder / mark).is_file() for mark in _MARKS):
            yield folder


def leftovers(state_dir: Path, days: float) -> list[Path]:
    """What interrupted writes left, at least that old."""
    before, state = time.time() - max(days * DAY, _WRITING), state_dir.expanduser()
    folders = [state, state / ".ledger", *(state / "workers").glob("*"), *run_folders(state_dir)]
    found = [(path, path.lstat()) for folder in folders for path in folder.glob(".*.part")]
    return sorted(path for path, about in found if stat.S_ISREG(about.st_mode) and about.st_mtime <= before)


def purge(state_dir: Path, runs: Iterable[Kept], parts: Iterable[Path]) -> list[Kept]:
    """Removes runs and leftovers, each with a line in the site's audit log before it goes. Returns what stayed.

    Raises:
        StateError: the audit log cannot be written; what was not noted is still there.
    """
    log, stayed = state_dir.expanduser() / audit_log.NAME, []
    for run in runs:
        with PrivateStore(run.folder).alone() as alone:
            if not alone or _seen(run.folder, workers(state_dir)) != run:
                stayed.append(run)
                continue
            audit_log.append(log, "purged", {"run": run.run, "site": run.site, "bytes": run.bytes})
            Served(run.folder).forget()
            for path in _goes(run.folder):
                _remove(path)
    for part in parts:
        name, size = part.relative_to(state_dir.expanduser()).as_posix(), part.stat().st_size
        audit_log.append(log, "purged", {"file": name, "bytes": size})
        part.unlink()
    return stayed


def _seen(folder: Path, held: list[WorkerStatus]) -> Kept:
    run, site = folder.parent.name, folder.name
    size, last = 0, 0.0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # replaced by a turn under way
            about = path.lstat()
            if not stat.S_ISDIR(about.st_mode) and path.name != "turn.lock":
                last = max(last, about.st_mtime)
                size += 0 if path.parent == folder and path.name in _STAYS else about.st_size
    return Kept(run, site, folder, size, last, _why_not(folder, last, held))


def _free(folder: Path) -> bool:
    with PrivateStore(folder).alone() as alone:
        return alone


def _why_not(folder: Path, last: float, held: list[WorkerStatus]) -> str:
    run, site = folder.parent.name, folder.name
    for worker in held:
        # One that does not say what it holds may hold this run.
        if worker.site == site and worker.card.key and worker.says.get("run", run) == run:
            return f"worker {worker.card.pid} holds it"
    try:
        if not Served(folder).ended and time.time() - last < DAY:
            return "it may go on: its last round was not served, and its last turn is less than a day ago"
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
