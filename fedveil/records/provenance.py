"""The provenance of results: the commit of the code, the machine, and the package versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from fedveil import paths

__all__ = ["environment_info", "git_commit"]


def git_commit() -> str:
    """Return the repository's commit, with "+" if files have changed since then; empty outside a checkout."""
    if (here := paths.checkout_folder()) is None:
        return ""
    describe = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(describe, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def environment_info() -> dict[str, Any]:
    """Return the machine and the relevant versions."""
    import torch

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("flwr", "torch", "transformers", "peft")
    return {
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a preset that needs no federation runs without Flower
        return None
