"""List and remove the files that a demo leaves next to its runs. Does not import torch, so that it starts fast."""

from __future__ import annotations

import re
from pathlib import Path

PICTURE, FIGURES, SUMMARY, REPORT = "picture.svg", "picture.json", "summary.json", "report.html"
LOGS = "logs"
_LOG = re.compile(r"(superlink|(register-)?site-\d+)\.log")  # the federation's process logs


def remove_demo_files(out: Path) -> None:
    """Remove an earlier demo's files and process logs from its folder, and no other files."""
    for name in (PICTURE, FIGURES, SUMMARY, REPORT):
        (out / name).unlink(missing_ok=True)
    logs = out / LOGS
    for file in logs.glob("*.log") if logs.is_dir() and not logs.is_symlink() else ():
        if _LOG.fullmatch(file.name):
            file.unlink()
