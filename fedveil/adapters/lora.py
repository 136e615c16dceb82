"""LoRA: one low-rank pair a layer. The layers are PEFT's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import pairs
from fedveil.adapters.pairs import Pairs
from fedveil.contract.spec import Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import Stream


@final
@dataclass(frozen=True)
class Lora(Pairs):
    """Low-rank pairs: W = W_0 + scale * B A, with scale = alpha / rank (Hu et al. 2021).

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, so that W = W_0 + B A.
        targets: "all-linear" (every linear layer of the blocks, the output head left out), or a
            regular expression over module names.
        rslora: scale = alpha / sqrt(rank) (Kalajdzievski 2023), which needs an alpha.
        dropout: part of a layer's inputs that its pair does not see in a training step, from 0 to below 1; in scoring
            it sees all.
    """

    kind: Literal["lora"] = "lora"
    rslora: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rslora and self.alpha is None:
            raise ConfigError("adapter.alpha: expected a number above 0 with rslora = true, found none; set it")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"adapter.dropout: expected a number from 0 to below 1, found {self.dropout}")

    @property
    @override
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / math.sqrt(self.rank) if self.rslora and self.alpha is not None else super().scale

    @property
    @override
    def drops(self) -> bool:
        return self.dropout > 0

    @override
    def example_spec(self) -> Spec:
        return pairs.example(self.rank, ("lora",))

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: Stream, base: Weights) -> dict[str, Tensor]:
        """A uniform within 1/sqrt(d_in), B zero."""
        return pairs.drawn(shapes, rng)

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Puts a pair beside each chosen layer: `<module>.lora_A` (r x d_in) and `<module>.lora_B` (d_out x r).

        Raises:
            ConfigError: `targets` matches no linear layer.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        lora = LoraConfig(
            r=self.rank,
            # PEFT divides by the rank, or by its root; any number does.
            lora_alpha=self.alpha if self.rslora else self.scale * self.rank,
            use_rslora=self.rslora,
            target_modules=self.targets,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),
            lora_dropout=self.dropout,
            bias="none",
        )
        try:
            with torch.random.fork_rng(devices=[]):  # PEFT draws initial values that nobody uses
                model = inject_adapter_in_model(lora, model)
        except ValueError as error:
            raise pairs.unfit(self.targets, str(error).partition("\n")[0]) from None
        trained = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                trained[name.removesuffix(".default.weight")] = parameter
        return trained
