"""What is trained on a base model: the interface of adapters. Each is one file of `fedveil/adapters/`.

An adapter is a final frozen dataclass. Its fields are hyper-parameters, validated on creation. It holds no tensors: it
says which ones there are, draws them, and attaches them to a model. The model is the task's; a method sees tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fedveil.config import TrainConfig
from fedveil.contract.spec import Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import Stream

# What an adapter needs of a model, and a task offers: layers, which every model has; the cache of a causal language
# model, where keys and values stand before the tokens; the texts of a CLIP, where a context stands before class names.
Mount = Literal["layers", "cache", "texts"]


@dataclass(frozen=True)
class Attached:
    """A whole model in which something is trained, for whoever writes it to files.

    Attributes:
        model: a transformers model.
        names: of every trained tensor, by the spec's name, its name in `model`; none where it lies beside the model.
        base: what the files call the model that the run began with: `fedveil.models.named.published`.
        processor: its tokenizer, or its processor of images; None where it came without one.
    """

    model: Any
    names: Mapping[str, str]
    base: str
    processor: Any = None


class Adapter(ABC):
    """What is trained on a base model. Subclasses are final: `@final @dataclass(frozen=True)`.

    Attributes:
        kind: the name in method.fields: "lora".
        mount: what it needs of the model.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # an unknown field in the run config is refused
    mount: ClassVar[Mount]
    kind: str

    @property
    def trains_base(self) -> bool:
        """Whether tensors of the base itself are trained, not only what is attached to it."""
        return False

    @property
    def positions(self) -> int:
        """Tokens' worth of the model's context that the adapter takes for itself."""
        return 0

    @property
    def drops(self) -> bool:
        """Whether something of it is dropped out in training steps, by torch's own draws."""
        return False

    def check(self, train: TrainConfig) -> None:  # noqa: B027  # most adapters go with every training
        """Raises ConfigError for a key of the train section that this adapter cannot have."""

    @abstractmethod
    def example_spec(self) -> Spec:
        """What it trains in a small model: for wire tables, and for tests over every method."""

    def read(self, model: Any, rng: Stream) -> Weights:
        """Initial tensors that a model computes, which the adapter is attached to; they are in the `base` of `draw`."""
        return {}

    @abstractmethod
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: Stream, base: Weights) -> dict[str, Tensor]:
        """Initial tensors on the CPU, fp32, under the names of `shapes` and in their order.

        They are drawn by sorted name, so that they do not depend on the order of `shapes`. What is the base's own comes
        from `base`, the base's tensors by name, which only an adapter with `trains_base` reads, and what `read` gave.
        """

    @abstractmethod
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Attaches the adapter to a transformers model in place.

        Returns:
            Its parameters by name, fp32, in the model's order. They are the only ones that ask for gradients, and hold
            nothing of use until weights are put in.

        Raises:
            ConfigError: the model has no place for it.
        """

    @abstractmethod
    def save(self, folder: Path, attached: Attached, weights: Weights) -> None:
        """Writes `weights`, which are in the attached model, to a folder in the form that other programs load.

        See `fedveil.adapters.written`. The folder is there; files of these names in it are replaced.
        """

    def merge(self, plain: Attached, weights: Weights) -> None:
        """Adds what `weights` change to the model's own weights, in place.

        Args:
            plain: the base without this adapter, with all its weights as what is trained (`AllWeights`).

        Raises:
            ConfigError: it is no change of weights, or one of a weight that the model has twice.
        """
        raise ConfigError(
            f'adapter.kind: expected "lora", "hadamard-lora" or "all", whose changes are weights of the model, found '
            f'"{self.kind}", which stands before its tokens; load final/ beside the base'
        )
