"""A site's data sets: their names, and the mark that binds each data folder to one privacy ledger.

    <data folder>/.fedveil-data-set     {"fedveil-data-set": 2, "id": 32 hex digits,
                                         "ledger": {"tag": ..., "changes": ..., "entries": ..., "head": ...}}

The id names the data set for its prepared and held-out examples, unless the node config gives a name as `data-set`. The
privacy ledger uses neither name: `ledger` is its witness (fedveil.privacy.ledger), written before each use of examples.

| case | result |
|---|---|
| the first private run on the folder | the file is written with the ledger's tag before any example is used |
| the file names the ledger of another state folder | StateError; `fedveil site ledger adopt` moves the history |
| two state folders begin on the folder at once | the file is locked, so the second one reads the first one's tag |
| two paths or a link to one folder, or a single file in it | one id file, because links are resolved first |
| a copy of the folder, with or without the file | the state folder's ledger counts for the copy too |
| the folder is not writable, and the node config has no `data-set` | ConfigError, before any charge |
| the folder is not writable, and the node config has `data-set` | no witness is written: with that name, the site
  vouches that no other state folder uses this data and no older ledger is restored; each round's log repeats this |
| a subfolder, a parent folder, or the target of a link in the folder has the mark of another state folder's
  ledger | StateError: the two may have the same rows |
| links lead out of the folder, or it has too many entries to search | the log says what was not searched |
| a version 1 file, which names no ledger | read, then rewritten with the ledger's tag at the next private run |
| the file is damaged | StateError: nothing is charged until the site has restored the file |
| another process holds the file's lock for a minute | StateError: nothing is charged; the log mentions the wait after
  two seconds |

Only the file's owner can read it, so no other user can hold its lock. A file from an earlier build, which all users
could read, gets restricted permissions at the next private run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from fedveil.client_app.state.overlapping_data import MAX_ENTRIES, FolderScan, find_id_files, scan_folder
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger import LedgerWitness, WitnessMark
from fedveil.records.atomic_files import sync_folder, write_atomic
from fedveil.records.file_locks import lock_within

if TYPE_CHECKING:
    from fedveil.contract.task import ExampleOrigin

ID_FILE = ".fedveil-data-set"
PREPARED = ".prepared"  # in the site's state folder: prepared examples, by data set (fedveil/data/dataset_cache.py)
_VERSION = 2
_LARGEST_BYTES = 1000
_QUIET_SECONDS, _LOCK_SECONDS = 2.0, 60.0  # wait for the id file's lock: until the log mentions it, and in total

log = logging.getLogger("fedveil.private")


@dataclass(frozen=True)
class SiteDataset:
    """One of the site's data sets.

    Attributes:
        id: its name.
        data: the folder or file with its rows, as passed to the task.
    """

    id: str
    data: Path

    @classmethod
    def from_folder(cls, data: Path, given: str = "") -> SiteDataset:
        """Return the data set at `data`, named `given` unless `given` is "".

        Raises:
            ConfigError: the data set has no id, and an id cannot be written.
            StateError: the id file cannot be read.
        """
        return cls(given or _id_of(_folder(data)), data)

    def relative_origins(self, origins: Iterable[ExampleOrigin | None]) -> list[ExampleOrigin | None]:
        """Return the origins with file paths relative to the data set, so that the folder can be moved."""
        relative: dict[str, str] = {}
        moved: list[ExampleOrigin | None] = []
        for origin in origins:
            if origin is not None and origin.file not in relative:
                path = Path(origin.file)
                relative[origin.file] = path.name if path == self.data else origin.file
                if path.is_relative_to(self.data) and path != self.data:
                    relative[origin.file] = path.relative_to(self.data).as_posix()
            moved.append(None if origin is None else replace(origin, file=relative[origin.file]))
        return moved


@final
@dataclass(frozen=True)
class FolderWitness(LedgerWitness):
    """The privacy ledger's witness in a data folder's id file.

    Attributes:
        folder: the resolved data folder.
        is_writable: whether the file can be written; otherwise, it is only read.
        is_tree: whether the data is the whole folder rather than one file in it.
        siblings: the folders of the site's other data sets, whose marks are only read.
    """

    folder: Path
    is_writable: bool = True
    is_tree: bool = True
    siblings: tuple[Path, ...] = ()

    @classmethod
    def open(cls, data: Path, given: str, siblings: Iterable[Path] = ()) -> FolderWitness:
        """Return the witness for a private run on `data`. Raises ConfigError if it is neither writable nor named.

        `siblings`: the site's other data sets, whose marks must be of the same ledger, and not of a newer state of it.
        """
        beside = tuple(sorted({_folder(each) for each in siblings} - {_folder(data)}))
        witness = cls(_folder(data), os.access(_folder(data), os.W_OK), data.is_dir(), beside)
        if not witness.is_writable and not given:
            raise _no_place(witness.folder, "a folder that cannot be written")
        return witness

    @classmethod
    def find(cls, data: Path) -> FolderWitness | None:
        """Return the witness that a run without a claim must respect; None if the folder has no witness."""
        folder = _folder(data)
        if (folder / ID_FILE).exists():
            return cls(folder, os.access(folder, os.W_OK), data.is_dir())
        witness = cls(folder, is_writable=False, is_tree=data.is_dir())
        return witness if witness.read_others() else None

    @override
    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        if not self.is_writable:
            yield
            return
        _id_of(self.folder)  # before the search for others, so that state folders starting at once find each other
        with contextlib.ExitStack() as stack:
            for path in sorted((self.folder / ID_FILE, *self._others)):  # sorted, to prevent deadlocks
                stack.callback(os.close, self._locked_file(path))  # releases the lock
            yield

    def _locked_file(self, path: Path) -> int:
        """Return a locked descriptor for an id file; this folder's own is created if missing. Raises StateError."""
        while True:
            if path.parent == self.folder:
                _id_of(self.folder)
            try:
                flags = os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in place of the file must not block the site
                lock = os.open(path, flags | (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY))
            except FileNotFoundError as error:
                if path.parent == self.folder:
                    continue
                raise _no_lock(path, error) from error
            except OSError as error:
                raise _no_lock(path, error) from error
            try:
                _close_to_others(lock)
                _wait_for_lock(lock, path)
                if os.path.samestat(os.fstat(lock), path.stat()):  # else another process has replaced it meanwhile
                    return lock
            except FileNotFoundError:
                pass  # removed meanwhile; the next pass creates the file
            except OSError as error:
                os.close(lock)
                raise _no_lock(path, error) from error
            except StateError:
                os.close(lock)
                raise
            os.close(lock)

    @property
    def _others(self) -> tuple[Path, ...]:
        """Return the id files of other folders that may have the same rows, outermost first, and of other data sets."""
        found = find_id_files(self.folder, self._scan, ID_FILE)
        beside = (folder / ID_FILE for folder in self.siblings)
        return (*found, *(path for path in beside if path.exists() and path not in found))

    @property
    def _scan(self) -> FolderScan:
        """Scan the folder's tree again on each call, because a link or a mark may have been added since."""
        return scan_folder(self.folder, ID_FILE) if self.is_tree else FolderScan()

    @property
    def limits(self) -> list[str]:
        """Return the things that the witness cannot detect, as sentences."""
        scan, sentences = self._scan, list[str]()
        if self.is_absent:
            sentences.append(
                "it cannot be written, so nothing in it names this site's ledger; by setting data-set, the site has "
                "stated that no other state folder trains on it. Mount it writable to have that checked"
            )
        if scan.links:
            sentences.append(
                f"{len(scan.links)} links in it lead to other folders, and another state folder that trains on the "
                "same rows is not detected there; name the folders themselves as this site's data"
            )
        if not scan.is_whole:
            sentences.append(
                f"it has more than {MAX_ENTRIES} entries, so some were not searched for the marks of others' data sets"
            )
        return sentences

    @property
    def is_absent(self) -> bool:
        """Return whether there is no mark and a mark cannot be written, so another state folder cannot be detected."""
        return not self.is_writable and self.read() is None

    @property
    @override
    def place(self) -> str:
        return str(self.folder / ID_FILE)

    @override
    def read(self) -> WitnessMark | None:
        path = self.folder / ID_FILE
        return _mark_in(path) if path.exists() else None

    @override
    def read_others(self) -> list[tuple[str, WitnessMark]]:
        marks = ((str(path), _mark_in(path)) for path in self._others)
        return [(place, mark) for place, mark in marks if mark is not None]

    @override
    def write(self, mark: WitnessMark) -> None:
        if not self.is_writable:
            return
        path = self.folder / ID_FILE
        name = _read_whole(path)["id"] if path.exists() else secrets.token_hex(16)
        try:
            _write(path, {"fedveil-data-set": _VERSION, "id": name, "ledger": asdict(mark)}, is_new=False)
        except OSError as error:
            raise StateError(
                f"{path}: cannot write the privacy ledger's witness: {error}; free some disk space"
            ) from error


