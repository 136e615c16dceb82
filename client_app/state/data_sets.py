"""A site's data sets: their names, and the mark that binds a data folder to one privacy ledger.

    <data folder>/.fedveil-data-set     {"fedveil-data-set": 2, "id": 32 hex digits,
                                         "ledger": {"tag": ..., "changes": ..., "entries": ..., "head": ...}}

The id names the data set for its prepared and held-out examples. The node config's `data-set` takes its place. The
privacy ledger uses neither: `ledger` is its witness (fedveil.privacy.ledger), written before each use of examples.

| case | result |
|---|---|
| the first private run on the folder | the folder gets the file with the ledger's tag, before any example is used |
| the file names the ledger of another state folder | StateError; `fedveil site ledger adopt` moves the history |
| two state folders begin on the folder at once | the file is locked: the second reads the first one's tag |
| two paths, or a link, to one folder; the data is one file of it | one id file, because links are resolved first |
| a copy of the folder, with the file or without it | the state folder's ledger counts for it too |
| the folder is not writable, and the node config has no `data-set` | ConfigError, before any charge |
| the folder is not writable, and the node config has `data-set` | no witness is written: that name is the site's word
  that no other state folder uses this data, and that nobody restores an older ledger; the log says so in each round |
| a file of version 1, which names no ledger | read, and written with the ledger's tag at the next private run |
| the file is damaged | StateError: nothing is charged until the site has restored it |
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from typing_extensions import override

from fedveil.errors import ConfigError, StateError
from fedveil.privacy.ledger import LedgerWitness, WitnessMark
from fedveil.records.atomic_files import sync_folder

if TYPE_CHECKING:
    from fedveil.contract.task import ExampleOrigin

ID_FILE = ".fedveil-data-set"
PREPARED = ".prepared"  # below the site's state folder: prepared examples, by data set (fedveil/data/dataset_cache.py)
_VERSION = 2
_LARGEST_BYTES = 1000


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
        return cls(given or _id_of(_folder(data)), data)

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
class FolderWitness(LedgerWitness):
    """The witness of the privacy ledger in a data folder's id file.

    Attributes:
        folder: the resolved data folder.
        is_writable: whether the file can be written; otherwise it is only read.
    """

    folder: Path
    is_writable: bool = True

    @classmethod
    def open(cls, data: Path, given: str) -> FolderWitness:
        """Return the witness for a private run on `data`. Raises ConfigError if a folder without name holds none."""
        witness = cls(_folder(data), os.access(_folder(data), os.W_OK))
        if not witness.is_writable and not given:
            raise _no_place(witness.folder, "a folder that cannot be written")
        return witness

    @classmethod
    def find(cls, data: Path) -> FolderWitness | None:
        """Return the witness that a run without a claim must respect; None if the folder has none."""
        folder = _folder(data)
        return cls(folder, os.access(folder, os.W_OK)) if (folder / ID_FILE).exists() else None

    @override
    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        if not self.is_writable:
            yield
            return
        lock = self._locked_file()
        try:
            yield
        finally:
            os.close(lock)  # releases it

    def _locked_file(self) -> int:
        """Return a locked descriptor of the id file, which is created if there is none. Raises StateError."""
        path = self.folder / ID_FILE
        while True:
            _id_of(self.folder)
            try:
                lock = os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _no_lock(path, error) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock), path.stat()):  # else another process has replaced it meanwhile
                    return lock
            except FileNotFoundError:
                pass  # removed meanwhile: the next pass creates it
            except OSError as error:
                os.close(lock)
                raise _no_lock(path, error) from error
            os.close(lock)

    @property
    def is_absent(self) -> bool:
        """Return whether there is no mark and none can be written, so that another state folder cannot be found."""
        return not self.is_writable and self.read() is None

    @property
    @override
    def place(self) -> str:
        return str(self.folder / ID_FILE)

    @override
    def read(self) -> WitnessMark | None:
        path = self.folder / ID_FILE
        if not path.exists():
            return None
        ledger = _read_whole(path).get("ledger")
        return None if ledger is None else WitnessMark(**ledger)

    @override
    def write(self, mark: WitnessMark) -> None:
        if not self.is_writable:
            return
        path = self.folder / ID_FILE
        name = _read_whole(path)["id"] if path.exists() else secrets.token_hex(16)
        try:
            _write(path, {"fedveil-data-set": _VERSION, "id": name, "ledger": asdict(mark)}, is_new=False)
        except OSError as error:
            raise StateError(f"{path}: cannot write the privacy ledger's witness: {error}; free space") from error


def shelf_of(state_dir: Path, data: Path, given: str = "") -> Path:
    """Return the folder of the prepared examples of the data at `data`.

    It is named by the data set's id, or by the path until the data set has an id.
    """
    folder = _folder(data)
    try:
        name = given or _read(folder / ID_FILE)
    except (OSError, ValueError, KeyError, TypeError):
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


def _id_of(folder: Path) -> str:
    path = folder / ID_FILE
    if not path.exists():
        try:
            _write(path, {"fedveil-data-set": _VERSION, "id": secrets.token_hex(16)}, is_new=True)
        except OSError as error:
            raise _no_place(folder, type(error).__name__) from None
    return str(_read_whole(path)["id"])


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


def _read(path: Path) -> str:
    """Return the id in the file. Raises OSError, ValueError, KeyError or TypeError."""
    return str(_parse(path)["id"])


def _read_whole(path: Path) -> dict[str, Any]:
    """Return the file's content. Raises StateError."""
    try:
        return _parse(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"none that can be read ({type(error).__name__})"
    raise StateError(
        f"{path}: expected the id of a data set, version {_VERSION}, found {fault}; restore it from a backup: "
        "without it the privacy spent on its rows is unknown"
    )


def _parse(path: Path) -> dict[str, Any]:
    with path.open() as file:
        text = file.read(_LARGEST_BYTES)
    try:
        content = dict(json.loads(text))
    except RecursionError:
        raise ValueError("brackets nested too deeply to read") from None
    if content["fedveil-data-set"] not in (1, _VERSION) or not re.fullmatch(r"[0-9a-f]{32}", content["id"]):
        raise ValueError("another version or id")
    if (mark := content.get("ledger")) is not None:
        sound = re.fullmatch(r"[0-9a-f]{32} [0-9a-f]{16}", f"{mark['tag']} {mark['head']}")
        if type(mark["entries"]) is int:  # earlier builds stored their number, which does not say which they were
            content["ledger"] = mark = {**mark, "entries": ""}
        is_hash = isinstance(mark["entries"], str) and re.fullmatch(r"[0-9a-f]{16}|", mark["entries"])
        if not sound or not is_hash or type(mark["changes"]) is not int or len(mark) != 4:
            raise ValueError("another witness")
        if mark["changes"] < 1:
            raise ValueError("a witness of no change")
    return content


def _write(path: Path, content: Mapping[str, Any], is_new: bool) -> None:
    """Write the file atomically; if it is to be new, another process's file stays. Raises OSError."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
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
