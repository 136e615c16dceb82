"""Fields and initialization shared by all adapters that train low-rank pairs."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import expert_layers, export
from fedveil.contract.adapter import Adapter, AttachedModel, Mount
from fedveil.contract.param_spec import ParamSpec, Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream
from fedveil.sanitize import sanitize, suggest_name

_ANY_PARENT = r"(.*\.)?"  # matches any parent modules before a listed name
_PAIR = re.compile(r"\.(lora|private)_[AB](\.|$)|\.residual$")  # in the names of an adapter's own tensors
_WIDTHS = {"h.0.attn": (5, 7), "h.1.mlp": (7, 3), "h.2.mlp": (3, 4)}  # (d_in, d_out) of the example's layers


def name_pattern(given: object) -> object:
    """Return a regular expression for a PEFT-style list of names: full module names, or their last parts."""
    if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) for name in given):
        return given  # a regular expression, or a value that type validation will refuse
    return f"{_ANY_PARENT}({'|'.join(map(re.escape, given))})"


@dataclass(frozen=True)
class LowRankPairsAdapter(Adapter):
    """The fields shared by all adapters with low-rank pairs. Abstract: it has no `kind`."""

    mount: ClassVar[Mount] = "layers"
    rank: int = 8
    alpha: float | None = None
    targets: Annotated[str, BeforeValidator(name_pattern)] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter.rank: expected an integer of at least 1, found {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"adapter.alpha: expected a number above 0, found {self.alpha}")

    @property
    def scale(self) -> float:
        """Return alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @abstractmethod
    def as_lora(self, weights: Weights) -> tuple[LoraFields, dict[str, Tensor]]:
        """Return one pair per layer, `<module>.lora_A` and `<module>.lora_B`, with the same effect on its weight."""

    @override
    def including(self, modules: Sequence[str]) -> LowRankPairsAdapter:
        """Return the adapter with these layers added to its targets; "all-linear" includes them already."""
        if self.targets == "all-linear" or not modules:
            return self
        return replace(self, targets=f"(?:{self.targets})|(?:{'|'.join(map(re.escape, modules))})")

    @override
    def save(self, folder: Path, attached: AttachedModel, weights: Weights) -> None:
        """Write a LoRA adapter in PEFT's format. The model's heads are written in full, as `modules_to_save`."""
        from peft import LoraConfig
        from transformers.pytorch_utils import Conv1D

        whole = {module: _whole_name(attached, module) for module in target_modules(weights)}
        in_heads = {module for module, name in whole.items() if _is_within(name, attached.heads)}
        fields, factors = self.as_lora(_without(weights, in_heads))
        inside = {module: whole[module] for module in target_modules(factors)}
        LoraConfig(
            **fields.for_peft(),
            target_modules=export.target_modules(attached.model, inside.values()),
            modules_to_save=list(attached.heads) or None,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in attached.model.modules()),
            **export.adapter_metadata(attached),
        ).save_pretrained(str(folder))
        named = {f"{inside[module]}.{factor}": name for name in factors for module, _, factor in [name.rpartition(".")]}
        stored = {f"base_model.model.{name}.weight": factors[ours] for name, ours in named.items()}
        stored |= {f"base_model.model.{name}": w for name, w in self._whole_heads(attached, weights, in_heads).items()}
        export.adapter_tensors(folder / export.PEFT_WEIGHTS, stored)
        export.write_generation(folder, attached)
        export.require_loadable(folder, attached)

    @torch.no_grad()
    def _whole_heads(self, attached: AttachedModel, weights: Weights, in_heads: set[str]) -> dict[str, Tensor]:
        """Return all tensors in the model's heads, with their pairs merged, under their names in the plain model."""
        tensors = {
            name.replace(".base_layer.", "."): p.detach().to("cpu", torch.float32, copy=True)
            for name, p in attached.model.named_parameters()
            if _is_within(name, attached.heads) and not _PAIR.search(name)
        }
        if in_heads:
            fields, factors = self.as_lora({n: w for n, w in weights.items() if n.rpartition(".")[0] in in_heads})
            for module in in_heads:
                change = fields.scale * (factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]).cpu()
                tensors[f"{_whole_name(attached, module)}.weight"] += change
        return tensors

    @override
    @torch.no_grad()
    def merge(self, plain: AttachedModel, weights: Weights) -> None:
        """Set W <- W + scale * B A for every layer."""
        from transformers.pytorch_utils import Conv1D

        fields, factors = self.as_lora(weights)
        for module in target_modules(factors):
            own = plain.names.get(f"{module}.weight")
            if own is None:
                raise ConfigError(
                    f"adapter.targets: {module} shares its weight with another layer, so its pair cannot be "
                    "merged; load final/ on top of the base instead"
                )
            layer = plain.model.get_submodule(own.removesuffix(".weight"))
            change = fields.scale * (factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"])
            layer.weight += (change.T if isinstance(layer, Conv1D) else change).to(layer.weight.device)


@dataclass(frozen=True)
class LoraFields:
    """The LoRA settings that PEFT needs, under PEFT's own names."""

    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Return alpha / rank, or alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def for_peft(self) -> dict[str, Any]:
        """Return arguments for `peft.LoraConfig`. A whole-number alpha is an int, as other programs expect."""
        alpha = int(self.alpha) if float(self.alpha).is_integer() else self.alpha
        given = {"r": self.rank, "lora_alpha": alpha, "use_rslora": self.rslora, "lora_dropout": self.dropout}
        return {**given, "bias": "none"}


def target_modules(factors: Mapping[str, Tensor]) -> list[str]:
    """Return the layers that have a pair, in the order of the factors."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in factors))


def _without(weights: Weights, modules: set[str]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if name.rpartition(".")[0] not in modules}


def _is_within(name: str, modules: Sequence[str]) -> bool:
    """Return whether a module or tensor is one of `modules` or belongs to one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _whole_name(attached: AttachedModel, module: str) -> str:
    """Return a layer's name in the whole model, derived from its factor's name."""
    return attached.names[f"{module}.lora_A"].rpartition(".lora_A")[0]


def draw_pairs(
    shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, private_b_std: float = 0.0
) -> dict[str, Tensor]:
    """Draw factors with these names and shapes: every A uniform in [-1/sqrt(d_in), 1/sqrt(d_in)], every B zero.

    A private B is zero too, unless `private_b_std`, the standard deviation of its entries, is above 0.
    """
    generator = rng.torch_generator()
    factors = {name: torch.zeros(shapes[name]) for name in sorted(shapes)}
    for name, tensor in factors.items():
        if name.endswith((".lora_A", ".private_A")):
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
        elif name.endswith(".private_B") and private_b_std:
            tensor.normal_(std=private_b_std, generator=generator)
    return {name: factors[name] for name in shapes}


def example_weights(rank: int, pairs: tuple[str, ...]) -> Spec:
    """Return specs for three layers of different widths; a method that shares the top two keeps one private."""
    return {
        f"{module}.{pair}_{side}": ParamSpec((rank, d_in) if side == "A" else (d_out, rank))
        for module, (d_in, d_out) in _WIDTHS.items()
        for pair in pairs
        for side in "AB"
    }


def explain_unfit(targets: str, reason: str) -> ConfigError:
    """Return the error for targets that match no linear layer."""
    return ConfigError(
        f'adapter.targets: "{targets}" is neither "all-linear" nor a regular expression for the names of linear '
        f"layers ({reason})"
    )


def require_targets(model: Any, targets: str) -> None:
    """Raise ConfigError if a listed target matches no layer, or if an embedding is chosen."""
    from transformers.pytorch_utils import Conv1D

    if targets == "all-linear":
        return
    modules = dict(model.named_modules())
    for name in _listed(targets):
        if not any(re.fullmatch(_ANY_PARENT + re.escape(name), module) for module in modules):
            linear = (each for each, module in modules.items() if isinstance(module, nn.Linear | Conv1D))
            known = sorted({each.rpartition(".")[2] for each in linear})
            raise ConfigError(
                f'adapter.targets: no linear layer is named "{sanitize(name)}"; {suggest_name(name, known)}the '
                f"layers are named {sanitize(', '.join(known))}"
            )
    try:
        embeddings = [n for n, m in modules.items() if isinstance(m, nn.Embedding) and re.fullmatch(targets, n)]
    except re.error as error:
        raise explain_unfit(targets, f"not a regular expression: {error}") from None
    if embeddings:
        raise explain_unfit(targets, f"{embeddings[0]} is not a linear layer")


def _listed(targets: str) -> list[str]:
    """Return the names from which `name_pattern` built `targets`; none if it is a user's regular expression."""
    escaped = targets.removeprefix(f"{_ANY_PARENT}(").removesuffix(")").split("|")
    names = [re.sub(r"\\(.)", r"\1", each) for each in escaped]
    return names if name_pattern(names) == targets else []


def chosen_modules(model: Any, targets: str) -> dict[str, nn.Module]:
    """Return the layers that PEFT would select, by name."""
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    require_targets(model, targets)
    linear = (nn.Linear, Conv1D)
    modules: dict[str, nn.Module]
    if targets == "all-linear":
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        modules = {name: m for name, m in model.named_modules() if isinstance(m, linear) and m is not head}
        left_out = expert_layers.find_expert_layers(model, modules)
        modules = {name: m for name, m in modules.items() if name not in left_out}
    else:
        modules = {name: m for name, m in model.named_modules() if re.fullmatch(targets, name)}
    other = [name for name, m in modules.items() if not isinstance(m, linear)]
    if other or not modules:
        raise explain_unfit(targets, f"{other[0]} is not a linear layer" if other else "no module name matches")
    if experts := sorted(expert_layers.find_expert_layers(model, modules)):
        known = sorted({name.rpartition(".")[2] for name in chosen_modules(model, "all-linear")})
        raise ConfigError(
            f"adapter.targets: PEFT treats {experts[0]} as an expert name in this base, so it could not load the "
            f"adapter; choose from {', '.join(known)}"
        )
    return modules


def layer_widths(layer: nn.Module) -> tuple[int, int]:
    """Return (d_in, d_out)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    d_in, d_out = layer.weight.shape  # type: ignore[misc]  # Conv1D
    return int(d_in), int(d_out)


class LowRankLinear(nn.Module):
    """A frozen linear layer and its pair, which is always fp32.

    Attributes:
        base_layer: the frozen layer.
        lora_A, lora_B: the exchanged pair, r x d_in and d_out x r.
    """

    def __init__(self, base_layer: nn.Module, adapter: LowRankPairsAdapter) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._scale = adapter.scale
        # Zeros suffice, because a task loads weights before it computes anything.
        d_in, d_out = layer_widths(base_layer)
        self.lora_A = nn.Parameter(torch.zeros(adapter.rank, d_in, device=self.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(d_out, adapter.rank, device=self.weight.device))

    @property
    def weight(self) -> Tensor:
        """Return the frozen weight; some models read its dtype."""
        weight: Tensor = self.base_layer.weight  # type: ignore[assignment]
        return weight
