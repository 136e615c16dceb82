"""Build the network defined in an own model's file: seeded, checked, and with named trained tensors.

| tensors | trained | sent |
|---|---|---|
| all weights: parameters with requires_grad | yes | yes |
| float buffers of the state_dict, under all weights and task.buffers = "averaged" | by a step's forward pass | yes |
| the same buffers under "initial"; all buffers under low-rank pairs | no; batch normalization stays in eval mode | no |
| integer, bool and non-persistent buffers; frozen parameters | no; every client round starts from the value that
  model() gives | no |
| low-rank pairs | yes | yes |
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.adapters.low_rank_pairs import LowRankPairsAdapter, name_pattern
from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError, TaskError
from fedveil.models import library_logging
from fedveil.models.loaded_model import LoadedModel
from fedveil.models.own_module import OwnModule, explain_error

__all__ = ["build_network", "load_network", "norm_layers", "seeded_generators", "untracked_buffers"]

_COMPARED_ENTRIES = 20_000_000  # a larger model is built only once
_ROOT = "model"
_NO_MEMORY = ("allocate memory", "calculation overflowed", "not enough memory")  # from torch's error messages
_NORMS = (nn.modules.batchnorm._NormBase,)


@contextlib.contextmanager
def seeded_generators(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python; restore their states afterwards."""
    devices = [device] if device is not None and device.type == "cuda" else []
    own_random, own_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(own_random)
            np.random.set_state(own_numpy)


def build_network(module: OwnModule, config: RunConfig) -> nn.Module:
    """Return the network from model(), unchanged, with the global generators seeded by run.seed.

    Raises:
        TaskError: model() fails, or returns something other than a network on the CPU.
    """
    file, arguments = f"{module.name}.py", {"base": config.task.model} if module.needs_base("model") else {}
    try:
        with seeded_generators(config.run.seed), library_logging.quiet_libraries():
            network = module.functions["model"](**arguments)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(each in str(error) for each in _NO_MEMORY):
            raise TaskError(
                "task.module: the model does not fit in this machine's memory; make it smaller, or train LoRA on "
                "a base in bf16"
            ) from error
        raise explain_error(error, file, "model()", "correct it") from error
    except Exception as error:
        raise explain_error(error, file, "model()", "correct it") from error
    if not isinstance(network, nn.Module):
        raise TaskError(
            f"task.module: model() must return a torch.nn.Module, but returned {type(network).__name__}; return "
            "the model itself"
        )
    tensors = [*network.parameters(), *network.buffers()]
    if elsewhere := {t.device.type for t in tensors} - {"cpu"}:
        raise TaskError(
            f"task.module: model() must leave the model on the CPU, but put it on {', '.join(sorted(elsewhere))}; "
            "FedVeil moves it to the site's device"
        )
    return network


def load_network(module: OwnModule, config: RunConfig, adapter: Adapter, device: torch.device) -> LoadedModel:
    """Return the network with its adapter, on the device and in eval mode.

    Raises:
        ConfigError: the adapter fits no layer of the network.
        TaskError: like `build_network`, or a second call of model() returns different tensors.
    """
    network = build_network(module, config)
    if sum(p.numel() for p in network.parameters()) <= _COMPARED_ENTRIES:
        _require_repeatable(network, build_network(module, config))
    network.float().eval()
    if adapter.trains_base:
        trained: dict[str, Tensor] = {name: p for name, p in adapter.attach(network).items() if p.requires_grad}
        if config.task.buffers == "averaged":
            trained |= _float_buffers(network)
    else:
        network, trained = _with_pairs(network, module, adapter)
    if not any(tensor.requires_grad for tensor in trained.values()):
        raise TaskError(
            "task.module: no weight of model() requires gradients; do not call requires_grad_(False) on the "
            "weights to train"
        )
    network.to(device)  # this may replace buffer objects, unless the network is already on the device
    if device.type != "cpu":
        trained = _named_again(network, trained)
    return LoadedModel(network, None, trained, None)  # type: ignore[arg-type]  # buffers beside parameters


def norm_layers(network: nn.Module) -> list[str]:
    """Return the names of the layers that normalize with batch statistics."""
    return [name for name, layer in network.named_modules() if isinstance(layer, _NORMS)]


def untracked_buffers(loaded: LoadedModel) -> list[Tensor]:
    """Return the buffers that are not exchanged; every client round starts from the values that model() gives them."""
    exchanged = {id(tensor) for tensor in loaded.trained.values()}
    return [buffer for buffer in loaded.model.buffers() if id(buffer) not in exchanged]


def _float_buffers(network: nn.Module) -> dict[str, Tensor]:
    kept = network.state_dict()
    return {name: b for name, b in network.named_buffers() if name in kept and b.is_floating_point()}


def _named_again(network: nn.Module, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with these names after the network was moved, which may have replaced its buffers."""
    now = dict(network.named_buffers())
    return {name: now.get(name, tensor) for name, tensor in trained.items()}


def _with_pairs(network: nn.Module, module: OwnModule, adapter: Adapter) -> tuple[nn.Module, dict[str, Tensor]]:
    """Attach low-rank pairs. A network that is itself a single layer gets a parent module, because PEFT needs one."""
    from transformers.pytorch_utils import Conv1D

    network.requires_grad_(False)
    root = isinstance(network, nn.Linear | Conv1D)
    if root:
        network = nn.ModuleDict({_ROOT: network})
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
    targets = [_ROOT] if root else list(module.lora_targets) or linear
    if not targets:
        raise ConfigError('adapter.kind: your model has no linear layers for LoRA pairs; set adapter.kind = "all"')
    if isinstance(adapter, LowRankPairsAdapter) and adapter.targets == "all-linear":
        adapter = dataclasses.replace(adapter, targets=str(name_pattern(targets)))
    with library_logging.quiet_libraries():
        pairs = adapter.attach(network)
    return network, dict(pairs)


def _require_repeatable(first: nn.Module, second: nn.Module) -> None:
    ours, again = first.state_dict(), second.state_dict()
    for name in ours | again:
        if name not in ours or name not in again or not _is_equal(ours[name], again[name]):
            raise TaskError(
                f"task.module: a second call of model() gave a different {name}; draw from torch's global "
                "generator, which FedVeil seeds with run.seed, and do not set a seed yourself"
            )


def _is_equal(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
