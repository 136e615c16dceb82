"""Context vectors before the class names of a frozen CLIP model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import export
from fedveil.contract.adapter import Adapter, AttachedModel, Mount
from fedveil.contract.param_spec import ParamSpec, Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream

__all__ = ["PromptAdapter"]


@final
@dataclass(frozen=True)
class PromptAdapter(Adapter):
    """Context vectors before a frozen CLIP model's class names, in its token embedding space (Zhou et al. 2022).

    b = length, d = the width of the token embeddings, k = rank. All tensors are initialized from N(0, std^2).

    | form | further tensors | context in a class's text |
    |---|---|---|
    | "one" | | prompt |
    | "sum" | `prompt.local` (b x d) | prompt + prompt.local |
    | "factored" | `prompt.u` (b x k), `prompt.v` (k x d) | prompt + prompt.u prompt.v |
    | "transport" | `prompt.local` (b x d) | two texts, one per prompt; an image's patches are transported to both |

    Attributes:
        length: b, the number of context vectors.
        form: one of the forms in the table.
        rank: k, for the form "factored".
        std: standard deviation of the initial entries.
        mass: gamma for the form "transport", the fraction of an image's patches that is transported.
        contrast: mu for the form "factored", the weight of the contrastive term in the loss; 0 = none.
        temperature: temperature of the contrastive term.
    """

    mount: ClassVar[Mount] = "texts"
    length: int = 16
    form: Literal["one", "sum", "factored", "transport"] = "one"
    rank: int = 4
    std: float = 0.02
    mass: float = 0.8
    contrast: float = 0.0
    temperature: float = 0.5
    kind: Literal["prompt"] = "prompt"

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"adapter.length: expected an integer of at least 1, found {self.length}")
        if self.form == "factored" and not 1 <= self.rank <= self.length:
            raise ConfigError(
                f"adapter.rank: expected 1 to {self.length}, the prompt's length, found {self.rank}; lower it, or "
                "raise adapter.length"
            )
        if not 0.0 < self.mass <= 1.0:
            raise ConfigError(f"adapter.mass: expected a fraction above 0 and at most 1, found {self.mass}")
        for name, value, least in (
            ("std", self.std, "at least 0"),
            ("contrast", self.contrast, "at least 0"),
            ("temperature", self.temperature, "above 0"),
        ):
            if not (0.0 <= value < math.inf) or (least == "above 0" and value == 0.0):
                raise ConfigError(f"adapter.{name}: expected a finite number {least}, found {value}")
        if self.contrast > 0 and self.form != "factored":
            raise ConfigError(f'adapter.contrast: form = "{self.form}" requires 0, found {self.contrast}')

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes for token embeddings of this width."""
        whole = (self.length, width)
        match self.form:
            case "one":
                return {"prompt": whole}
            case "factored":
                return {"prompt": whole, "prompt.u": (self.length, self.rank), "prompt.v": (self.rank, width)}
            case _:
                return {"prompt": whole, "prompt.local": whole}

    @override
    def example_spec(self) -> Spec:
        return {name: ParamSpec(shape) for name, shape in self.shapes(width=12).items()}

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Draw all entries from N(0, std^2)."""
        generator = rng.torch_generator()
        drawn = {name: torch.randn(shapes[name], generator=generator) * self.std for name in sorted(shapes)}
        return {name: drawn[name] for name in shapes}

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Freeze `model` and return the prompt's parameters, on the model's device but outside its layers.

        Raises:
            ConfigError: this is not a CLIP model, or the context leaves no room for a class name in the text tower.
        """
        if not hasattr(model, "text_model"):
            raise ConfigError(
                f'adapter.kind: expected "lora", "hadamard-lora" or "all" for {type(model).__name__}, found '
                '"prompt"; kind "prompt" requires a CLIP model'
            )
        tower = model.config.text_config
        if self.length > tower.max_position_embeddings - 3:
            raise ConfigError(
                f"adapter.length: expected at most {tower.max_position_embeddings - 3}, to leave room for a class "
                f"name in a text of {tower.max_position_embeddings} tokens, found {self.length}; lower it"
            )
        model.requires_grad_(False)
        shapes = self.shapes(tower.hidden_size)
        return {name: nn.Parameter(torch.zeros(shape, device=model.device)) for name, shape in shapes.items()}

    @override
    def save(self, folder: Path, attached: AttachedModel, weights: Weights) -> None:
        """Write FedVeil's own format; PEFT has no format for vectors before class names."""
        export.write_native(folder, self, weights, attached.base)
