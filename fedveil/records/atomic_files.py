"""Atomically written files, small files with a checksum, and line-based files. Does not import torch.

A checksum detects accidental changes by a disk or a person. It does not stop an attacker: anyone who can
write the file can write the checksum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from fedveil import paths
from fedveil.encrypted_files import Bytes

_HEAD = b'{"checksum": "'
_HEX = 32
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_PIECE = 1 << 20
# Errors for a partial file's path that is gone, a link, another user's file, or not a file.
_NOT_LEFT = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO)


def write_atomic(path: Path, data: bytes | Iterable[Bytes], keep: Path | None = None) -> None:
    """Replace a file atomically: after a crash or power failure, readers find the complete old file or the new one.

    Only the owner can read the file; a file that root writes belongs to the folder's owner. When this returns, the file
    and its name are on disk. Partial files left by killed writers are removed. Other users, such as the carrier of
    relay files, may write to the folder: a link is replaced and never followed, and only regular files are opened.

    Args:
        data: the new content, possibly in parts, such as those from `FileSeal.closed`.
        keep: new name for the old file, in the same folder; after a crash in between, only this file exists.

    Raises:
        OSError: the file cannot be written, for example on a full disk.
    """
    new = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    paths.private_folder(path.parent)
    partial, descriptor = _new_partial(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
            _remove_left(path, partial)
            if keep is not None and path.exists():
                path.replace(keep)
            partial.replace(path)
        for folder in {path.parent, *(folder.parent for folder in new)}:
            sync_folder(folder)
    finally:
        partial.unlink(missing_ok=True)


def link_atomic(path: Path, name: Path) -> None:
    """Give a file a second name in the same folder, replacing any file with that name, without copying bytes.

    If the file system does not support links, the file is copied. Raises OSError.
    """
    partial = name.with_name(f".{name.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    try:
        try:
            partial.hardlink_to(path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with path.open("rb") as old:
                write_atomic(name, iter(lambda: old.read(_PIECE), b""))
            return
        partial.replace(name)  # does nothing if both are already the same file
        sync_folder(name.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def fill_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder for files that a library writes; at the end, they replace the files in `folder`.

    Only the owner can read the files. After an error in the block, `folder` is unchanged. One process at a time.
    """
    paths.private_folder(folder)
    scratch = folder / ".part"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    scratch.mkdir(mode=0o700)
    try:
        yield scratch
        for file in (file for file in scratch.rglob("*") if file.is_file()):
            file.chmod(0o600)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        for new in sorted(scratch.iterdir()):
            if (folder / new.name).is_dir():
                shutil.rmtree(folder / new.name)
            new.replace(folder / new.name)
        sync_folder(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _new_partial(path: Path) -> tuple[Path, int]:
    """Create and lock a new file next to `path`, under an unpredictable name; return it and its descriptor.

    An existing file is never opened: if other users can write to the folder, it could be a link to another place.
    """
    while True:
        partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.part")
        descriptor = _create_owned(partial)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return partial, descriptor
        os.close(descriptor)  # another writer took it for a killed writer's file and removed it before the lock


def _create_owned(file: Path) -> int:
    """Create a file readable only by its owner, and return its descriptor; a file that root creates gets the folder's.

    Otherwise a command that an administrator runs as root would lock a service out of its own files. The owner is read
    from the folder in which the file was created, so exchanging the folder for a link gives no file elsewhere away.
    """
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(file.name, flags, 0o600, dir_fd=folder)
        try:
            owner = os.fstat(folder).st_uid
            if os.geteuid() == 0 and os.fstat(descriptor).st_uid != owner:
                os.fchown(descriptor, owner, -1)
        except OSError:
            os.unlink(file.name, dir_fd=folder)
            os.close(descriptor)
            raise
        return descriptor
    finally:
        os.close(folder)


def _remove_left(path: Path, own: Path) -> None:
    """Remove partial files that no process is writing; a running writer holds a lock on its file.

    A link, a pipe, a folder or another user's file with such a name does not come from our writers, and stays.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if left == own:
            continue
        try:  # otherwise, opening a pipe would block
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _NOT_LEFT:
                raise
            continue
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                with contextlib.suppress(FileNotFoundError, BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, because a synced file can be lost if its name is not synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support this call
            raise
    finally:
        os.close(descriptor)


def write_checksummed(content: Mapping[str, Any]) -> bytes:
    """Return the JSON of a nonempty `content`, preceded by the checksum of its bytes."""
    text = json.dumps(dict(content)).encode()[1:]
    return _HEAD + xxhash.xxh3_128_hexdigest(text).encode() + b'", ' + text


def read_checksummed(data: bytes) -> dict[str, Any]:
    """Return the content written by `write_checksummed`. Raises ValueError if any byte differs."""
    text = data[len(_HEAD) + _HEX + 3 :]
    if data != _HEAD + xxhash.xxh3_128_hexdigest(text).encode() + b'", ' + text:
        raise ValueError("its checksum does not match its bytes")
    try:
        return dict(json.loads(b"{" + text))
    except RecursionError:
        raise ValueError("brackets nested too deeply to read") from None


def checksummed_bytes(data: bytes) -> bytes:
    """Return the bytes followed by their 16-byte checksum."""
    return data + xxhash.xxh3_128_digest(data)


def verify_checksummed(data: bytes) -> bytes:
    """Return the bytes from a `checksummed_bytes` result. Raises ValueError if any byte differs."""
    if checksummed_bytes(data[:-16]) != data:
        raise ValueError("its checksum does not match its bytes")
    return data[:-16]


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line atomically. Raises OSError, for example on a full disk."""
    line = json.dumps(record).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        written = file.write(line)
        if written != len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def cut_torn_line(path: Path) -> str:
    """Truncate a last line left unfinished by a killed writer. Return its content, or "" if all lines are complete."""
    if not path.exists():
        return ""
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
            os.fsync(file.fileno())
    return data[whole:].decode(errors="replace")
