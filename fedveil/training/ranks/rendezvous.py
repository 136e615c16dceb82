"""Join the ranks into a group, once all of them are ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fedveil.errors import ConfigError
from fedveil.training.adapter_task import AdaptedTask
from fedveil.training.ranks import sharding
from fedveil.training.ranks.process_group import RankGroup


def check_devices(device: str, size: int, there: int) -> None:
    """Raise ConfigError unless each rank has a device. `there`: number of CUDA devices, 0 for a site on the CPU."""
    if there and ":" in device:
        raise ConfigError(
            f'device: processes = {size} requires "auto" or "cuda", found "{device}"; CUDA_VISIBLE_DEVICES selects '
            "the site's devices"
        )
    if there and size > there:
        raise ConfigError(f"processes: expected at most {there}, the site's CUDA devices, found {size}; lower it")


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the rank's device."""
    return torch.device("cuda", rank) if device.type == "cuda" else device


def join_group(
    task: AdaptedTask, store: Path, rank: int, size: int, device: torch.device, sharded: bool, check: Callable[[], None]
) -> RankGroup:
    """Return the group of all ranks, after sharding their bases if `sharded`. Every rank must call this function."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup(store, rank, size, device, check)
    try:
        if sharded:
            sharding.shard_model(task.base, task.config.task.model, device, size)
            task.device = device
    except ConfigError:
        group.close()  # another client round may form another
        raise
    return group
