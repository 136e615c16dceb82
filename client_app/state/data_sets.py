"""Names of a site's data sets, for which the site's privacy ledger records charges.

    <data folder>/.fedveil-data-set     {"fedveil-data-set": 1, "id": 32 hex digits}

| case | the id of the data set |
|---|---|
| the node config has `data-set` | that name |
| the data folder contains an id file | the id in it |
| neither, at the first private client round | 32 random hex digits, written into the folder before any charge |
| neither, and the folder is not writable | none: ConfigError, before any charge |
| two paths, or a symbolic link, to one folder | one id, because links are resolved first |
| the data is one file | the id of its folder, so that both paths to the file's rows name one data set |
| the id file is damaged | StateError: nothing is charged until the site has restored it |

A record is a row of a data set: (id, file in the data folder, row number). It contains nothing that a server sends: no
column, no class name, no spelling of a path. A copy of the folder contains the id, and with it the privacy spent so
far. Rows with equal content are different records; `docs/deploy/site-policy.md` explains the effect on a guarantee.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, StateError

if TYPE_CHECKING:
    from fedveil.contract.task import ExampleOrigin
    from fedveil.privacy.ledger import Record

ID_FILE = ".fedveil-data-set"
PREPARED = ".prepared"  # below the site's state folder: prepared examples, by data set (fedveil/data/dataset_cache.py)
_VERSION = 1
_LARGEST_BYTES = 1000


@dataclass(frozen=True)
class ChargedDataset:
    """One data set of the site.

    Attributes:
        id: its name in the ledger.
        data: the folder or file of its rows, as passed to the task.
    """

    id: str
    data: Path

    @classmethod
    def from_folder(cls, data: Path, given: str = "") -> ChargedDataset:
        """Return the data set at `data`, named `given` unless that is "".

        Raises:
            ConfigError: it has no id, and none can be written.
            StateError: its id file cannot be read.
        """
        return cls(given or _id_of(_folder(data)), data)

    def records(self, origins: Iterable[ExampleOrigin | None]) -> Iterator[Record]:
        """Yield the records of rows with these origins. Raises ConfigError for a row from elsewhere."""
        last, name = "", ""  # most examples are in the same file as the previous one
        for origin in origins:
            if origin is None or not name or origin.file != last:
                name = self._name(origin)
            assert origin is not None
            last = origin.file
            yield self.id, name, origin.row

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

    def _name(self, origin: ExampleOrigin | None) -> str:
        if origin is not None and self.data.is_file() and Path(origin.file) == self.data:
            return self.data.resolve().name
        if origin is None or not Path(origin.file).is_relative_to(self.data):
            raise ConfigError(
                f"origin: expected every row to name its file below {self.data}, found {origin}; a private run needs "
                "a task whose examples have an origin"
            )
        return Path(origin.file).relative_to(self.data).as_posix()


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


def _folder(data: Path) -> Path:
    real = data.resolve()
    return real if real.is_dir() else real.parent


def _id_of(folder: Path) -> str:
    path = folder / ID_FILE
    if not path.exists():
        _write_new(path)
    try:
        return _read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"none that can be read ({type(error).__name__})"
    raise StateError(
        f"{path}: expected the id of a data set, version {_VERSION}, found {fault}; restore it from a backup: "
        "without it the privacy spent on its rows is unknown"
    )


def _read(path: Path) -> str:
    with path.open() as file:
        text = file.read(_LARGEST_BYTES)
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("brackets nested too deeply to read") from None
    if content["fedveil-data-set"] != _VERSION or not re.fullmatch(r"[0-9a-f]{32}", content["id"]):
        raise ValueError("another version or id")
    return str(content["id"])


def _write_new(path: Path) -> None:
    """Write an id file atomically, unless another process has just written one."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    text = json.dumps({"fedveil-data-set": _VERSION, "id": secrets.token_hex(16)})
    try:
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path)
        except FileExistsError:
            return
        finally:
            partial.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(
            "data-set: expected a name in the node config, or a data folder in which its id can be stored, found "
            f"neither ({type(error).__name__} in {path.parent}); set data-set in the node config, and never change "
            "it"
        ) from None
