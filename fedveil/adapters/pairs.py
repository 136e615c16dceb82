"""What every adapter of low-rank pairs shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedveil.errors import ConfigError


@dataclass(frozen=True)
class Pairs:
    """What every adapter of low-rank pairs has. Abstract: no `kind`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
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

    def _example_shapes(self, pairs: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """Three layers of unequal widths, so that a method which shares the top two keeps one to itself."""
        widths = {"h.0.attn": (5, 7), "h.1.mlp": (7, 3), "h.2.mlp": (3, 4)}
        return {
            f"{module}.{pair}_{side}": (self.rank, d_in) if side == "A" else (d_out, self.rank)
            for module, (d_in, d_out) in widths.items()
            for pair in pairs
            for side in "AB"
        }
