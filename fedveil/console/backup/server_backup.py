"""Back up a federation's folder to one file, also while its server runs, and restore it into an empty folder.

| file | how it is copied while the server runs |
|---|---|
| Flower's database | by SQLite's own backup, which reads one consistent state while the SuperLink goes on writing |
| registry | under the locks of `fedveil members` and `fedveil operators` |
| control log, audit log | under their lock, for the time of one copy |
| a run folder | only if no ServerApp uses it |

A restore writes only into an empty folder, so it never replaces a newer registry, log or database. An older registry
lists members and operators that were revoked since: the person who restores it must revoke them again.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from fedveil import paths
from fedveil.console.backup.archive import BackupArchive, open_regular, write_archive
from fedveil.console.backup.server_files import (
    CONTROL_LOG,
    DATABASE,
    RUNS,
    is_server_file,
    list_run_files,
    list_run_folders,
    walk_files,
)
from fedveil.console.provisioning import command_lock
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.errors import ConfigError, StateError
from fedveil.records import audit_log, process_exit
from fedveil.records.atomic_files import sync_folder, write_atomic

__all__ = ["FederationPlaces", "ServerBackup", "back_up_server", "is_in_use", "restore_server"]

KIND = "server"
_FOLDERS = ("registry", "server", "kits", "ca")
_PROGRAMS = frozenset({"apps", "logs", "spool"})  # in `server`: what the programs write for themselves
_BUSY_SECONDS = 60.0
_PIECE = 1 << 20


@dataclass(frozen=True)
class FederationPlaces:
    """Where a federation's files are.

    Attributes:
        folder: the folder made by `fedveil provision`.
        state: the folder with the database and the control log.
        runs: the folder with the run folders.
    """

    folder: Path
    state: Path
    runs: Path

    @classmethod
    def resolve(cls, folder: Path, state: Path | None = None, runs: Path | None = None) -> FederationPlaces:
        """Return the given folders, or the default ones. Raises ConfigError if `folder` is no federation's."""
        SiteRegistry(folder)
        return cls(folder.resolve(), (state or folder / "server").resolve(), (runs or folder / RUNS).resolve())


@dataclass(frozen=True)
class ServerBackup:
    """A backup that was written: its number of files, bytes and SHA-256, and what was left out, as sentences."""

    files: int
    bytes: int
    sha256: str
    left_out: tuple[str, ...]


def back_up_server(places: FederationPlaces, target: Path, runs: Iterable[str] | None) -> ServerBackup:
    """Write a backup of a federation, whose server may be running.

    Args:
        runs: the names of the run folders to include; None for all that are not in use.

    Raises:
        ConfigError: `target` exists or is in the folder, or a named run is missing or in use.
        StateError: a link, or a file that changes, cannot be read or is damaged.
        OSError: the backup cannot be written.
    """
    target = target.expanduser()
    if target.resolve().is_relative_to(places.folder):
        raise ConfigError(f"--to: expected a file outside of {places.folder}, found {target}; use another disk")
    folders, left_out = _chosen_runs(places, runs)
    with contextlib.ExitStack() as stack:
        paths.private_folder(target.parent)
        copies = Path(stack.enter_context(TemporaryDirectory(prefix=".fedveil-backup-", dir=target.parent)))
        files = {**_logs(places, copies), **_database(places, copies)}
        for folder in folders:
            stack.enter_context(_unused(folder))
            files |= list_run_files(folder)
        stack.enter_context(SiteRegistry.locked(places.folder))
        stack.enter_context(command_lock.hold_lock(registry_folder(places.folder) / ".operators.lock", "operators"))
        for name in (name for name in _FOLDERS if (places.folder / name).is_dir()):
            own = {path.relative_to(places.folder).as_posix(): path for path in _files_of(places.folder / name)}
            files |= {own_name: path for own_name, path in own.items() if own_name not in files}
        size, sha256 = write_archive(target, KIND, files)
    if (places.folder / "ca" / "ca.key").exists():
        left_out += ("ca/ca.key, which signs the server's certificates: keep it offline, on another machine",)
    if (places.folder / "ca" / "instruction-standby.key").exists():
        left_out += ("ca/instruction-standby.key: keep it offline, on another machine",)
    return ServerBackup(len(files), size, sha256, left_out)


