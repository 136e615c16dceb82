"""A site's data sets: their names, and the mark that binds a site's data to one privacy ledger (data_marks.py).

The mark's id names the data set for its prepared and held-out examples. The node config's `data-set` takes its place.
The privacy ledger uses neither: the mark is its witness (fedveil.privacy.ledger), written before each use of examples.

| case | result |
|---|---|
| the first private run on the data | its folder gets the mark with the ledger's tag, before any example is used |
| the data is one file, and the task reads nothing beside it | the file gets the mark, and not its folder |
| the data is one file, and the task may read others, such as pictures | as if the file's folder were the data |
| the mark names the ledger of another state folder | StateError; `fedveil site ledger adopt` moves the history |
| two state folders begin on the data at once | the mark is locked: the second reads the first one's tag |
| two paths, or a link, to the same data | one mark, because links are resolved first |
| a copy of the data, with the mark or without it | the state folder's ledger counts for it too |
| the folder is not writable, and the node config has no `data-set` | ConfigError, before any charge |
| the folder is not writable, and the node config has `data-set` | no witness is written: that name is the site's word
  that no other state folder uses this data, and that nobody restores an older ledger; the log says so in each round |
| data in this data, a folder around it, or the target of a link in it has the mark of another state folder's ledger; or
  a marked file near it may have another name in it (overlapping_data.py) | StateError: they may have the same rows |
| links lead out of the folder, or it has too many entries to be looked through | the log says what was not looked for |
| a mark of version 1, which names no ledger | read, and written with the ledger's tag at the next private run |
| the mark is damaged | StateError: nothing is charged until the site has restored it |
| the mark's lock is held for a minute by another process | StateError: nothing is charged; the log says so after two
  seconds |

A mark of an earlier build, which all users could read, is closed at the next private run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from typing_extensions import override

from fedveil.client_app.state.data_marks import ID_FILE, create_mark, mark_path, read_mark, write_mark
from fedveil.client_app.state.overlapping_data import MAX_ENTRIES, find_marks, scan_data
from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger import LedgerWitness, NearbyMark, WitnessMark
from fedveil.records.file_locks import lock_within

if TYPE_CHECKING:
    from fedveil.contract.task import ExampleOrigin

PREPARED = ".prepared"  # below the site's state folder: prepared examples, by data set (fedveil/data/dataset_cache.py)
_QUIET_SECONDS, _LOCK_SECONDS = 2.0, 60.0  # of waiting for the id file's lock: before the log says so, and in all

log = logging.getLogger("fedveil.private")


@dataclass(frozen=True)
class SiteDataset:
    """One data set of the site.

    Attributes:
        id: its name.
        data: the folder or file of its rows, as passed to the task.
    """

    id: str
    data: Path

    @classmethod
    def from_folder(cls, data: Path, given: str = "") -> SiteDataset:
        """Return the data set at `data`, named `given` unless that is "".

        Raises:
            ConfigError: it has no id, and none can be written.
            StateError: its id file cannot be read.
        """
        return cls(given or read_mark(_create(_folder(data))).id, data)

    def relative_origins(self, origins: Iterable[ExampleOrigin | None]) -> list[ExampleOrigin | None]:
        """Return the origins with each file's path below the data set, so that the folder may move."""
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
class DataWitness(LedgerWitness):
    """The witness of the privacy ledger in the mark of a site's data.

    Attributes:
        data: the resolved folder, or the resolved file if the mark is to be that file's alone.
        is_writable: whether the mark can be written; otherwise it is only read.
    """

    data: Path
    is_writable: bool = True

    @classmethod
    def open(cls, data: Path, given: str, is_file_alone: bool = False) -> DataWitness:
        """Return the witness for a private run on `data`.

        Args:
            given: the node config's `data-set`.
            is_file_alone: whether nothing else is read if the data is a file, so that its folder needs no mark.

        Raises:
            ConfigError: no mark can be written, and `given` is "".
        """
        witness = cls._at(data, is_file_alone)
        if not witness.is_writable and not given:
            raise _no_place(witness.folder, "a folder that cannot be written")
        return witness

    @classmethod
    def find(cls, data: Path, is_file_alone: bool = False) -> DataWitness | None:
        """Return the witness that a run without a claim must respect; None if the data has none."""
        witness = cls._at(data, is_file_alone)
        if witness.path.exists():
            return witness
        witness = replace(witness, is_writable=False)
        return witness if witness.read_others("") else None

    @classmethod
    def find_marked(cls, data: Path, given: str) -> DataWitness:
        """Return the witness in the mark that a person means by `data`: of that file, else of its folder."""
        is_file_alone = not data.is_dir() and mark_path(data.resolve()).exists()
        return cls.open(data, given, is_file_alone)

    @classmethod
    def _at(cls, data: Path, is_file_alone: bool) -> DataWitness:
        folder = _folder(data)
        return cls(data.resolve() if is_file_alone else folder, os.access(folder, os.W_OK))

    @property
    def path(self) -> Path:
        """Return the mark's place."""
        return mark_path(self.data)

    @property
    def folder(self) -> Path:
        """Return the folder of the mark."""
        return self.path.parent

    @override
    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        if not self.is_writable:
            yield
            return
        _create(self.data)  # before the others are looked for: of two state folders that begin at once, one is found
        with contextlib.ExitStack() as stack:
            for path in sorted((self.path, *self._find_others(""))):  # so that no two wait for each other
                stack.callback(os.close, self._locked_file(path))  # which releases it
            yield

    def _locked_file(self, path: Path) -> int:
        """Return a locked descriptor of a mark; this data's own is created if it is gone. Raises StateError."""
        while True:
            if path == self.path:
                _create(self.data)
            try:
                flags = os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place must not hold the site
                lock = os.open(path, flags | (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY))
            except FileNotFoundError as error:
                if path == self.path:
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
                pass  # removed meanwhile: the next pass creates it
            except OSError as error:
                os.close(lock)
                raise _no_lock(path, error) from error
            except StateError:
                os.close(lock)
                raise
            os.close(lock)

    def _find_others(self, tag: str) -> tuple[Path, ...]:
        """Return the marks of other data that may have the same rows, outermost first."""
        mark = self.read()
        return find_marks(self.data, scan_data(self.data), tag or (mark.tag if mark is not None else ""))

    @property
    def limits(self) -> list[str]:
        """Return what the witness cannot find, as sentences."""
        scan, sentences = scan_data(self.data), list[str]()
        if self.is_absent:
            sentences.append(
                "it cannot be written, so nothing in it names this site's ledger, and data-set stands for the site's "
                "word that no other state folder trains on it; mount it writable to have that checked"
            )
        if scan.links:
            sentences.append(
                f"{len(scan.links)} links in it lead to other folders, where another state folder that trains on the "
                "same rows is not found; name their own folder as this site's data"
            )
        if not scan.is_whole:
            sentences.append(
                f"it has more than {MAX_ENTRIES} entries, so not all were searched for others' data folders"
            )
        return sentences

    @property
    def is_absent(self) -> bool:
        """Return whether there is no mark and none can be written, so that another state folder cannot be found."""
        return not self.is_writable and self.read() is None

    @property
    @override
    def place(self) -> str:
        return str(self.path)

    @override
    def read(self) -> WitnessMark | None:
        return read_mark(self.path).ledger if self.path.exists() else None

    @override
    def read_others(self, tag: str) -> list[NearbyMark]:
        marks = ((path, read_mark(path)) for path in self._find_others(tag))
        return [
            NearbyMark(str(path), str(path.parent / mark.file), mark.ledger)
            for path, mark in marks
            if mark.ledger is not None
        ]

    @override
    def write(self, mark: WitnessMark) -> None:
        if not self.is_writable:
            return
        try:
            before = read_mark(_create(self.data))
            if before.file:
                with contextlib.suppress(FileNotFoundError):  # a file that is gone keeps its last version
                    before = before.add_version(self.data)
            write_mark(self.path, replace(before, ledger=mark))
        except OSError as error:
            raise StateError(f"{self.path}: cannot write the privacy ledger's witness: {error}; free space") from error


