"""Keys and values before every layer of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from fedveil.errors import ConfigError


@final
@dataclass(frozen=True)
class Prefix:
    """Keys and values before every layer of a causal language model (Li, Liang 2021), of the model or of a proxy of it.

    Attributes:
        length: tokens' worth of keys and values.
        cells: 0: the model's own layers, frozen; above: so many of its first layers, repeated to the model's depth. Then all
            that the proxy consists of is trained and exchanged beside the prefix: cells, embeddings, norms, head.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    length: int = 40
    cells: int = 0
    kind: Literal["prefix"] = "prefix"

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("cells", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"adapter.{name}: expected an integer of at least {least}, found {getattr(self, name)}"
                )

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """A small model of two layers: for wire tables and for tests over every method."""
        proxy = {"wte.weight": (11, 6), "h.0.mlp.weight": (6, 6)} if self.cells else {}
        return {"prefix": (2, 2, 1, self.length, 6), **proxy}
