"""What is trained on a base model: the interface of adapters. Each is one file of `fedveil/adapters/`.

An adapter is a final frozen dataclass. Its fields are hyper-parameters, validated on creation. It holds no tensors: it
says which ones there are, draws them, and attaches them to a model. The model is the task's; a method sees tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fedveil.config import TrainConfig
from fedveil.contract.spec import Spec, Weights
from fedveil.rng import Stream

# What an adapter needs of a model, and a task offers: layers, which every model has; the cache of a causal language
# model, where keys and values stand before the tokens; the texts of a CLIP, where a context stands before class names.
Mount = Literal["layers", "cache", "texts"]


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

    @abstractmethod
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: Stream, base: Weights) -> dict[str, Tensor]:
        """Initial tensors on the CPU, fp32, under the names of `shapes` and in their order.

        They are drawn by sorted name, so that they do not depend on the order of `shapes`. What is the base's own comes
        from `base`, the base's tensors by name, which only an adapter with `trains_base` reads.
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