def shelf_of(state_dir: Path, data: Path, given: str = "") -> Path:
    """Return the folder of the prepared examples of the data at `data`.

    It is named by the data set's id, or by the path until the data set has an id.
    """
    folder = _folder(data)
    try:
        name = given or read_mark(folder / ID_FILE).id
    except StateError:
        name = f"path-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}"
    return state_dir.expanduser() / PREPARED / name


def remove_shelves(state_dir: Path) -> None:
    """Remove the prepared examples of all data sets. Raises StateError if they cannot be removed."""
    folder = state_dir.expanduser() / PREPARED
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise StateError(f"{folder}: cannot remove prepared examples: {error}; remove the folder") from error


def _folder(data: Path) -> Path:
    real = data.resolve()
    return real if real.is_dir() else real.parent


def _create(data: Path) -> Path:
    """Return the place of the mark of resolved data, which is created if it has none. Raises ConfigError."""
    try:
        return create_mark(data)
    except OSError as error:
        raise _no_place(data if data.is_dir() else data.parent, type(error).__name__) from None


def _no_place(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"data-set: expected a name in the node config, or a data folder in which its id can be stored, found neither "
        f"({found}: {folder}); set data-set in the node config, and never change it"
    )


def _no_lock(path: Path, error: OSError) -> StateError:
    return StateError(
        f"{path}: expected a file that can be locked against other state folders, found {type(error).__name__}: "
        f"{error}; give the site's user access to it, or move the data to a file system with locks"
    )


def _close_to_others(descriptor: int) -> None:
    """Make the open id file readable only by its owner, if this user is the owner. Raises OSError."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        os.fchmod(descriptor, 0o600)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    """Lock the open id file. Raises StateError if another process holds it for too long, OSError if it has no locks."""
    if lock_within(descriptor, _QUIET_SECONDS):
        return
    log.warning("privacy ledger: waiting for the lock of %s, which another process holds", path)
    if lock_within(descriptor, _LOCK_SECONDS - _QUIET_SECONDS):
        return
    raise StateError(
        f"{path}: expected its lock within {_LOCK_SECONDS:g} seconds, found that another process holds it; nothing was "
        "changed and no example was used: let a charge of another state folder end, or find the process with lslocks "
        "and end it; then start this round again"
    )
