"""What a demo leaves beside its runs, and how the next one removes it. Imports no torch, for which no start waits."""

from __future__ import annotations

import re
from pathlib import Path

PICTURE, FIGURES, SUMMARY, REPORT = "picture.svg", "picture.json", "summary.json", "report.html"
LOGS = "logs"
_LOG = re.compile(r"(superlink|(register-)?site-\d+)\.log")  # of the federation's processes


def forget(out: Path) -> None:
    """Removes these files of an earlier demo from its folder, and its processes' logs; nobody else's."""
    for name in (PICTURE, FIGURES, SUMMARY, REPORT):
        (out / name).unlink(missing_ok=True)
    logs = out / LOGS
    for file in logs.glob("*.log") if logs.is_dir() and not logs.is_symlink() else ():
        if _LOG.fullmatch(file.name):
            file.unlink()
