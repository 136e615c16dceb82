"""Attaches `HadamardLora` to a transformers model: two pairs a layer, multiplied entry by entry.

    y = W_0 x + b + scale * ((B A) o M) x,   M = B_p A_p + 1 ("plus-one") or B_p A_p ("product")

PEFT's own adapter of this kind (LoHa) has no "+ 1" and keeps both pairs under one name. The product has rank up to r^2, so
unlike LoRA's it cannot be applied factor by factor: each forward pass forms a d_out x d_in matrix, and backpropagation
keeps three of them a layer (train.checkpointing drops them between layers).

| layer | what is done |
|---|---|
| nn.Linear, also one that bitsandbytes quantised | called as it is; only the change is added |
| transformers' Conv1D (GPT-2), whose weight is d_in x d_out | likewise; the pairs are as for nn.Linear |
| the output embedding | left out by "all-linear", as PEFT leaves it out |
"""

from __future__ import annotations

import re
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from fedveil.adapters.hadamard import HadamardLora
from fedveil.errors import ConfigError


def change(
    a: Tensor, b: Tensor, private_a: Tensor, private_b: Tensor, form: Literal["plus-one", "product"], scale: float
) -> Tensor:
    """scale * (B A) o M, d_out x d_in, in the dtype of the factors."""
    # Under autocast the products would be bf16, where 1 + B_p A_p is 1 for every entry of B_p A_p up to 2**-8.
    with torch.autocast(a.device.type, enabled=False):
        private = private_b @ private_a
        return scale * (b @ a) * (private + 1 if form == "plus-one" else private)


@final
class HadamardLinear(nn.Module):
    """A frozen linear layer and its two pairs, fp32 whatever the layer is.

    Attributes:
        base_layer: the frozen layer.
        lora_A, lora_B: the pair that is exchanged, r x d_in and d_out x r.
        private_A, private_B: the pair that stays, of the same shapes.
    """

    def __init__(self, base_layer: nn.Module, adapter: HadamardLora) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._form = adapter.form
        self._scale = adapter.scale
        # Zeros: a task puts its weights in before anything is computed.
        (d_in, d_out), r, device = _widths(base_layer), adapter.rank, self.weight.device
        self.lora_A = nn.Parameter(torch.zeros(r, d_in, device=device))
        self.lora_B = nn.Parameter(torch.zeros(d_out, r, device=device))
        self.private_A = nn.Parameter(torch.zeros(r, d_in, device=device))
        self.private_B = nn.Parameter(torch.zeros(d_out, r, device=device))

    @property
    def weight(self) -> Tensor:
        """The frozen weight: some models look at its dtype."""
        weight: Tensor = self.base_layer.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer's output and the change's, in the dtype of the former."""
        out: Tensor = self.base_layer(x)
        delta = change(self.lora_A, self.lora_B, self.private_A, self.private_B, self._form, self._scale)
        # Autocast, where it is on, brings both to its own dtype, as for any linear layer.
        return (out + nn.functional.linear(x.to(delta.dtype), delta)).to(out.dtype)


def attach(model: Any, adapter: HadamardLora) -> dict[str, nn.Parameter]:
    """Replaces the chosen layers of `model` in place; the four parameters of each, the only ones that train.

    Names are `<module>.lora_A`, `.lora_B`, `.private_A` and `.private_B`, in the model's order.

    Raises:
        ConfigError: `adapter.targets` matches no layer, or something that is no linear layer.
    """
    chosen = _chosen(model, adapter.targets)
    model.requires_grad_(False)
    for name, layer in chosen.items():
        model.set_submodule(name, HadamardLinear(layer, adapter))
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _chosen(model: Any, targets: str) -> dict[str, nn.Module]:
    """The layers that PEFT would choose, by name."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    linear = (nn.Linear, Conv1D)
    found: dict[str, nn.Module]
    if targets == "all-linear":
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        found = {name: m for name, m in model.named_modules() if isinstance(m, linear) and m is not head}
    else:
        try:
            found = {name: m for name, m in model.named_modules() if re.fullmatch(targets, name)}
        except re.error as error:
            raise _unfit(targets, f"no regular expression: {error}") from None
    other = [name for name, m in found.items() if not isinstance(m, linear)]
    if other or not found:
        raise _unfit(targets, f"{other[0]} is no linear layer" if other else "no module has such a name")
    return found


def _unfit(targets: str, reason: str) -> ConfigError:
    return ConfigError(
        f'adapter.targets: expected "all-linear" or a regular expression over the names of linear layers, '
        f'found "{targets}" ({reason})'
    )


def _widths(layer: nn.Module) -> tuple[int, int]:
    """(d_in, d_out)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    d_in, d_out = layer.weight.shape  # type: ignore[misc]  # Conv1D
    return int(d_in), int(d_out)
