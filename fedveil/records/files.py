"""Files that are written whole or not at all. It imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fedveil import places
from fedveil.sealed import Bytes


def write_atomic(path: Path, data: bytes | Iterable[Bytes]) -> None:
    """Replaces a file so that a reader, or a crash, finds the old or the new one whole. Only its owner can read it.

    `data` may come in parts, such as `Seal.closed` gives.
    """
    places.private_folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
