"""LoRA: one low-rank pair a layer. The layers are PEFT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import pairs
from fedveil.adapters.pairs import Pairs
from fedveil.contract.spec import Spec, Weights
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
    """

    kind: Literal["lora"] = "lora"

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
            lora_alpha=self.scale * self.rank,  # PEFT divides by the rank; any number does
            target_modules=self.targets,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),
            lora_dropout=0.0,
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
