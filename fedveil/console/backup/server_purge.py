"""`fedveil server purge`: remove what the server no longer needs of old runs, and keep what shows what happened.

| removed | kept |
|---|---|
| checkpoints, also of the best round and damaged ones | `final/`: the model and its privacy card |
| captured messages (`tap`) | metrics, disclosures, config, status, the run's id |
| objects of replies that never became complete (`spool`), by age only | audit log, control log, registry, database |

| case | result |
|---|---|
| a run that a ServerApp uses | it is kept |
| a run folder with a link in it | it is kept: no link is followed or removed |
| a run that has not ended | listed as such: without its checkpoint it cannot be resumed |

| a run or a reply that has changed since it was listed | it is kept |

The runs' audit log records each run and each reply before it is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil.console.backup.server_backup import FederationPlaces
from fedveil.console.backup.server_files import list_run_folders, walk_files
from fedveil.console.terminal import say
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log, process_exit
from fedveil.sanitize import sanitize

__all__ = ["PurgeableReply", "PurgeableRun", "list_purgeable_replies", "list_purgeable_runs", "offer_server_purge"]

DAY = 86_400.0
_CHECKPOINT = re.compile(
    r"(checkpoint|checkpoint-before|checkpoint-damaged|best-\d{1,9})\.safetensors|\.reserve|\..*\.part"
)
_CAPTURE = "tap"
_SPOOL = re.compile(r"[0-9]{1,20}/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a site's node, and its reply
_LEAST_SPOOL_DAYS = 1.0  # younger objects may belong to a reply that a site is still sending
_MOST_STATUS = 1 << 20


@dataclass(frozen=True)
class PurgeableRun:
    """A run folder.

    Attributes:
        files: the files that a purge removes.
        bytes: what that frees; a file with two names counts once.
        last: when something in it last changed, in seconds since the epoch.
        state: as in status.json; "" if there is none that can be read.
        why: the reason why it may not be purged, or "".
    """

    folder: Path
    files: tuple[Path, ...]
    bytes: int
    last: float
    state: str
    why: str

    @property
    def days(self) -> float:
        """Return the days since something in it last changed."""
        return (time.time() - self.last) / DAY


@dataclass(frozen=True)
class PurgeableReply:
    """The objects of an incomplete reply: their folder, bytes, last change, and why they are kept, or ""."""

    folder: Path
    bytes: int
    last: float
    why: str = ""

    @property
    def days(self) -> float:
        """Return the days since something in it last changed."""
        return (time.time() - self.last) / DAY


def list_purgeable_runs(runs: Path) -> list[PurgeableRun]:
    """Return all run folders in a `run.dir`, sorted by name. Raises StateError if it cannot be read."""
    return [_seen(folder) for folder in list_run_folders(runs)]


def list_purgeable_replies(spool: Path) -> list[PurgeableReply]:
    """Return the folders of incomplete replies; a link in place of such a folder is not one."""
    replies = []
    for folder in sorted(spool.glob("*/*")):
        is_reply = _SPOOL.fullmatch(folder.relative_to(spool).as_posix()) and folder.is_dir()
        if not is_reply or folder.is_symlink() or folder.parent.is_symlink():
            continue
        if (reply := _seen_reply(folder)) is not None:
            replies.append(reply)
    return replies


def _seen_reply(folder: Path) -> PurgeableReply | None:
    """Return what there is of a reply; None if it is gone."""
    top = _stat(folder)
    if top is None:
        return None
    about, why = [top], ""
    try:
        about += [known for path in walk_files(folder) if (known := _stat(path)) is not None]
    except StateError as error:
        if _stat(folder) is None:
            return None
        why = str(error)
    last, size = max(one.st_mtime for one in about), sum(one.st_size for one in about[1:])
    return PurgeableReply(folder, size, last, why)


def offer_server_purge(
    places: FederationPlaces, names: Sequence[str], older_than: float | None, agreed: Callable[[], bool] | None
) -> int:
    """List what a purge removes, and remove it if `agreed` returns True. Return the exit code.

    Args:
        names: the runs to purge; all if empty.
        older_than: the least number of days since a run last changed; None if `names` alone select.
        agreed: None for a list alone.

    Raises:
        ConfigError: a wrong option, or an unknown run.
        StateError: the audit log cannot be written; what is not recorded yet is kept.
    """
    if not names and older_than is None:
        raise ConfigError("--older-than: expected a number of days, or --run NAME, found neither; set one of them")
    if older_than is not None and not older_than >= 0:
        raise ConfigError(f"--older-than: expected a number of days, at least 0, found {older_than}")
    there, days = list_purgeable_runs(places.runs), older_than or 0.0
    if unknown := set(names) - {run.folder.name for run in there}:
        raise ConfigError(f"--run: expected a run folder in {places.runs}, found none named {min(unknown)!r}")
    chosen = [run for run in there if (run.folder.name in names if names else run.files or run.why)]
    chosen = [run for run in chosen if older_than is None or run.days >= older_than]
    removable = [run for run in chosen if not run.why and run.files]
    least = max(days, _LEAST_SPOOL_DAYS)
    replies = [] if names else [one for one in list_purgeable_replies(places.state / "spool") if one.days >= least]
    for run in chosen:
        say(f"{'keep' if run.why else 'remove':<7}{_line(run)}{f': {sanitize(run.why, 400)}' if run.why else ''}")
    for reply in (one for one in replies if one.why):
        say(f"keep   {sanitize(reply.folder)}: {sanitize(reply.why, 400)}")
    replies = [one for one in replies if not one.why]
    for reply in replies:
        say(f"remove {sanitize(reply.folder)}, {reply.bytes:,} bytes, objects of a reply that never became complete")
    if not removable and not replies:
        say("nothing to remove")
        return 0
    if agreed is None or not agreed():
        say("nothing was removed")
        return 0 if agreed is None else 1
    removed = [run for run in removable if _purge(run, places.runs)]
    removed_replies = [reply for reply in replies if _purge_reply(reply, places.runs)]
    for run in removable:
        if run not in removed:
            say(f"keep   {_line(run)}: it began to run in the meantime")
    for reply in replies:
        if reply not in removed_replies:
            say(f"keep   {sanitize(reply.folder)}: it changed or was removed in the meantime")
    size = sum(run.bytes for run in removed) + sum(reply.bytes for reply in removed_replies)
    say(
        f"removed files of {len(removed)} runs and {len(removed_replies)} replies, {size:,} bytes; models, cards, "
        "metrics and logs are kept"
    )
    return 0


def _seen(folder: Path) -> PurgeableRun:
    run = PurgeableRun(folder, (), 0, 0.0, _state(folder), "")
    try:
        files = list(walk_files(folder))
    except StateError as error:
        return replace(run, last=folder.lstat().st_mtime, why=str(error))
    abouts = {path: about for path in files if (about := _stat(path)) is not None}
    goes = tuple(path for path in abouts if _is_removed(path.relative_to(folder)))
    sizes = {(abouts[path].st_dev, abouts[path].st_ino): abouts[path].st_size for path in goes}
    last = max((about.st_mtime for path, about in abouts.items() if path.name != process_exit.LOCK), default=0.0)
    with process_exit.hold_unused(folder, creates=False) as is_free:  # a list alone changes nothing
        why = "" if is_free else "it is running"
    return replace(run, files=goes, bytes=sum(sizes.values()), last=last, why=why)


def _stat(path: Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):  # replaced by a run in progress
        return path.lstat()
    return None


def _is_removed(path: Path) -> bool:
    return path.parts[0] == _CAPTURE if len(path.parts) > 1 else bool(_CHECKPOINT.fullmatch(path.name))


def _state(folder: Path) -> str:
    try:
        with (folder / "status.json").open("rb") as file:
            return sanitize(json.loads(file.read(_MOST_STATUS))["state"], 20)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _line(run: PurgeableRun) -> str:
    ending = "" if run.state == "completed" else ", has not completed: it cannot be resumed afterwards"
    what = f"{run.bytes:,} bytes in {len(run.files)} files"
    return f"{sanitize(run.folder.name, 80)}: {what}, last changed {run.days:.1f} days ago{ending}"


def _purge(run: PurgeableRun, runs: Path) -> bool:
    """Remove a run's files; return False if a ServerApp uses it by now. Raises StateError or OSError."""
    with process_exit.hold_unused(run.folder) as is_free:
        if not is_free or _seen_files(run.folder) != set(run.files):
            return False
        about = {"run": run.folder.name, "files": len(run.files), "bytes": run.bytes}
        audit_log.append_entry(runs / audit_log.NAME, "purged", about)
        for path in run.files:
            path.unlink(missing_ok=True)
        for folder in _empty_first(run.files, run.folder):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
    return True


def _purge_reply(reply: PurgeableReply, runs: Path) -> bool:
    """Remove a reply's objects; return False if they changed since they were listed. Raises StateError or OSError."""
    if _seen_reply(reply.folder) != reply:
        return False
    name = "/".join(reply.folder.parts[-2:])
    audit_log.append_entry(runs / audit_log.NAME, "purged", {"reply": name, "bytes": reply.bytes})
    with contextlib.suppress(FileNotFoundError):  # the server removes an object that it no longer needs
        shutil.rmtree(reply.folder)
    return not reply.folder.exists()


def _seen_files(folder: Path) -> set[Path]:
    try:
        return {path for path in walk_files(folder) if _is_removed(path.relative_to(folder))}
    except StateError:
        return set()


def _empty_first(files: Iterable[Path], top: Path) -> Iterator[Path]:
    folders = {folder for file in files for folder in file.parents if folder != top and folder.is_relative_to(top)}
    yield from sorted(folders, key=lambda folder: -len(folder.parts))
