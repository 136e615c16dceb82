"""Image models trained from scratch: built from a config without weights, and drawn from a named stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedveil import rng
from fedveil.config import RunConfig
from fedveil.contract.param_spec import Weights
from fedveil.errors import TaskError
from fedveil.models.library_logging import quiet_libraries

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


def model_config_of(where: str, is_local: bool, config: RunConfig, tiny_vit: Mapping[str, int]) -> Any:
    """Return the config of a model without weights: "tiny" with the sizes `tiny_vit`, or a folder's; otherwise None.

    Raises:
        TaskError: the folder has no weights, and task.from-scratch is not set.
    """
    from transformers import AutoConfig, ViTConfig

    classes = len(config.task.class_list) or config.task.num_classes
    if where == "tiny":
        return ViTConfig(**tiny_vit, num_labels=classes)
    if not is_local or any(True for pattern in WEIGHTS for _ in Path(where).glob(pattern)):
        return None
    if not config.task.from_scratch:
        raise TaskError(
            f'task.model: there are no weights next to config.json in "{where}"; copy them there, or set '
            "task.from-scratch = true to train from scratch"
        )
    return AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False, num_labels=classes)


def draw_model(bare: Any, stream: rng.RandomStream) -> Any:
    """Return a model with that config, fp32, its weights drawn from `stream`."""
    from transformers import AutoModelForImageClassification

    with torch.random.fork_rng(devices=[]):  # the library draws only from the global generator
        torch.default_generator.manual_seed(stream.torch_generator().initial_seed())
        return AutoModelForImageClassification.from_config(bare, dtype=torch.float32)


def draw_tensors(bare: Any, stream: rng.RandomStream) -> Weights:
    """Return the model's tensors by name."""
    with quiet_libraries():
        return {name: parameter.detach() for name, parameter in draw_model(bare, stream).named_parameters()}
