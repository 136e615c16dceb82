"""Compare the received bundle with the installed files that Python will load.

Flower installs a bundle into a folder named after 8 hex digits of its SHA-256, and uses an existing folder of that name
unchanged. So the received bundle's digest does not yet identify the code that runs: the folder may belong to another
bundle with the same 8 digits (2^32 attempts), or code that ran here before may have changed it.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

from fedveil.errors import PolicyError

_FLOWERS_OWN = ".info/"


def require_same(content: bytes, folder: Path) -> None:
    """Raise PolicyError unless `folder` holds exactly the received bundle's files. Remove compiled code."""
    for cache in sorted(folder.rglob("__pycache__")):
        # Python would run it instead of the source that is compared here.
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