def shelf_of(state_dir: Path, data: Path, given: str = "") -> Path:
    """Return the folder with the prepared examples for the data at `data`.

    The folder is named after the data set's id or, until there is an id, after the path.
    """
    folder = _folder(data)
    try:
        name = given or _read(folder / ID_FILE)
    except (OSError, ValueError, KeyError, TypeError):
        name = f"path-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}"
    return state_dir.expanduser() / PREPARED / name


def remove_outdated(shelf: Path, files: object) -> bool:
    """Remove a data set's prepared examples if its files changed since then. Return whether any were removed.

    Otherwise the rows that a site has deleted would stay in a prepared set until newer sets replace it.

    Args:
        shelf: from `shelf_of`.
        files: names, sizes and times of the data files, as JSON values.

    Raises:
        StateError: the folder cannot be changed.
    """
    noted, now = shelf.with_name(f".{shelf.name}.files"), hashlib.sha256(json.dumps(files).encode()).hexdigest()
    try:
        if noted.is_file() and noted.read_bytes() == now.encode():
            return False
        is_outdated = shelf.is_dir() and any(shelf.iterdir())
        if is_outdated:
            shutil.rmtree(shelf)
        shelf.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(noted, now.encode())
    except OSError as error:
        raise StateError(f"{shelf}: cannot remove prepared examples: {error}; remove the folder") from error
    return is_outdated


