"""Write the folder of an own model: its weights, and the file that ran."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from fedveil.config import RunConfig
from fedveil.models.own_module import OwnModule

__all__ = ["write_module", "write_network"]


def write_network(folder: Path, network: nn.Module) -> None:
    """Write all tensors of the state_dict to model.safetensors; tied tensors appear once."""
    from safetensors.torch import save_model

    save_model(network, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_module(folder: Path, module: OwnModule, config: RunConfig) -> None:
    """Write the file as it ran, and module.json: its name, digest, base and version of torch."""
    (folder / f"{module.name}.py").write_text(module.text)
    base = config.task.model if module.needs_base("model") else ""
    content = {"module": module.name, "digest": module.digest, "base": Path(base).name, "torch": torch.__version__}
    (folder / "module.json").write_text(json.dumps(content, indent=1))
