"""A persistent cache of prepared examples: sets of memory-mapped arrays in a private folder.

    <folder>/<SHA-256 of the key>/about.json     {"fedveil-rows": 1, "key": {...},
                                                  "arrays": {name: {"kind", "bytes", "sha256"}, ...}}
    <folder>/<SHA-256 of the key>/<name>.bin     little-endian numbers
    <folder>/.<random>.part                      a set that is being written

The key contains everything that determines the arrays: the content of the examples, how they were
selected, the tokenizer, and the code.

| case | what happens |
|---|---|
| any part of the key differs | the stored set is not used |
| an incomplete or damaged set, or one that other users can access | the set is removed and rebuilt |
| the process dies while writing | a .part file remains; no process reads it, and a later write removes it after an
  hour |
| two processes build the same set | the first process to finish stores its set; the other one uses its own |
| more than KEPT sets | the least recently used sets are removed; a process that has mapped one can still use it |
| the disk is full | StateError; nothing is stored |

The SHA-256 digests detect damage. They do not protect against anyone who can write to the site's folder: such a person
could also change the site's examples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from fedveil import paths
from fedveil.config import RunConfig
from fedveil.contract.task import DatasetShard
from fedveil.errors import StateError

Part = Mapping[str, np.ndarray]
KEPT = 4
_VERSION = 1
_ABOUT = "about.json"
_LARGEST_ABOUT = 1 << 20
_WRITING_SECONDS = 3600.0  # after this time, no process is still writing a .part file

log = logging.getLogger("fedveil.data")


def cache_key(config: RunConfig, split: str, share: DatasetShard | None) -> dict[str, Any]:
    """Return the task-independent part of the key: how the examples are selected, and the code."""
    task = config.task.model_dump()
    drawn = share is not None or config.task.examples_per_site > 0
    return {
        "split": split,
        "task": task,
        "share": [share.index, share.count] if share else [],
        "seed": config.run.seed if drawn else None,
        "code": _code(),
    }


@cache
def _code() -> str:
    """Return the SHA-256 of the app's source and of the versions of the libraries that prepare examples."""
    hasher = hashlib.sha256()
    for name, source in paths.app_sources().items():
        hasher.update(name.encode() + hashlib.sha256(source.read_bytes()).digest())
    for library in ("datasets", "flwr-datasets", "pyarrow", "tokenizers", "transformers"):
        hasher.update(f"{library} {version(library)}".encode())
    return hasher.hexdigest()


@final
class DatasetCache:
    """The cached sets of arrays for one data set.

    Args:
        folder: the folder of the cache, created on the first write.
        kinds: the dtype of each array in a set, by array name: "<i4" or "<i8".
    """

    def __init__(self, folder: Path, kinds: Mapping[str, str]) -> None:
        self._folder, self._kinds = folder, kinds

    def find(self, key: Mapping[str, Any]) -> Part | None:
        """Return the checked, mapped arrays stored under exactly this key; None if they are missing or incomplete."""
        folder = self._of(key)
        if not folder.is_dir():
            return None
        try:
            about = json.loads(_bounded(folder / _ABOUT))
            if (
                about["fedveil-rows"] != _VERSION
                or about["key"] != _plain(key)
                or set(about["arrays"]) != set(self._kinds)
            ):
                raise ValueError("the key, version or arrays differ")
            mapped_arrays = {name: self._mapped(folder, name, about["arrays"][name]) for name in self._kinds}
            os.utime(folder)
            return mapped_arrays
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: prepared examples are incomplete (%s); preparing them again", folder, error)
            _remove(folder)
            return None

    def put(self, key: Mapping[str, Any], parts: Iterable[Part]) -> Part:
        """Write a set part by part and return its mapped arrays. If `parts` raises an error, nothing remains on disk.

        Raises:
            StateError: the folder is not writable.
        """
        partial = self._folder / f".{secrets.token_hex(8)}.part"
        try:
            paths.private_folder(partial)
            arrays = _written(partial, parts, self._kinds)
            about = {"fedveil-rows": _VERSION, "key": _plain(key), "arrays": arrays}
            with _new(partial / _ABOUT) as file:
                file.write(json.dumps(about).encode())
            mapped_arrays = {name: self._mapped(partial, name, arrays[name], check=False) for name in self._kinds}
            with contextlib.suppress(FileExistsError, NotADirectoryError):  # else another process was faster
                _rename(partial, self._of(key))
        except OSError as error:
            raise StateError(f"{self._folder}: cannot write prepared examples: {error}; free space") from None
        finally:
            _remove(partial)
        self._tidy()
        return mapped_arrays

    def _of(self, key: Mapping[str, Any]) -> Path:
        return self._folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

    def _mapped(self, folder: Path, name: str, about: Mapping[str, Any], check: bool = True) -> np.ndarray:
        kind = np.dtype(self._kinds[name])
        with (folder / f"{name}.bin").open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != about["bytes"] or status.st_size % kind.itemsize or about["kind"] != self._kinds[name]:
                raise ValueError(f"{name}: {status.st_size} bytes")
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ValueError(f"{name}: accessible to other users")
            if check and hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
                raise ValueError(f"{name}: digest mismatch")
            if not status.st_size:
                return np.empty(0, kind)
            return np.memmap(file, kind, "r")

    def _tidy(self) -> None:
        """Remove the least recently used sets and files left by dead processes."""
        with contextlib.suppress(FileNotFoundError):  # another process may be tidying too
            ages = {path: path.lstat().st_mtime for path in self._folder.iterdir()}
            sets = sorted((path for path in ages if not path.name.startswith(".")), key=lambda path: ages[path])
            before = time.time() - _WRITING_SECONDS
            for path in (*sets[:-KEPT], *(path for path in ages if path.suffix == ".part" and ages[path] < before)):
                _remove(path)


def _written(folder: Path, parts: Iterable[Part], kinds: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Append every part to the files of the arrays. Return the arrays' entries for about.json."""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_new(folder / f"{name}.bin")) for name in kinds}
        digests = {name: hashlib.sha256() for name in kinds}
        for part in parts:
            for name, kind in kinds.items():
                data = np.ascontiguousarray(part[name], kind).data
                files[name].write(data)
                digests[name].update(data)
        return {
            name: {"kind": kind, "bytes": files[name].tell(), "sha256": digests[name].hexdigest()}
            for name, kind in kinds.items()
        }


def _new(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _rename(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise
        raise FileExistsError(target) from error


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LARGEST_ABOUT)


def _plain(key: Mapping[str, Any]) -> Any:
    """Return the key after a JSON round trip."""
    return json.loads(json.dumps(key))


def _remove(path: Path) -> None:
    """Remove a file or folder. If that fails, it remains but is never read as a complete set."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
