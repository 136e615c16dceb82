"""LoRA: one low-rank pair per layer, with PEFT's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import expert_layers, low_rank_pairs
from fedveil.adapters.low_rank_pairs import LoraFields, LowRankPairsAdapter
from fedveil.contract.param_spec import Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream

__all__ = ["LoraAdapter"]


@final
@dataclass(frozen=True)
class LoraAdapter(LowRankPairsAdapter):
    """Low-rank pairs: W = W_0 + scale * B A, with scale = alpha / rank (Hu et al. 2021).

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, so that W = W_0 + B A.
        targets: "all-linear" (every linear layer in the blocks, without the output head), a regular expression for
            module names, or in method.params a list, as in PEFT: ["q_proj", "v_proj"].
        rslora: whether scale = alpha / sqrt(rank) (Kalajdzievski 2023), which requires an alpha.
        dropout: fraction of a layer's inputs dropped before its pair in a training step, from 0 to below 1; scoring
            drops no inputs.
    """

    kind: Literal["lora"] = "lora"
    rslora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rslora and self.alpha is None:
            raise ConfigError("adapter.alpha: rslora = true requires it; set it to a number above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"adapter.dropout: expected a number from 0 to below 1, found {self.dropout}")

    @property
    @override
    def scale(self) -> float:
        """Return alpha / rank, or alpha / sqrt(rank)."""
        return self._fields.scale

    @property
    def _fields(self) -> LoraFields:
        return LoraFields(self.rank, self.rank if self.alpha is None else self.alpha, self.rslora)

    @property
    @override
    def drops(self) -> bool:
        return self.dropout > 0

    @override
    def example_spec(self) -> Spec:
        return low_rank_pairs.example_weights(self.rank, ("lora",))

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Draw A uniformly from [-1/sqrt(d_in), 1/sqrt(d_in)]; B is zero."""
        return low_rank_pairs.draw_pairs(shapes, rng)

    @override
    def as_lora(self, weights: Weights) -> tuple[LoraFields, dict[str, Tensor]]:
        """Return the pairs unchanged, with dropout 0."""
        return self._fields, dict(weights)

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Add a pair to each target layer: `<module>.lora_A` (r x d_in) and `<module>.lora_B` (d_out x r).

        Raises:
            ConfigError: `targets` matches no linear layer, or lists a name that no layer has.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        low_rank_pairs.require_targets(model, self.targets)
        targets: str | list[str] = self.targets
        if expert_layers.converts_targets(model):
            targets = list(low_rank_pairs.chosen_modules(model, self.targets))
        lora = LoraConfig(
            **replace(self._fields, dropout=self.dropout).for_peft(),
            target_modules=targets,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),
        )
        try:
            with torch.random.fork_rng(devices=[]):  # PEFT draws initial values, which are never used
                model = inject_adapter_in_model(lora, model)
        except ValueError as error:
            raise low_rank_pairs.explain_unfit(self.targets, str(error).partition("\n")[0]) from None
        trained = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                trained[name.removesuffix(".default.weight")] = parameter
        expert_layers.log_unpaired(model, low_rank_pairs.target_modules(trained))
        return trained
