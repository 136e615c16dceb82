"""Two low-rank pairs per layer, multiplied elementwise.

    y = W_0 x + b + scale * ((B A) o M) x,   M = B_p A_p + 1 ("plus-one") or B_p A_p ("product")

PEFT's LoHa adapter has no "+ 1" and keeps both pairs under one name. The product has rank up to r^2, so unlike LoRA's
product it cannot be applied factor by factor: each forward pass forms a d_out x d_in matrix, and backpropagation keeps
three such matrices per layer (train.gradient-checkpointing drops them between layers).

| layer | treatment |
|---|---|
| nn.Linear, also quantized by bitsandbytes | called unchanged; the change is added to its output |
| transformers' Conv1D (GPT-2), whose weight is d_in x d_out | the same; the pairs are as for nn.Linear |
| the output embedding | excluded from "all-linear", as in PEFT |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import low_rank_pairs
from fedveil.adapters.low_rank_pairs import LoraFields, LowRankPairsAdapter
from fedveil.contract.param_spec import Spec, Weights
from fedveil.rng import RandomStream

__all__ = ["HadamardLoraAdapter"]

Form = Literal["plus-one", "product"]


@final
@dataclass(frozen=True)
class HadamardLoraAdapter(LowRankPairsAdapter):
    """Two low-rank pairs per layer, multiplied elementwise (Hyeon-Woo et al. 2022): W = W_0 + scale * (B A) o M.

    | form | M | initial values |
    |---|---|---|
    | "plus-one" | B_p A_p + 1 | B and B_p zero |
    | "product" | B_p A_p | B zero, B_p from N(0, 1/r); if B_p were zero too, all gradients would stay zero |

    A and A_p are random in both forms. The change in W has rank up to r^2, so a forward pass computes the full matrix.

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, which gives scale 1.
        targets: as in `LoraAdapter`.
        form: how M is computed from the private pair.
    """

    kind: Literal["hadamard-lora"] = "hadamard-lora"
    form: Form = "plus-one"

    @property
    def private_b_std(self) -> float:
        """Return the standard deviation of B_p's initial entries."""
        return 0.0 if self.form == "plus-one" else self.rank**-0.5

    @override
    def example_spec(self) -> Spec:
        return low_rank_pairs.example_weights(self.rank, ("lora", "private"))

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Draw A and A_p uniformly within 1/sqrt(d_in) and B_p by the form; B is zero.

        `shapes` may contain only the private pair.
        """
        return low_rank_pairs.draw_pairs(shapes, rng, self.private_b_std)

    @override
    def as_lora(self, weights: Weights) -> tuple[LoraFields, dict[str, Tensor]]:
        """Return the same change as one pair per layer, of rank up to r + r^2.

        Its columns are the elementwise products of column i of B and column j of B_p, and its rows are the products of
        row i of A and row j of A_p; with "+ 1", B and A are included too. Private columns that are zero in every layer
        are omitted, so a neutral pair leaves the rank at r.
        """
        layers = low_rank_pairs.target_modules(weights)
        used = [
            any(bool(weights[f"{m}.private_A"][j].any() and weights[f"{m}.private_B"][:, j].any()) for m in layers)
            for j in range(self.rank)
        ]
        factors: dict[str, Tensor] = {}
        for m in layers:
            a, b, p, q = (weights[f"{m}.{name}"] for name in ("lora_A", "lora_B", "private_A", "private_B"))
            rows = [a] if self.form == "plus-one" or not any(used) else []
            columns = [b if self.form == "plus-one" else torch.zeros_like(b)] if rows else []
            for j in (j for j in range(self.rank) if used[j]):
                rows.append(a * p[j])
                columns.append(b * q[:, j, None])
            factors |= {f"{m}.lora_A": torch.cat(rows), f"{m}.lora_B": torch.cat(columns, 1)}
        rank = len(next(iter(factors[f"{m}.lora_A"] for m in layers)))
        return LoraFields(rank, self.scale * rank), factors

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Wrap each chosen layer in a `HadamardLinear`.

        Names are `<module>.lora_A`, `.lora_B`, `.private_A` and `.private_B`.

        Raises:
            ConfigError: `targets` matches no layer, or matches a module that is not a linear layer.
        """
        chosen = low_rank_pairs.chosen_modules(model, self.targets)
        model.requires_grad_(False)
        for name, layer in chosen.items():
            model.set_submodule(name, HadamardLinear(layer, self))
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def weight_change(
    a: Float[Tensor, "r d_in"],
    b: Float[Tensor, "d_out r"],
    private_a: Float[Tensor, "r d_in"],
    private_b: Float[Tensor, "d_out r"],
    form: Form,
    scale: float,
) -> Float[Tensor, "d_out d_in"]:
    """Return scale * (B A) o M in the dtype of the factors."""
    # Under autocast the products would be bf16, where 1 + B_p A_p is 1 for every entry of B_p A_p up to 2**-8.
    with torch.autocast(a.device.type, enabled=False):
        private = private_b @ private_a
        return scale * (b @ a) * (private + 1 if form == "plus-one" else private)


@final
class HadamardLinear(low_rank_pairs.LowRankLinear):
    """A frozen linear layer with its two low-rank pairs, which are always fp32.

    Attributes:
        base_layer: the frozen layer.
        lora_A, lora_B: the exchanged pair, r x d_in and d_out x r.
        private_A, private_B: the pair that stays on the client, with the same shapes.
    """

    def __init__(self, base_layer: nn.Module, adapter: HadamardLoraAdapter) -> None:
        super().__init__(base_layer, adapter)
        self._form = adapter.form
        self.private_A = nn.Parameter(torch.zeros_like(self.lora_A))
        self.private_B = nn.Parameter(torch.zeros_like(self.lora_B))

    @override
    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """Return the frozen layer's output plus the change's output, in the dtype of the frozen layer's output."""
        out: Tensor = self.base_layer(x)
        delta = weight_change(self.lora_A, self.lora_B, self.private_A, self.private_B, self._form, self._scale)
        # Autocast, if it is on, casts both to its own dtype, as for any linear layer.
        return (out + nn.functional.linear(x.to(delta.dtype), delta)).to(out.dtype)
