"""Write the module file of an own model (task.module) into the folder of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fedveil.config import RunConfig
from fedveil.models.own_module import OwnModule

__all__ = ["write_module"]


def write_module(folder: Path, module: OwnModule, config: RunConfig) -> None:
    """Write the module file as it ran, and module.json with its name, digest, base and torch version."""
    (folder / f"{module.name}.py").write_text(module.text)
    base = config.task.model if module.needs_base("model") else ""
    content = {"module": module.name, "digest": module.digest, "base": Path(base).name, "torch": torch.__version__}
    (folder / "module.json").write_text(json.dumps(content, indent=1))
