"""Two low-rank pairs a layer, multiplied entry by entry.

    y = W_0 x + b + scale * ((B A) o M) x,   M = B_p A_p + 1 ("plus-one") or B_p A_p ("product")

PEFT's own adapter of this kind (LoHa) has no "+ 1" and keeps both pairs under one name. The product has rank up to r^2,
so unlike LoRA's it cannot be applied factor by factor: each forward pass forms a d_out x d_in matrix, and
backpropagation keeps three of them a layer (train.checkpointing drops them between layers).

| layer | what is done |
|---|---|
| nn.Linear, also one that bitsandbytes quantised | called as it is; only the change is added |
| transformers' Conv1D (GPT-2), whose weight is d_in x d_out | likewise; the pairs are as for nn.Linear |
| the output embedding | left out by "all-linear", as PEFT leaves it out |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import pairs
from fedveil.adapters.pairs import LoraFields, Pairs
from fedveil.contract.spec import Spec, Weights
from fedveil.rng import Stream

Form = Literal["plus-one", "product"]


@final
@dataclass(frozen=True)
class HadamardLora(Pairs):
    """Two low-rank pairs a layer, multiplied entry by entry (Hyeon-Woo et al. 2022): W = W_0 + scale * (B A) o M.

    | form | M | initial values |
    |---|---|---|
    | "plus-one" | B_p A_p + 1 | B and B_p zero |
    | "product" | B_p A_p | B zero, B_p from N(0, 1/r); with B_p zero too no gradient would ever differ from zero |

    A and A_p are random in both. The change of W has rank up to r^2, so a forward pass forms it whole.

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, which gives scale 1.
        targets: as for `Lora`.
        form: what the private pair is made into.
    """

    kind: Literal["hadamard-lora"] = "hadamard-lora"
    form: Form = "plus-one"

    @property
    def private_b_std(self) -> float:
        """Standard deviation of B_p's initial entries."""
        return 0.0 if self.form == "plus-one" else self.rank**-0.5

    @override
    def example_spec(self) -> Spec:
        return pairs.example(self.rank, ("lora", "private"))

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: Stream, base: Weights) -> dict[str, Tensor]:
        """A and A_p uniform within 1/sqrt(d_in), B zero, B_p by the form. `shapes` may be the private pair alone."""
        return pairs.drawn(shapes, rng, self.private_b_std)

    @override
    def as_lora(self, weights: Weights) -> tuple[LoraFields, dict[str, Tensor]]:
        """The same change as one pair a layer, of rank up to r + r^2.

        Column i of B times column j of B_p, entry by entry, and row i of A times row j of A_p; for the "+ 1" also B and
        A. Private columns that are zero in every layer are left out: a neutral pair leaves the rank at r.
        """
        layers = pairs.modules(weights)
        used = [
            any(bool(weights[f"{m}.private_A"][j].any() and weights[f"{m}.private_B"][:, j].any()) for m in layers)
            for j in range(self.rank)
        ]
        found: dict[str, Tensor] = {}
        for m in layers:
            a, b, p, q = (weights[f"{m}.{name}"] for name in ("lora_A", "lora_B", "private_A", "private_B"))
            rows = [a] if self.form == "plus-one" or not any(used) else []
            columns = [b if self.form == "plus-one" else torch.zeros_like(b)] if rows else []
            for j in (j for j in range(self.rank) if used[j]):
                rows.append(a * p[j])
                columns.append(b * q[:, j, None])
            found |= {f"{m}.lora_A": torch.cat(rows), f"{m}.lora_B": torch.cat(columns, 1)}
        rank = len(next(iter(found[f"{m}.lora_A"] for m in layers)))
        return LoraFields(rank, self.scale * rank), found

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Replaces each chosen layer by a `HadamardLinear` around it.

        Names are `<module>.lora_A`, `.lora_B`, `.private_A` and `.private_B`.

        Raises:
            ConfigError: `targets` matches no layer, or something that is no linear layer.
        """
        chosen = pairs.chosen(model, self.targets)
        model.requires_grad_(False)
        for name, layer in chosen.items():
            model.set_submodule(name, HadamardLinear(layer, self))
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def change(
    a: Float[Tensor, "r d_in"],
    b: Float[Tensor, "d_out r"],
    private_a: Float[Tensor, "r d_in"],
    private_b: Float[Tensor, "d_out r"],
    form: Form,
    scale: float,
) -> Float[Tensor, "d_out d_in"]:
    """scale * (B A) o M, in the dtype of the factors."""
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
        (d_in, d_out), r, device = pairs.widths(base_layer), adapter.rank, self.weight.device
        self.lora_A = nn.Parameter(torch.zeros(r, d_in, device=device))
        self.lora_B = nn.Parameter(torch.zeros(d_out, r, device=device))
        self.private_A = nn.Parameter(torch.zeros(r, d_in, device=device))
        self.private_B = nn.Parameter(torch.zeros(d_out, r, device=device))

    @property
    def weight(self) -> Tensor:
        """The frozen weight: some models look at its dtype."""
        weight: Tensor = self.base_layer.weight  # type: ignore[assignment]
        return weight

    @override
    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """The frozen layer's output and the change's, in the dtype of the former."""
        out: Tensor = self.base_layer(x)
        delta = change(self.lora_A, self.lora_B, self.private_A, self.private_B, self._form, self._scale)
        # Autocast, where it is on, brings both to its own dtype, as for any linear layer.
        return (out + nn.functional.linear(x.to(delta.dtype), delta)).to(out.dtype)
