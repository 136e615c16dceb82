"""A backup as one file, which is read and checked whole before anything in it is used.

    a tar file (GNU format, not compressed): regular files under relative names, and as its last member
    fedveil-backup.json    {"fedveil-backup": 1, "kind": "site", "made": time, "files": {name: [bytes, SHA-256]},
                            "left-out": [names of files that are there, but not in the backup]}

| the file ... | result |
|---|---|
| is truncated, has bytes after its end, or a header with a wrong checksum | ConfigError |
| has a member that is a link, folder, device, sparse file, or anything but a regular file | ConfigError |
| has a name twice, a name that its reader does not know, or one that is also another's folder | ConfigError |
| has more than `MAX_FILES` members, a name above 512 bytes, or a manifest that is longer than its members need |
  ConfigError |
| and its manifest differ in a name, a size or a digest | ConfigError |
| is of another kind or version | ConfigError |
| changes after the check | StateError when the changed member is used |

A reader names the files that it knows (`is_known`), so no name can lead out of its folder. The digests detect damage.
They do not show who wrote the file: keep backups where others cannot write, or compare the SHA-256 of the whole file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from fedveil.errors import ConfigError, StateError
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

__all__ = ["MAX_FILES", "ArchivedFile", "BackupArchive", "open_regular", "write_archive"]

MANIFEST = "fedveil-backup.json"
MAX_FILES = 100_000
_VERSION = 1
_MAX_NAME = 512  # bytes
# Most bytes of a manifest: a base, and for each member its name, escaped, with size and digest, and as much again for a
# name in "left-out". It is bounded because Python needs about 45 bytes for a byte of JSON such as "[],".
_MANIFEST_BASE, _ESCAPED, _ABOUT = 64 << 10, 6, 128
_BLOCK, _RECORD, _PIECE = tarfile.BLOCKSIZE, tarfile.RECORDSIZE, 1 << 20


@dataclass(frozen=True)
class ArchivedFile:
    """A file in a backup.

    Attributes:
        offset: where its content begins in the archive.
        size: its bytes.
        sha256: the SHA-256 of its content, in hex.
        is_public: whether every user could read the original, such as a certificate.
    """

    offset: int
    size: int
    sha256: str
    is_public: bool


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file without following a link in its last part. Raises StateError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StateError(f"{path}: expected a file that this user can read, found {error.strerror}") from None
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise StateError(f"{path}: expected a regular file, found something else; move it away")
    return file


def write_archive(target: Path, kind: str, files: Mapping[str, Path], left_out: Sequence[str] = ()) -> tuple[int, str]:
    """Write files to a new archive, readable only by this user; return its bytes and its SHA-256.

    After an error or a crash there is no file at `target`.

    Args:
        kind: what is backed up, such as "site".
        files: the files by their names in the archive.
        left_out: names for the list of files that are not in it.

    Raises:
        ConfigError: `target` exists, or there are too many files.
        StateError: a file is not regular, or changes while it is read.
        OSError: the archive cannot be written, for example on a full disk.
    """
    if os.path.lexists(target):
        raise ConfigError(
            f"--to: expected a new file, found one at {target}; name another, and keep the earlier backup"
        )
    if len(files) >= MAX_FILES:
        raise ConfigError(
            f"backup: expected fewer than {MAX_FILES:,} files, found {len(files):,}; purge old runs first"
        )
    digest, size = hashlib.sha256(), 0

    def parts() -> Iterator[bytes]:
        nonlocal size
        for part in _archive_parts(kind, files, left_out):
            digest.update(part)
            size += len(part)
            yield part

    write_atomic(target, parts())
    return size, digest.hexdigest()


def _archive_parts(kind: str, files: Mapping[str, Path], left_out: Sequence[str]) -> Iterator[bytes]:
    listed: dict[str, tuple[int, str]] = {}
    total = 0
    for name, path in sorted(files.items()):
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            head = _header(name, about.st_size, bool(about.st_mode & stat.S_IROTH))
            yield head
            digest, left = hashlib.sha256(), about.st_size
            while piece := file.read(min(_PIECE, left)):
                digest.update(piece)
                left -= len(piece)
                yield piece
            if left or file.read(1):
                raise StateError(f"{path}: expected a file that does not change, found one that does; stop its writer")
            yield bytes(-about.st_size % _BLOCK)
            listed[name] = (about.st_size, digest.hexdigest())
            total += len(head) + about.st_size + -about.st_size % _BLOCK
    content = {
        "fedveil-backup": _VERSION, "kind": kind, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": listed, "left-out": sorted(left_out),
    }  # fmt: skip
    data = json.dumps(content).encode()
    last = _header(MANIFEST, len(data), False) + data + bytes(-len(data) % _BLOCK) + bytes(2 * _BLOCK)
    yield last + bytes(-(total + len(last)) % _RECORD)


def _header(name: str, size: int, is_public: bool) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644 if is_public else 0o600
    return info.tobuf(tarfile.GNU_FORMAT)


def _most_manifest(names: Iterable[str]) -> int:
    return _MANIFEST_BASE + sum(2 * (_ESCAPED * len(name.encode()) + _ABOUT) for name in names)


class BackupArchive:
    """A backup that was read whole and found to be sound.

    Attributes:
        files: its files by name.
        left_out: names of files that its maker left out, not checked.
        made: when it was made, as its maker's clock had it.
        sha256: the SHA-256 of the whole archive, in hex.
    """

    def __init__(self, path: Path, file: BufferedReader, kind: str, is_known: Callable[[str], bool]) -> None:
        self._path, self._file = path, file
        self._digest = hashlib.sha256()
        members = self._scan(is_known)
        manifest = members.pop(MANIFEST, None)
        if manifest is None:
            self._refuse("a list of its files at its end", "none")
        self.files = members
        self.made, self.left_out = self._require_listed(self.read(MANIFEST, manifest), kind)
        self.sha256 = self._digest.hexdigest()

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, kind: str, is_known: Callable[[str], bool]) -> Iterator[BackupArchive]:
        """Open and check a backup.

        Args:
            kind: what must be in it, such as "site".
            is_known: whether a file with this name may be in such a backup.

        Raises:
            ConfigError: as in the table above.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block otherwise
        except OSError as error:
            raise ConfigError(f"{path}: expected a backup, found none that can be read ({error.strerror})") from None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path}: expected a backup, found something that is not a file")
            yield cls(path, file, kind, is_known)

    @property
    def size(self) -> int:
        """Return the number of bytes in all files."""
        return sum(file.size for file in self.files.values())

    def read(self, name: str, member: ArchivedFile | None = None) -> bytes:
        """Return a file's content. Raises StateError if it has changed since the check."""
        return b"".join(self._pieces(name, member or self.files[name]))

    def extract(self, name: str, target: Path) -> None:
        """Write a file, readable only by this user. Raises StateError if it has changed since the check, or OSError."""
        write_atomic(target, self._pieces(name, self.files[name]))

    def _pieces(self, name: str, member: ArchivedFile) -> Iterator[bytes]:
        self._file.seek(member.offset)
        digest, left = hashlib.sha256(), member.size
        while piece := self._file.read(min(_PIECE, left)):
            digest.update(piece)
            left -= len(piece)
            yield piece
        if left or digest.hexdigest() != member.sha256:
            raise StateError(f"{self._path}: {sanitize(name, 200)}: expected the file that was checked, found another")

    def _scan(self, is_known: Callable[[str], bool]) -> dict[str, ArchivedFile]:
        members: dict[str, ArchivedFile] = {}
        while (head := self._read(_BLOCK)) != bytes(_BLOCK):
            info = self._header(head)
            name = info.name
            if info.type == tarfile.GNUTYPE_LONGNAME:
                if not 0 < info.size <= _MAX_NAME + 1:
                    self._refuse(f"names of at most {_MAX_NAME} bytes", f"one of {info.size:,}")
                name = self._long_name(info.size)
                info = self._header(self._read(_BLOCK))
            shown = sanitize(name, 200)
            if info.type != tarfile.REGTYPE or info.size < 0:
                self._refuse("regular files alone", f"{shown}, of type {info.type!r}")
            if MANIFEST in members:
                self._refuse("its list of files at its end", f"{shown} after it")
            if name != MANIFEST and not is_known(name):
                self._refuse("the files that a backup of this kind has", shown)
            if name in members:
                self._refuse("each name once", f"{shown} twice")
            if name == MANIFEST and info.size > (most := _most_manifest(members)):
                self._refuse(f"a list of at most {most:,} bytes", f"one of {info.size:,}")
            if len(members) > MAX_FILES:
                self._refuse(f"at most {MAX_FILES:,} files", "more")
            offset, digest, left = self._file.tell(), hashlib.sha256(), info.size
            while left:
                piece = self._read(min(_PIECE, left))
                digest.update(piece)
                left -= len(piece)
            if any(self._read(-info.size % _BLOCK)):
                self._refuse("zeros after each file", f"other bytes after {shown}")
            members[name] = ArchivedFile(offset, info.size, digest.hexdigest(), bool(info.mode & stat.S_IROTH))
        rest = self._file.read(_RECORD + 1)
        self._digest.update(rest)
        if len(rest) > _RECORD or any(rest):
            self._refuse("nothing after its end", "more bytes")
        for name in members:
            if folder := next((str(up) for up in PurePosixPath(name).parents if str(up) in members), ""):
                self._refuse("files", f"{sanitize(folder, 200)}, which is also a folder")
        return members

    def _long_name(self, size: int) -> str:
        data = self._read(size + -size % _BLOCK)[:size]
        try:
            return data.removesuffix(b"\0").decode()
        except UnicodeDecodeError:
            self._refuse("names in UTF-8", "another")

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.TarError, ValueError) as error:
            self._refuse("a backup that fedveil wrote", f"a damaged or different one ({error})")

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            self._refuse("a whole backup", "one that was cut off")
        self._digest.update(data)
        return data

    def _require_listed(self, data: bytes, kind: str) -> tuple[str, tuple[str, ...]]:
        """Compare the manifest with the members; return the time in it, and the names left out. Raises ConfigError."""
        try:
            content: Any = json.loads(data)
            version, found, made = content["fedveil-backup"], content["kind"], content["made"]
            left_out = tuple(str(name) for name in list(content["left-out"]))
            listed = {str(name): (size, sha256) for name, (size, sha256) in content["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._refuse("a list of its files", f"none that can be read ({type(error).__name__})")
        if type(version) is not int or version != _VERSION or found != kind:
            self._refuse(f"a backup of a {kind}, version {_VERSION}", f"{sanitize(found, 40)}, {sanitize(version, 40)}")
        if type(made) is not str or not re.fullmatch(r"[0-9T:+-]{1,40}", made):
            self._refuse("the time when it was made", sanitize(made, 60))
        there = {name: (member.size, member.sha256) for name, member in self.files.items()}
        differs = sorted(name for name in {*listed, *there} if listed.get(name) != there.get(name))
        if differs:
            self._refuse("the files in its list", f"another {sanitize(differs[0], 200)}")
        return made, left_out

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise ConfigError(
            f"{self._path}: expected {expected}, found {found}; nothing was restored: use another copy of the backup"
        )
