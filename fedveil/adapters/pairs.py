"""What every adapter of low-rank pairs shares: its fields, and the initial draw."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import written
from fedveil.contract.adapter import Adapter, Attached, Mount
from fedveil.contract.spec import Spec, TensorSpec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import Stream

_WIDTHS = {"h.0.attn": (5, 7), "h.1.mlp": (7, 3), "h.2.mlp": (3, 4)}  # (d_in, d_out): of the example


def _pattern(given: object) -> object:
    """A list of names as PEFT takes it (a module of that name, or whose last parts are) as a regular expression."""
    if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) for name in given):
        return given  # text, or something that the type refuses
    return rf"(.*\.)?({'|'.join(map(re.escape, given))})"


@dataclass(frozen=True)
class Pairs(Adapter):
    """The fields of every adapter of low-rank pairs. Abstract: no `kind`."""

    mount: ClassVar[Mount] = "layers"
    rank: int = 8
    alpha: float | None = None
    targets: Annotated[str, BeforeValidator(_pattern)] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter.rank: expected an integer of at least 1, found {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"adapter.alpha: expected a number above 0, found {self.alpha}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @abstractmethod
    def as_lora(self, weights: Weights) -> tuple[LoraFields, dict[str, Tensor]]:
        """One pair `<module>.lora_A`, `<module>.lora_B` a layer, with the same change of the layer's weight."""

    @override
    def save(self, folder: Path, attached: Attached, weights: Weights) -> None:
        """PEFT's folder of a LoRA adapter."""
        from peft import LoraConfig
        from transformers.pytorch_utils import Conv1D

        fields, factors = self.as_lora(weights)
        inside = {module: _whole_name(attached, module) for module in modules(factors)}
        LoraConfig(
            **fields.for_peft(),
            target_modules=written.targets(attached.model, inside.values()),
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in attached.model.modules()),
            **written.about(attached),
        ).save_pretrained(str(folder))
        named = {f"{inside[module]}.{factor}": name for name in factors for module, _, factor in [name.rpartition(".")]}
        stored = {f"base_model.model.{name}.weight": factors[ours] for name, ours in named.items()}
        written.tensors(folder / written.PEFT_WEIGHTS, stored)

    @override
    @torch.no_grad()
    def merge(self, plain: Attached, weights: Weights) -> None:
        """W <- W + scale * B A, for every layer."""
        from transformers.pytorch_utils import Conv1D

        fields, factors = self.as_lora(weights)
        for module in modules(factors):
            own = plain.names.get(f"{module}.weight")
            if own is None:
                raise ConfigError(
                    f"adapter.targets: expected layers with weights of their own, found {module}, whose weight another "
                    "layer has too; load final/ beside the base"
                )
            layer = plain.model.get_submodule(own.removesuffix(".weight"))
            change = fields.scale * (factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"])
            layer.weight += (change.T if isinstance(layer, Conv1D) else change).to(layer.weight.device)


@dataclass(frozen=True)
class LoraFields:
    """What PEFT has to know of LoRA pairs; the names are its own."""

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def for_peft(self) -> dict[str, Any]:
        """Arguments of `peft.LoraConfig`. A whole alpha is an integer, as other programs want it."""
        alpha = int(self.alpha) if float(self.alpha).is_integer() else self.alpha
        given = {"r": self.rank, "lora_alpha": alpha, "use_rslora": self.rslora, "lora_dropout": self.dropout}
        return {**given, "bias": "none"}


def modules(factors: Mapping[str, Tensor]) -> list[str]:
    """The layers that have a pair, in the order of the factors."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in factors))


def _whole_name(attached: Attached, module: str) -> str:
    """The name of a layer in the whole model, from the place of its factor there."""
    return attached.names[f"{module}.lora_A"].rpartition(".lora_A")[0]


def drawn(shapes: Mapping[str, tuple[int, ...]], rng: Stream, private_b_std: float = 0.0) -> dict[str, Tensor]:
    """Factors under the names of `shapes`: every A uniform within 1/sqrt(d_in), every B zero.

    A private B is zero too, unless `private_b_std`, the standard deviation of its entries, is above 0.
    """
    generator = rng.torch_generator()
    found = {name: torch.zeros(shapes[name]) for name in sorted(shapes)}
    for name, tensor in found.items():
        if name.endswith((".lora_A", ".private_A")):
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        elif name.endswith(".private_B") and private_b_std:
            tensor.normal_(std=private_b_std, generator=generator)
    return {name: found[name] for name in shapes}


def example(rank: int, pairs: tuple[str, ...]) -> Spec:
    """Three layers of unequal widths, so that a method which shares the top two keeps one to itself."""
    return {
        f"{module}.{pair}_{side}": TensorSpec((rank, d_in) if side == "A" else (d_out, rank))
        for module, (d_in, d_out) in _WIDTHS.items()
        for pair in pairs
        for side in "AB"
    }


def unfit(targets: str, reason: str) -> ConfigError:
    """The error for targets that match no linear layer."""
    return ConfigError(
        f'adapter.targets: expected "all-linear" or a regular expression over the names of linear layers, '
        f'found "{targets}" ({reason})'
    )


def chosen(model: Any, targets: str) -> dict[str, nn.Module]:
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
            raise unfit(targets, f"no regular expression: {error}") from None
    other = [name for name, m in found.items() if not isinstance(m, linear)]
    if other or not found:
        raise unfit(targets, f"{other[0]} is no linear layer" if other else "no module has such a name")
    return found


def widths(layer: nn.Module) -> tuple[int, int]:
    """(d_in, d_out)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    d_in, d_out = layer.weight.shape  # type: ignore[misc]  # Conv1D
    return int(d_in), int(d_out)
