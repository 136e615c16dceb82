"""The interface of adapters: the trained part of a base model. Each adapter is one file in `fedveil/adapters/`.

An adapter is a final frozen dataclass. Its fields are hyperparameters, validated on creation. It holds
no tensors: it names them, draws them, and attaches them to a model. The task owns the model; a method
sees only tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fedveil.config import TrainConfig
from fedveil.contract.param_spec import Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream

__all__ = ["Adapter", "AttachedModel", "Mount"]

# Features that an adapter needs and a task offers: layers, which every model has; a causal language model's cache,
# where keys and values precede the tokens; a CLIP model's texts, where a context precedes class names.
Mount = Literal["layers", "cache", "texts"]


@dataclass(frozen=True)
class AttachedModel:
    """A whole model with its trained part attached, for code that writes it to files.

    Attributes:
        model: a transformers model, or any torch module.
        names: maps each trained tensor's spec name to its name in `model`; no entry for a tensor outside the
            model.
        base: how files name the model that the run began with:
            `fedveil.models.published_name.published_name`.
        processor: its tokenizer or image processor; None if the model came without one.
        end_tokens: the tokens that end generated text; none if the model generates no text.
        heads: modules that an adapter's files contain whole, because the base has none or a different one.
    """

    model: Any
    names: Mapping[str, str]
    base: str
    processor: Any = None
    end_tokens: tuple[int, ...] = ()
    heads: tuple[str, ...] = ()


class Adapter(ABC):
    """An adapter: the trained part of a base model. Subclasses are final: `@final @dataclass(frozen=True)`.

    Attributes:
        kind: the adapter's name in method.params, such as "lora".
        mount: the feature that it needs from the model.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # an unknown field in the run config is refused
    mount: ClassVar[Mount]
    kind: str

    @property
    def trains_base(self) -> bool:
        """Return whether tensors of the base itself are trained, not only attached tensors."""
        return False

    @property
    def positions(self) -> int:
        """Return how many token positions of the model's context the adapter uses."""
        return 0

    @property
    def drops(self) -> bool:
        """Return whether the adapter uses dropout in training steps, drawn by torch itself."""
        return False

    def check(self, train: TrainConfig) -> None:  # noqa: B027  # most adapters support every training config
        """Raise ConfigError for a key of the train section that this adapter does not support."""

    @abstractmethod
    def example_spec(self) -> Spec:
        """Return the tensors trained in a small model, for wire tables and for tests over every method."""

    def read(self, model: Any, rng: RandomStream) -> Weights:
        """Return initial tensors computed by the model that the adapter is attached to; `draw` gets them as `base`."""
        return {}

    @abstractmethod
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Return initial tensors on the CPU, fp32, under the names of `shapes` and in their order.

        They are drawn by sorted name, so that they do not depend on the order of `shapes`. `base` has the result of
        `read` and the base's tensors by name; only an adapter with `trains_base` reads the latter.
        """

    @abstractmethod
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Attach the adapter to a transformers model in place.

        Returns:
            Its parameters by name, fp32, in the model's order. They are the only ones that require gradients; their
            values are undefined until weights are loaded.

        Raises:
            ConfigError: the model has no place to attach it.
        """

    def including(self, modules: Sequence[str]) -> Adapter:
        """Return an adapter that also trains these linear layers: this one, unless its fields choose layers."""
        return self

    @abstractmethod
    def save(self, folder: Path, attached: AttachedModel, weights: Weights) -> None:
        """Write `weights`, which are in the attached model, to a folder in the format that other programs load.

        See `fedveil.adapters.export`. The folder must exist; existing files with the same names are replaced.
        """

    def merge(self, plain: AttachedModel, weights: Weights) -> None:
        """Apply the change that `weights` represent to the model's own weights, in place.

        Args:
            plain: the base without this adapter, with all its weights trainable (`AllWeightsAdapter`).

        Raises:
            ConfigError: the adapter does not change weights, or changes a weight that two layers share.
        """
        raise ConfigError(
            f'adapter.kind: "{self.kind}" is prepended to the model\'s tokens and does not change its weights, so it '
            "cannot be merged; load final/ on top of the base"
        )
