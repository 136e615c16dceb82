"""Find and read the files behind the pages, within bounds. A name from a URL is looked up, never used as a path."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fedveil.attacks.audit import findings
from fedveil.console.runs import per_site
from fedveil.console.runs.run_reader import RunView, load_run, status_of
from fedveil.errors import StateError
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

MOST_RUNS = 200
MOST_BYTES = 64 << 20  # maximum bytes in one file
MOST_LINES = 200  # maximum log lines to show
_MOST_ENTRIES = 10_000  # maximum folder entries to inspect
_TAIL_BYTES = 1 << 20
_STATUS = ("status.json", "config.json")
_READ = (
    *_STATUS,
    "progress.json",
    "metrics.jsonl",
    "disclosure.jsonl",
    "resumes.jsonl",
    findings.FILE,
    findings.PICTURES,
)
_NUMBER = "flower-run"
_FINAL, _MOST_MODEL_FILES = "final", 200  # the model's folder, and the files of it that are listed
_CARD_FILES = ("final/privacy.json", "final/privacy.dsse.json")
Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class RunLocation:
    """A run's folder.

    Attributes:
        key: its name in a URL: the folder's name, with its group's name and ":" in front if it is in a group.
        federation: the run's federation, if several are shown; the key then begins with its name and ":".
    """

    key: str
    folder: Path
    changed: float
    federation: str = ""

    @property
    def name(self) -> str:
        """Return the key without the federation."""
        return self.key.removeprefix(f"{self.federation}:") if self.federation else self.key


def find_runs(folders: Mapping[str, Path]) -> dict[str, RunLocation]:
    """Return the runs in these folders and their subfolders, by key, newest first, without following links.

    `folders`: run folders by federation, which is "" if there is only one folder.
    """
    runs: dict[str, RunLocation] = {}
    for federation, folder in folders.items():
        for child in _folders(folder):
            for place in [child] if _is_run(child) else [below for below in _folders(child) if _is_run(below)]:
                key = ":".join((*filter(None, [federation]), *place.relative_to(folder).parts))
                changed = max(about.st_mtime for about in _regular(place, _STATUS).values())
                runs.setdefault(key, RunLocation(key, place, changed, federation))
    newest = sorted(runs.values(), key=lambda place: (-place.changed, place.key))
    return {place.key: place for place in newest[:MOST_RUNS]}


def find_logs(folders: Mapping[str, Path], places: Iterable[RunLocation]) -> dict[str, tuple[str, Path]]:
    """Return the audit logs next to the runs: federation and file, by the log's name in a URL."""
    beside = [(place.federation, place.folder.parent) for place in places]
    logs = {}
    for federation, parent in dict.fromkeys([*folders.items(), *beside]):
        name = "runs" if parent == folders[federation] else parent.name
        logs[f"{federation}:{name}" if federation else name] = federation, parent / audit_log.NAME
    return {name: (federation, file) for name, (federation, file) in logs.items() if file_stamps([file])}


def find_run(place: RunLocation) -> RunView:
    """Load the run at `place`. Raises StateError if it cannot be read or is too large."""
    for name, about in _regular(place.folder, _READ).items():
        require_bounded(place.folder / name, about.st_size)
    try:
        run = load_run(place.folder)
        # Evaluate the run's lines once here, so that a page with many runs detects a damaged run.
        for name in run.final:
            run.curve(name)
        (
            per_site.records_by_site(run),
            per_site.absent_since(run),
            run.uploaded,
            run.rounds_done,
            run.seconds,
            run.upload_bytes,
            run.download_bytes,
        )
        return run
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise StateError(f"{place.folder}: expected a run's files, found {error!r}; try fedveil report") from None


def flower_number(place: RunLocation) -> str:
    """Return Flower's run ID for the run; "" if its folder has none."""
    if not _regular(place.folder, (_NUMBER,)):
        return ""
    try:
        with (place.folder / _NUMBER).open("rb") as file:
            return sanitize(file.read(40).decode("ascii", "replace").strip(), 40)
    except OSError:
        return ""


def with_status(place: RunLocation, found: RunView) -> RunView:
    """Return `found` with its current status, which can change without a write, when a process dies."""
    return replace(found, status=status_of(place.folder))


def require_bounded(file: Path, size: int) -> None:
    """Raise StateError for a file that is too large to read here."""
    if size > MOST_BYTES:
        raise StateError(f"{file.name}: expected at most {MOST_BYTES:,} bytes for display here, found {size:,}")


def file_stamps(files: Iterable[Path]) -> Stamp:
    """Return the name, size and time of each regular file in `files`; these change with the content."""
    stamps = []
    for file in files:
        if file.name in (about := _regular(file.parent, (file.name,))):
            stamps.append((str(file), about[file.name].st_size, about[file.name].st_mtime_ns))
    return tuple(stamps)


def run_stamp(place: RunLocation) -> Stamp:
    """Return the stamp for a run's files and its card."""
    return file_stamps(place.folder / name for name in (*_READ, *_CARD_FILES))


def model_folder(place: RunLocation) -> Path | None:
    """Return the folder of the run's model; None if there is none, or if it is a link."""
    folder = place.folder / _FINAL
    try:
        return folder if stat.S_ISDIR(folder.lstat().st_mode) else None
    except OSError:
        return None


def model_files(place: RunLocation) -> dict[str, int]:
    """Return the name and the bytes of each regular file of the run's model, sorted; at most 200, links left out."""
    folder = model_folder(place)
    if folder is None:
        return {}
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))[:_MOST_MODEL_FILES]
    return {name: about.st_size for name, about in _regular(folder, names).items()}


def tail_log(file: Path, most: int = MOST_LINES) -> list[dict[str, Any]]:
    """Return a log's last lines, unverified, newest first: at most `most` lines from the last 1 MiB."""
    with file.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_BYTES))
        lines = log.read(_TAIL_BYTES).split(b"\n")[0 if size <= _TAIL_BYTES else 1 : -1]
    return [_line(line) for line in reversed(lines[-most:])]


def _line(line: bytes) -> dict[str, Any]:
    try:
        about = json.loads(line)
    except (ValueError, RecursionError):
        about = None
    if isinstance(about, dict):
        return about
    return {"event": "not a log line", "reason": line[:200].decode("ascii", "replace")}


def _folders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    yield folder / entry.name
    except FileNotFoundError:
        return


def _is_run(folder: Path) -> bool:
    return bool(_regular(folder, _STATUS))


def _regular(folder: Path, names: Iterable[str]) -> dict[str, os.stat_result]:
    file_stats = {}
    for name in names:
        try:
            about = (folder / name).lstat()
        except OSError:  # missing, or not readable
            continue
        if stat.S_ISREG(about.st_mode):
            file_stats[name] = about
    return file_stats
