"""The bundle as it came against the bundle as it lies on the disk, from where Python will load it.

Flower installs a bundle into a folder named by 8 hex digits of its SHA-256, and takes a folder of that name that is
there already as it is. So the digest of what came is not yet that of what runs: the folder may be another bundle's of
the same 8 digits (2^32 tries), or code that ran here before may have changed it.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

from fedveil.errors import PolicyError

_FLOWERS_OWN = ".info/"


def require_same(content: bytes, folder: Path) -> None:
    """Raises PolicyError unless `folder` holds the bundle's files, as they came, and no other. Drops compiled code."""
    for cache in sorted(folder.rglob("__pycache__")):
        # Python would run it in place of the source that is compared here.
        cache.unlink() if cache.is_symlink() else shutil.rmtree(cache)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        expected = {name: archive.read(name) for name in archive.namelist() if not name.startswith(_FLOWERS_OWN)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or (not path.is_dir() and (name not in expected or path.read_bytes() != expected[name])):
            raise PolicyError(
                f"app: expected the bundle's own files in {folder.name}, found another at {name}; remove it"
            )
        expected.pop(name, None)
    missing = sorted(name for name in expected if not name.endswith("/"))
    if missing:
        raise PolicyError(
            f"app: expected the bundle's own files in {folder.name}, found no {missing[0]}; remove the folder"
        )
