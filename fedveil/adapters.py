"""What a task attaches to the frozen base and trains. Data only: the tensors live in the task.

| adapter | trained tensors, by name |
|---|---|
| `Lora` | `<module>.lora_A` (r x d_in), `<module>.lora_B` (d_out x r) for every chosen linear layer |
| `AllWeights` | every parameter of the base, under its own name; tied parameters once |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedveil.errors import ConfigError


@dataclass(frozen=True)
class Lora:
    """Low-rank pairs: W = W_0 + scale * B A, with scale = alpha / rank (Hu et al. 2021).

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, so that W = W_0 + B A.
        targets: "all-linear" (every linear layer of the blocks, the output head left out), or a
            regular expression over module names.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["lora"] = "lora"
    rank: int = 8
    alpha: float | None = None
    targets: str = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"adapter.rank: expected an integer of at least 1, found {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ConfigError(f"adapter.alpha: expected a number above 0, found {self.alpha}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Two layers of a small model, of unequal widths: for wire tables and for tests over every method."""
        widths = {"h.0.attn": (5, 7), "h.0.mlp": (7, 3)}
        return {
            f"{module}.lora_{side}": (self.rank, d_in) if side == "A" else (d_out, self.rank)
            for module, (d_in, d_out) in widths.items()
            for side in "AB"
        }


@dataclass(frozen=True)
class AllWeights:
    """Every parameter of the base model is trained and exchanged."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    kind: Literal["all"] = "all"

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Three tensors of a small model: for wire tables and for tests over every method."""
        return {"wte.weight": (11, 4), "h.0.mlp.weight": (4, 4), "h.0.mlp.bias": (4,)}


Adapter = Lora | AllWeights