def restore_server(file: Path, folder: Path) -> tuple[str, int, str]:
    """Restore a federation into a missing or empty folder; return the backup's time, its files and its SHA-256.

    Raises:
        ConfigError: the file is no sound backup, or the folder has something in it.
        OSError: a file cannot be written.
    """
    folder = folder.expanduser()
    with BackupArchive.open(file, KIND, is_server_file) as archive:
        if "registry/members.json" not in archive.files:
            raise ConfigError(f"{file}: expected a federation's registry in the backup, found none; use another copy")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"FOLDER: expected a new or empty folder, found {folder} with files in it, which may be newer than the "
                "backup; nothing was restored: move it away and keep it"
            )
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if (free := shutil.disk_usage(existing).free) < archive.size:
            raise ConfigError(f"{folder}: expected {archive.size:,} free bytes for the backup, found {free:,}")
        paths.private_folder(folder)
        # The registry comes last: without it, no command takes the folder for a federation's.
        for name in sorted(archive.files, key=lambda name: (name.startswith("registry/"), name)):
            archive.extract(name, folder / name)
            if archive.files[name].is_public:
                (folder / name).chmod(0o644)
        sync_folder(folder)
        SiteRegistry(folder)  # raises an error if it is damaged
        return archive.made, len(archive.files), archive.sha256


def is_in_use(folder: Path) -> bool:
    """Return whether a ServerApp uses a run folder."""
    try:
        with _unused(folder):
            return False
    except ConfigError:
        return True


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Keep any ServerApp out of a run folder. Raises ConfigError if one is in it."""
    with process_exit.hold_unused(folder) as is_free:
        if not is_free:
            raise ConfigError(f"{folder}: expected a run that has ended, found one that is running; wait for it")
        yield


def _chosen_runs(places: FederationPlaces, runs: Iterable[str] | None) -> tuple[list[Path], tuple[str, ...]]:
    there = {folder.name: folder for folder in list_run_folders(places.runs)}
    if runs is None:
        used = sorted(name for name, folder in there.items() if is_in_use(folder))
        left_out = tuple(f"run {name}, which is running" for name in used)
        return [folder for name, folder in there.items() if name not in used], left_out
    names = list(dict.fromkeys(runs))
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(f"--run: expected a run folder in {places.runs}, found none named {unknown[0]!r}")
    count = len(there) - len(names)
    return [there[name] for name in names], ((f"{count} run folders that were not named",) if count else ())


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of one of the federation's folders that belong in a backup. Raises StateError for a link."""
    for path in walk_files(folder, _PROGRAMS):
        name = path.relative_to(folder.parent).as_posix()
        if is_server_file(name) and path.name != DATABASE:
            yield path


def _logs(places: FederationPlaces, copies: Path) -> dict[str, Path]:
    """Copy the current files of the logs, each under its lock; earlier files do not change."""
    files: dict[str, Path] = {}
    for log, folder in ((places.state / CONTROL_LOG, "server"), (places.runs / audit_log.NAME, RUNS)):
        if not log.exists():
            continue
        with audit_log.locked_log(log), open_regular(log) as data:
            write_atomic(copies / log.name, iter(lambda data=data: data.read(_PIECE), b""))  # type: ignore[misc]
            files[f"{folder}/{log.name}"] = copies / log.name
            files |= {f"{folder}/{part.name}": part for part in audit_log.list_log_files(log) if part != log}
    return files


def _database(places: FederationPlaces, copies: Path) -> dict[str, Path]:
    """Copy Flower's database by SQLite's own backup. Raises StateError if it is damaged or stays locked."""
    source, copy = places.state / DATABASE, copies / DATABASE
    if not source.exists():
        return {}
    uri = f"file:{quote(str(source))}?mode=ro"
    try:
        with (
            contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS)) as database,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            database.backup(target)
            (verdict,) = target.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise StateError(
            f"{source}: expected Flower's database, found one that cannot be copied ({verdict}); stop the server, and "
            "see docs/incidents.md for a damaged database"
        )
    copy.chmod(0o600)
    return {f"server/{DATABASE}": copy}
