"""Every parameter of the base, trained and exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedveil.contract.spec import Place


@dataclass(frozen=True)
class AllWeights:
    """Every parameter of the base model is trained and exchanged."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["all"] = "all"

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Four tensors of a small model: for wire tables and for tests over every method."""
        return {"wte.weight": (11, 4), "position_embeddings": (6, 4), "h.0.mlp.weight": (4, 4), "h.0.mlp.bias": (4,)}

    def example_places(self) -> dict[str, Place]:
        """The places of those that have one."""
        mlp = Place("linear", "h.0.mlp", 1, closes=True), Place("linear", "h.0.mlp", 0, closes=True)
        return {"wte.weight": Place("embedding", "wte", 1), "h.0.mlp.weight": mlp[0], "h.0.mlp.bias": mlp[1]}