def remove_shelves(state_dir: Path) -> None:
    """Remove the prepared examples for all data sets. Raises StateError if they cannot be removed."""
    folder = state_dir.expanduser() / PREPARED
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise StateError(f"{folder}: cannot remove the prepared examples: {error}; remove the folder") from error


def _folder(data: Path) -> Path:
    real = data.resolve()
    return real if real.is_dir() else real.parent


def _id_of(folder: Path) -> str:
    path = folder / ID_FILE
    if not path.exists():
        try:
            _write(path, {"fedveil-data-set": _VERSION, "id": secrets.token_hex(16)}, is_new=True)
        except OSError as error:
            raise _no_place(folder, type(error).__name__) from None
    return str(_read_whole(path)["id"])


def _mark_in(path: Path) -> WitnessMark | None:
    """Return the mark in an id file; None if the file has no mark. Raises StateError."""
    ledger = _read_whole(path).get("ledger")
    return None if ledger is None else WitnessMark(**ledger)


def _no_place(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"data-set: the data set's id cannot be stored in its folder, and the node config gives no name "
        f"({found}: {folder}); set data-set in the node config, and never change it"
    )


def _no_lock(path: Path, error: OSError) -> StateError:
    return StateError(
        f"{path}: cannot be locked to keep other state folders out ({type(error).__name__}: {error}); "
        "give the site's user access to it, or move the data to a file system with locks"
    )


def _close_to_others(descriptor: int) -> None:
    """Make the open id file readable only by its owner, if this user is the owner. Raises OSError."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        os.fchmod(descriptor, 0o600)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    """Lock the open id file. Raises StateError if another process holds it too long, OSError if it does not lock."""
    if lock_within(descriptor, _QUIET_SECONDS):
        return
    log.warning("privacy ledger: waiting for the lock of %s, which another process holds", path)
    if lock_within(descriptor, _LOCK_SECONDS - _QUIET_SECONDS):
        return
    raise StateError(
        f"{path}: another process has held its lock for {_LOCK_SECONDS:g} seconds. Nothing was changed, and no example "
        "was used. Wait until the other state folder's charge ends, or find the process with lslocks and end it; then "
        "start this round again"
    )


def _read(path: Path) -> str:
    """Return the id in the file. Raises OSError, ValueError, KeyError or TypeError."""
    return str(_parse(path)["id"])


def _read_whole(path: Path) -> dict[str, Any]:
    """Return the file's content. Raises StateError."""
    try:
        return _parse(path)
    except PermissionError:
        raise StateError(
            f"{path}: belongs to another user, and this user cannot read it: another site trains on this data, or this "
            "site did so as another user. Run this site as the file's owner, and stop the other one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"none that can be read ({type(error).__name__})"
    raise StateError(
        f"{path}: expected the id of a data set, version {_VERSION}, found {fault}; restore it from a backup: "
        "without it, the privacy spent on its rows is unknown"
    )


def _parse(path: Path) -> dict[str, Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block otherwise
    with os.fdopen(descriptor) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        text = file.read(_LARGEST_BYTES)
    try:
        content = dict(json.loads(text))
    except RecursionError:
        raise ValueError("brackets nested too deeply to read") from None
    if content["fedveil-data-set"] not in (1, _VERSION) or not re.fullmatch(r"[0-9a-f]{32}", content["id"]):
        raise ValueError("another version or id")
    if (mark := content.get("ledger")) is not None:
        sound = re.fullmatch(r"[0-9a-f]{32} [0-9a-f]{16}", f"{mark['tag']} {mark['head']}")
        if type(mark["entries"]) is int:  # earlier builds stored only the number, which does not identify the entries
            content["ledger"] = mark = {**mark, "entries": ""}
        is_hash = isinstance(mark["entries"], str) and re.fullmatch(r"[0-9a-f]{16}|", mark["entries"])
        if not sound or not is_hash or type(mark["changes"]) is not int or len(mark) != 4:
            raise ValueError("another witness")
        if mark["changes"] < 1:
            raise ValueError("a witness of no change")
    return content


def _write(path: Path, content: Mapping[str, Any], is_new: bool) -> None:
    """Write the file atomically; if `is_new`, an existing file from another process stays. Raises OSError."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(content))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)
        else:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)
