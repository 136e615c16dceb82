"""List the files that a demo leaves next to its runs, and remove them. Imports no torch, to start fast."""

from __future__ import annotations

import re
from pathlib import Path

PICTURE, FIGURES, SUMMARY, REPORT = "picture.svg", "picture.json", "summary.json", "report.html"
LOGS = "logs"
_LOG = re.compile(r"(superlink|(register-)?site-\d+)\.log")  # logs of the federation's processes


def remove_demo_files(out: Path) -> None:
    """Remove an earlier demo's files and its processes' logs from its folder, and no other files."""
    for name in (PICTURE, FIGURES, SUMMARY, REPORT):
        (out / name).unlink(missing_ok=True)
    logs = out / LOGS
    for file in logs.glob("*.log") if logs.is_dir() and not logs.is_symlink() else ():
        if _LOG.fullmatch(file.name):
            file.unlink()
