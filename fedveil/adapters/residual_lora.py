"""LoRA with a changing base: one low-rank pair per layer, and a residual that training steps do not change.

    y = W_0 x + b + scale * (R x + B A x)

R is d_out x d_in, fp32, initially zero, and as large as the layer's own weight. The base itself stays as it is on disk,
even if it is quantized, and the server determines R. In each forward and backward pass, R costs a matrix product as
large as the layer's own. It needs no gradient, no optimizer state and no per-example gradients.

| layer | treatment |
|---|---|
| nn.Linear, also quantized by bitsandbytes | called unchanged; the change is added to its output |
| transformers' Conv1D (GPT-2), whose weight is d_in x d_out | the same; R and the pair are as for nn.Linear |
| the output embedding | excluded from "all-linear", as in PEFT |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import low_rank_pairs
from fedveil.adapters.low_rank_pairs import LoraFields, LowRankPairsAdapter
from fedveil.contract.param_spec import ParamSpec, Spec, Weights
from fedveil.rng import RandomStream

__all__ = ["ResidualLoraAdapter"]

RESIDUAL = ".residual"
_LOST = 1e-6  # maximum error, relative to the norm of the change, when it is written as a pair
T = TypeVar("T")


def residual_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the entries that are residuals."""
    return {name: value for name, value in tensors.items() if name.endswith(RESIDUAL)}


def factor_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the entries that are not residuals."""
    return {name: value for name, value in tensors.items() if not name.endswith(RESIDUAL)}


@final
@dataclass(frozen=True)
class ResidualLoraAdapter(LowRankPairsAdapter):
    """Low-rank pairs plus a residual that only the server changes: W = W_0 + scale * (R + B A).

    Attributes:
        rank: r, the inner width of each pair; R may have any rank.
        alpha: the numerator of the scale; None means `rank`, which gives scale 1.
        targets: as in `LoraAdapter`.
    """

    kind: Literal["residual-lora"] = "residual-lora"

    @override
    def example_spec(self) -> Spec:
        spec = dict(low_rank_pairs.example_weights(self.rank, ("lora",)))
        for module in _modules(spec):
            shape = (spec[f"{module}.lora_B"].shape[0], spec[f"{module}.lora_A"].shape[1])
            spec[module + RESIDUAL] = ParamSpec(shape, fixed=True)
        return spec

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Draw A uniformly from [-1/sqrt(d_in), 1/sqrt(d_in)]; B and R are zero."""
        return low_rank_pairs.draw_pairs(shapes, rng)

    @override
    def as_lora(self, weights: Weights) -> tuple[LoraFields, dict[str, Tensor]]:
        """Return the same change as one pair per layer, with the rank of R + B A: up to the layer's smaller width.

        The pair comes from a singular value decomposition that drops the smallest values, with an error of at most
        1e-6 of the change's norm. Layers of lower rank are padded with zeros, because PEFT requires a single rank.
        """
        changes = {m: weights[m + RESIDUAL] + _product(weights, m) for m in _modules(weights)}
        if not any(bool(r.any()) for r in residual_names(weights).values()):
            return LoraFields(self.rank, self.scale * self.rank), factor_names(weights)
        split = {module: _split(change) for module, change in changes.items()}
        rank = max(len(a) for _, a in split.values())
        factors: dict[str, Tensor] = {}
        for module, (b, a) in split.items():
            factors[f"{module}.lora_A"] = torch.cat([a, a.new_zeros(rank - len(a), a.shape[1])])
            factors[f"{module}.lora_B"] = torch.cat([b, b.new_zeros(len(b), rank - b.shape[1])], 1)
        return LoraFields(rank, self.scale * rank), factors

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Wrap each chosen layer in a `ResidualLinear`.

        Names are `<module>.lora_A`, `.lora_B` and `.residual`; the last requires no gradient.

        Raises:
            ConfigError: `targets` matches no layer, or matches a module that is not a linear layer.
        """
        chosen = low_rank_pairs.chosen_modules(model, self.targets)
        model.requires_grad_(False)
        for name, layer in chosen.items():
            model.set_submodule(name, ResidualLinear(layer, self))
        return {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] in chosen}


def _modules(names: Iterable[str]) -> list[str]:
    return [name.removesuffix(".lora_A") for name in names if name.endswith(".lora_A")]


def _product(weights: Weights, module: str) -> Tensor:
    return weights[f"{module}.lora_B"] @ weights[f"{module}.lora_A"]


def _split(change: Float[Tensor, "d_out d_in"]) -> tuple[Float[Tensor, "d_out k"], Float[Tensor, "k d_in"]]:
    """Return a pair of the smallest rank, at least 1, whose product is the change to within `_LOST`."""
    u, s, v = torch.linalg.svd(change.double(), full_matrices=False)
    left_out = s.square().flip(0).cumsum(0).flip(0).sqrt()  # norm of the error if values from this one on are dropped
    rank = max(1, int((left_out > _LOST * left_out[0]).sum()))
    return (u[:, :rank] * s[:rank]).to(change), v[:rank].to(change)


@final
class ResidualLinear(low_rank_pairs.LowRankLinear):
    """A frozen linear layer with its residual and its pair, which are always fp32.

    Attributes:
        base_layer: the frozen layer.
        lora_A, lora_B: the pair, r x d_in and d_out x r.
        residual: d_out x d_in; it does not require a gradient.
    """

    def __init__(self, base_layer: nn.Module, adapter: ResidualLoraAdapter) -> None:
        super().__init__(base_layer, adapter)
        shape = (len(self.lora_B), self.lora_A.shape[1])
        self.residual = nn.Parameter(torch.zeros(shape, device=self.lora_A.device), requires_grad=False)

    @override
    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """Return the frozen layer's output plus the change's output, in the dtype of the frozen layer's output."""
        out: Tensor = self.base_layer(x)
        x = x.to(self.residual.dtype)
        linear = nn.functional.linear
        change = linear(x, self.residual) + linear(linear(x, self.lora_A), self.lora_B)
        return (out + self._scale * change).to(out.dtype)
