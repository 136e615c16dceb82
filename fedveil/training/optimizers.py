"""The optimizer for local training, chosen by train.optimizer.

| name | state bytes per weight | |
|---|---|---|
| "adamw" | 8 | torch's own |
| "adamw-8bit" | 2 | bitsandbytes' AdamW (Dettmers et al. 2022): 8 bits per state, one scale per block of 256 |
| "paged-adamw-8bit" | 2 | the same, in pages that the driver moves to the host if the GPU is full; not on a CPU |

For tensors with fewer than 4,096 entries, bitsandbytes uses 32-bit states.
"""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from torch import Tensor

from fedveil.config import RunConfig, TrainConfig
from fedveil.contract.method import Method
from fedveil.errors import ConfigError
from fedveil.privacy.dp_sgd import DpSgdConfig

_PIECE = 1 << 20  # entries, in whole blocks; on a CPU, bitsandbytes needs five times as much temporary memory
_OF_STEPS = ("lr-schedule", "warmup-ratio", "max-grad-norm")  # keys that only affect AdamW steps
_SMALLEST = 4096  # entries in the smallest tensor with 8-bit states


class LocalOptimizer(Protocol):
    """The optimizer interface that local training needs."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups in the format of torch's optimizers; each contains its learning rate, "lr"."""
        ...

    def step(self) -> Any:
        """Update the parameters with their gradients."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients."""
        ...


def create(parameters: list[Tensor], train: TrainConfig) -> LocalOptimizer:
    """Create an optimizer. AdamW uses torch's fused step, one pass over weight, gradient and states, on any device.

    Raises:
        ConfigError: a paged optimizer for parameters that are not on a GPU.
    """
    on_gpu = all(p.is_cuda for p in parameters)
    if train.optimizer == "paged-adamw-8bit":
        if not on_gpu:
            raise ConfigError(
                'train.optimizer: "paged-adamw-8bit" requires a GPU at each site, but this site trains on its '
                'CPU; set "adamw-8bit", which has the same states, or "adamw"'
            )
        from bitsandbytes.optim import PagedAdamW8bit

        return PagedAdamW8bit(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)  # type: ignore[no-any-return]
    if train.optimizer == "adamw-8bit":
        return _eight_bit(parameters, train) if on_gpu else _Pieces(parameters, train)
    # The fused step reads entries in memory order: a gradient with a different layout would update the wrong entries,
    # without an error from torch.
    fused = all(p.is_contiguous() for p in parameters) or None
    return torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay, fused=fused)


def set_rate(optimiser: LocalOptimizer, learning_rate: float) -> None:
    """Set the learning rate of all following steps."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate


def check_optimizer(method: Method, config: RunConfig) -> None:
    """Check that the run takes the steps that its keys configure.

    Raises:
        ConfigError: a key for AdamW steps is set, but the clients take other steps or none and would ignore it.
    """
    if DpSgdConfig.from_config(config.dp) is not None:
        _check_noisy(method, config)
        instead = "dp.*, whose noisy steps are plain SGD and clip every example; leave it out; see dp.learning-rate"
    elif not method.uses_local_optimizer:
        instead = f"the method {config.method.name}, whose clients take no such steps; leave it out"
    else:
        return
    given, default = config.train.model_dump(by_alias=True), TrainConfig().model_dump(by_alias=True)
    for key in _OF_STEPS:
        if given[key] != default[key]:
            raise ConfigError(f"train.{key}: expected {default[key]!r}, found {given[key]!r} with {instead}")


def _check_noisy(method: Method, config: RunConfig) -> None:
    """Raise ConfigError for settings that per-example gradients do not support."""
    if config.train.packing:
        raise ConfigError(
            "train.packing: dp.* computes the gradient of every example separately, so examples cannot be packed; "
            "leave it out"
        )
    if method.adapter.drops:
        raise ConfigError("adapter.dropout: dp.* computes per-example gradients without dropout; leave it out")


def _eight_bit(parameters: list[Tensor], train: TrainConfig) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of the flattened tensor. The last one is never so small that it would get 32-bit states."""
    whole = max(0, tensor.numel() - _SMALLEST) // _PIECE
    return torch.split(tensor.reshape(-1), [_PIECE] * whole + [tensor.numel() - whole * _PIECE])


@final
class _Pieces:
    """8-bit AdamW that processes large tensors in pieces of whole blocks; the results are bit-identical."""

    def __init__(self, parameters: list[Tensor], train: TrainConfig) -> None:
        self._parameters = parameters
        self._pieces = [[torch.nn.Parameter(part) for part in _split(p.detach())] for p in parameters]
        self._inner = _eight_bit([piece for pieces in self._pieces for piece in pieces], train)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the pieces."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    def step(self) -> None:
        """Update the parameters with their gradients."""
        for parameter, pieces in zip(self._parameters, self._pieces, strict=True):
            grads = [None] * len(pieces) if parameter.grad is None else _split(parameter.grad)
            for piece, grad in zip(pieces, grads, strict=True):
                piece.grad = grad
        self._inner.step()
        self._inner.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
