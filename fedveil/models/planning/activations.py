"""Count the memory that a training step keeps for its backward pass, with a forward pass on tensors without storage.

The count uses a base with 1 layer and one with 2; every further layer keeps as much memory as the second. Attention is
counted as in torch's CPU kernels, with a padding mask; other kernels may keep less.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedveil.contract.adapter import Adapter
from fedveil.models.library_logging import quiet_libraries
from fedveil.models.planning import meta_model
from fedveil.models.planning.model_config import ModelConfig


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes stored for a batch's backward pass, without the logits.

    Attributes:
        layer: bytes of one layer.
        rest: bytes of everything else.
        inputs: bytes of one layer's input, the only part stored if layers are recomputed.
    """

    layer: int
    rest: int
    inputs: int

    def total_bytes(self, layers: int, is_recomputed: bool) -> int:
        """Return the bytes for a base with `layers` layers.

        If activations are recomputed, only one layer at a time keeps all its activations.
        """
        return self.rest + (layers * self.inputs + self.layer if is_recomputed else layers * self.layer)


def count_activations(settings: ModelConfig, adapter: Adapter, rows: int, tokens: int, bf16: bool) -> ActivationBytes:
    """Count the bytes for a batch of `rows` examples of `tokens` tokens each.

    `bf16`: whether train.precision is bf16; a frozen base is then in bf16 too.

    Raises:
        ConfigError: the adapter fits no layer of the base.
    """
    key = settings.kind, tuple(sorted(settings.values.items()))
    one, two = (_count(*key, adapter, rows, tokens, bf16, layers) for layers in (1, 2))
    itemsize = 2 if bf16 and not adapter.trains_base else 4
    return ActivationBytes(two - one, max(0, 2 * one - two), rows * tokens * settings.width * itemsize)


@lru_cache(maxsize=64)
def _count(
    kind: str, values: tuple[tuple[str, Any], ...], adapter: Adapter, rows: int, tokens: int, bf16: bool, layers: int
) -> int:
    is_half = bf16 and not adapter.trains_base
    model = meta_model.meta_model(
        ModelConfig(kind, dict(values)).cut(layers), torch.bfloat16 if is_half else torch.float32
    )
    with quiet_libraries(), torch.device("meta"):
        for parameter in adapter.attach(model).values():
            parameter.data = parameter.data.float()
    with FakeTensorMode():
        _place(model)
        ids, mask = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens, dtype=torch.long)
        return bytes_kept_by(model, ids, mask, bf16)


def bytes_kept_by(model: Any, ids: Tensor, mask: Tensor, bf16: bool) -> int:
    """Return the bytes that a forward pass keeps, without parameters and buffers; each storage counts once."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    saved_tensors: dict[int, Tensor] = {}  # keeping them alive prevents a new storage from reusing a number

    def keep(tensor: Tensor) -> Tensor:
        if (number := tensor.untyped_storage()._cdata) not in own:
            saved_tensors.setdefault(number, tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())


def _place(model: Any) -> None:
    """Move the model from the meta device to the CPU, which the caller's FakeTensorMode only simulates."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
