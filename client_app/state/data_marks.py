"""The mark of a site's data: a small file that names the data set and the privacy ledger that has charged it.

    <data folder>/.fedveil-data-set          of a folder: of all that lies in it
    <folder>/.fedveil-data-set.FILE.mark     of the data file FILE alone

    {"fedveil-data-set": 2, "id": 32 hex digits,
     "ledger": {"tag": ..., "changes": ..., "entries": ..., "head": ...},
     "file": FILE, "versions": [[bytes, nanoseconds of its last change, SHA-256], ...]}     the last line of a file only

`versions` are those in which the file was charged, so that it is known again under another name, and copies of it are.
Only its owner can read a mark, so no other user can hold its lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.errors import StateError
from fedveil.privacy.ledger import WitnessMark
from fedveil.records.atomic_files import sync_folder

__all__ = [
    "ID_FILE",
    "DataMark",
    "FileVersion",
    "create_mark",
    "hash_file",
    "is_mark",
    "is_mark_of_file",
    "mark_path",
    "read_mark",
    "write_mark",
]

ID_FILE = ".fedveil-data-set"
_ENDING = ".mark"  # none of a data file, so that no reader of a folder takes it for one
_LONGEST = 200  # bytes of a file's name that stands in its mark's name; of a longer one, a hash does
_VERSION = 2
_LARGEST_BYTES = 4000
_MOST_VERSIONS = 16

FileVersion = tuple[int, int, str]


@dataclass(frozen=True)
class DataMark:
    """The content of a mark.

    Attributes:
        id: of the data set.
        ledger: what is known of the ledger that has charged the data; None if none has.
        file: the data file's name; "" for a folder.
        versions: size, time of last change and SHA-256 of the file when it was charged; the newest last.
    """

    id: str
    ledger: WitnessMark | None = None
    file: str = ""
    versions: tuple[FileVersion, ...] = ()

    def add_version(self, data: Path) -> DataMark:
        """Return the mark with the present version of its file. Raises OSError."""
        status = os.stat(data)
        if self.versions and self.versions[-1][:2] == (status.st_size, status.st_mtime_ns):
            return self
        now = (status.st_size, status.st_mtime_ns, hash_file(data))
        return replace(self, versions=(*self.versions, now)[-_MOST_VERSIONS:])


def hash_file(path: Path | str) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mark_path(data: Path) -> Path:
    """Return the place of the mark of a resolved data folder, or of a resolved data file."""
    if data.is_dir():
        return data / ID_FILE
    name = os.fsencode(data.name)
    part = data.name if len(name) <= _LONGEST else hashlib.sha256(name).hexdigest()
    return data.with_name(f"{ID_FILE}.{part}{_ENDING}")


def is_mark(name: str) -> bool:
    """Return whether a file of this name is a mark, of a folder or of a file."""
    return name == ID_FILE or is_mark_of_file(name)


def is_mark_of_file(name: str) -> bool:
    """Return whether a file of this name is the mark of a data file."""
    return name.startswith(f"{ID_FILE}.") and name.endswith(_ENDING)


def read_mark(path: Path) -> DataMark:
    """Return the content of a mark. Raises StateError."""
    try:
        return _parse(path)
    except PermissionError:
        raise StateError(
            f"{path}: expected a file that this user can read, found one of another user, so another site trains on "
            "this data, or this one did as another user; run this site as the file's owner, and the other one no more"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"none that can be read ({type(error).__name__})"
    raise StateError(
        f"{path}: expected the id of a data set, version {_VERSION}, found {fault}; restore it from a backup: "
        "without it the privacy spent on its rows is unknown"
    )


def create_mark(data: Path) -> Path:
    """Write a new mark for a resolved folder or file, unless it has one; return its path. Raises OSError."""
    path = mark_path(data)
    if not path.exists():
        mark = DataMark(secrets.token_hex(16))
        _write(path, mark if data.is_dir() else replace(mark, file=data.name).add_version(data), is_new=True)
    return path


def write_mark(path: Path, mark: DataMark) -> None:
    """Replace the mark at `path`. Raises OSError."""
    _write(path, mark, is_new=False)


def _parse(path: Path) -> DataMark:
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
    name, versions = "", list[Any]()
    if path.name != ID_FILE:
        name, versions = content["file"], content["versions"]
        if Path(name).name != name or mark_path(path.with_name(name)) != path:
            raise ValueError("the mark of another file")
    ledger = content.get("ledger")
    return DataMark(content["id"], None if ledger is None else _parse_ledger(ledger), name, _parse_versions(versions))


def _parse_ledger(mark: dict[str, Any]) -> WitnessMark:
    sound = re.fullmatch(r"[0-9a-f]{32} [0-9a-f]{16}", f"{mark['tag']} {mark['head']}")
    if type(mark["entries"]) is int:  # earlier builds stored their number, which does not say which they were
        mark = {**mark, "entries": ""}
    is_hash = isinstance(mark["entries"], str) and re.fullmatch(r"[0-9a-f]{16}|", mark["entries"])
    if not sound or not is_hash or type(mark["changes"]) is not int or len(mark) != 4:
        raise ValueError("another witness")
    if mark["changes"] < 1:
        raise ValueError("a witness of no change")
    return WitnessMark(**mark)


def _parse_versions(versions: Sequence[Sequence[Any]]) -> tuple[FileVersion, ...]:
    parsed = tuple((size, changed, digest) for size, changed, digest in versions)
    is_sound = all(type(size) is type(changed) is int for size, changed, _ in parsed)
    if len(parsed) > _MOST_VERSIONS or not is_sound or not all(re.fullmatch("[0-9a-f]{64}", one[2]) for one in parsed):
        raise ValueError("other versions")
    return parsed


def _write(path: Path, mark: DataMark, is_new: bool) -> None:
    """Write the file atomically; if it is to be new, another process's file stays. Raises OSError."""
    content: dict[str, Any] = {"fedveil-data-set": _VERSION, "id": mark.id}
    if mark.ledger is not None:
        content["ledger"] = asdict(mark.ledger)
    if mark.file:
        content |= {"file": mark.file, "versions": mark.versions}
    partial = path.with_name(f"{ID_FILE}.{secrets.token_hex(8)}")
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
