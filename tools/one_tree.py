"""Lays the rooms of the checkout under one package, as a copy, for tools that read files instead of importing.

    python tools/one_tree.py .one_tree          # .one_tree/fedveil/strategies, ... as a wheel has them

mypy and the import linter do not see that `fedveil/__init__.py` adds the checkout to the package's path, and the linter
does not follow links. A file that has not changed keeps its time, so that mypy's cache stays valid.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOMS = ("attacks", "benchmarks", "client_app", "console", "guard", "server_app", "strategies")


def main(target: Path) -> None:
    """Brings the copy in `target` up to date."""
    root = Path(__file__).resolve().parent.parent
    wanted = {}
    for room in ("fedveil", *ROOMS):
        for file in (root / room).rglob("*.py"):
            name = file.relative_to(root / "fedveil") if room == "fedveil" else file.relative_to(root)
            wanted[target / "fedveil" / name] = file
    for old in target.rglob("*.py"):
        if old not in wanted:
            old.unlink()
    for copy, file in wanted.items():
        if not copy.is_file() or copy.read_bytes() != file.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
