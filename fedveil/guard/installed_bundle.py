"""Compare the received bundle with the installed files that Python will load.

Flower installs a bundle into a folder named after 8 hex digits of its SHA-256, and uses an existing folder with that
name unchanged. So the received bundle's digest alone does not identify the code that runs: the folder may belong to
another bundle with the same 8 digits (2^32 attempts), or code that ran here before may have changed it.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import shutil
import zipfile
from pathlib import Path

from fedveil.errors import PolicyError
from fedveil.sanitize import sanitize

_FLOWERS_OWN = ".info/"
_OWN_MODELS = "fedveil/own/"


def module_digests(content: bytes) -> dict[str, str]:
    """Return "sha256:" plus the SHA-256 of each own-model file in a bundle, by file name without .py.

    All files in the folder count except FedVeil's own __init__.py, which may contain only a docstring.

    Raises PolicyError for anything else, such as a folder, because its code would not be covered by a digest.
    """
    found: dict[str, str] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for path in archive.namelist():
            if not path.startswith(_OWN_MODELS) or path.endswith("/"):
                continue
            name, text = path.removeprefix(_OWN_MODELS), archive.read(path)
            if name == "__init__.py" and _is_docstring(text):
                continue
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}\.py", name) or name.removesuffix(".py") in found:
                raise PolicyError(
                    "task.module: fedveil/own in the bundle may contain only plain Python files, each once, but has "
                    f"{sanitize(name, 100)}; remove it"
                )
            found[name.removesuffix(".py")] = f"sha256:{hashlib.sha256(text).hexdigest()}"
    return found


def _is_docstring(text: bytes) -> bool:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return False
    return all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in body)


def require_same(content: bytes, folder: Path) -> None:
    """Raise PolicyError unless `folder` holds exactly the received bundle's files. Removes compiled code."""
    for cache in sorted(folder.rglob("__pycache__")):
        # Python would run it instead of the source files compared here.
        cache.unlink() if cache.is_symlink() else shutil.rmtree(cache)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        expected = {name: archive.read(name) for name in archive.namelist() if not name.startswith(_FLOWERS_OWN)}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or (not path.is_dir() and (name not in expected or path.read_bytes() != expected[name])):
            raise PolicyError(
                f"app: {folder.name} may contain only the bundle's own files, but {name} is a different one; remove it"
            )
        expected.pop(name, None)
    missing = sorted(name for name in expected if not name.endswith("/"))
    if missing:
        raise PolicyError(f"app: the bundle's file {missing[0]} is missing in {folder.name}; remove the folder")
