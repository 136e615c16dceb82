"""Files that are written whole or not at all. It imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fedveil import places


def write_atomic(path: Path, data: bytes | Iterable[bytes | memoryview]) -> None:
    """Replaces a file so that a reader, or a crash, finds the old or the new one whole. Only its owner can read it.

    Parts of an iterable are written as they come, one in memory at a time.
    """
    places.private_folder(path.parent)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for part in [data] if isinstance(data, bytes) else data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
