"""Shard a frozen base: each rank stores its part of every layer, and gathers a layer when it needs to compute it."""

from __future__ import annotations

from typing import Any

import torch

from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError


def check_shardable(config: RunConfig, adapter: Adapter) -> None:
    """Raise ConfigError if the base cannot be sharded."""
    train = config.train
    refused = [
        ("train.quantized-base", '"none"', train.quantized_base, train.quantized_base != "none"),
        ("train.compile", "false", "true", train.compile),
        (
            "method.params",
            "an adapter that does not train the base",
            f'one of kind "{adapter.kind}"',
            adapter.trains_base,
        ),
    ]
    for key, expected, value, wrong in refused:
        if wrong:
            raise ConfigError(
                f"{key}: shard-base = true requires {expected}, found {value}; change it, or set shard-base to "
                "false in the node config"
            )


def shard_model(base: Any, name: str, device: torch.device, size: int) -> None:
    """Shard the frozen parameters of a loaded model; every rank keeps all trained ones. Every rank must call this.

    Layers are sharded and moved to `device` one at a time, so a base on the CPU may be larger than a device.

    Raises:
        ConfigError: the model has no identifiable layers.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in base.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f'shard-base: "{name}" ({type(base.model).__name__}) is not made of layers; set it to false in the '
            "node config"
        )
    trained = set(base.trained.values())
    for parameter in trained:
        parameter.data = parameter.data.to(device)
    mesh = init_device_mesh(device.type, (size,))
    for module in [*layers, base.model]:
        fully_shard(module, mesh=mesh, ignored_params=trained)
