"""LoRA: one low-rank pair a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from fedveil.adapters.pairs import Pairs


@final
@dataclass(frozen=True)
class Lora(Pairs):
    """Low-rank pairs: W = W_0 + scale * B A, with scale = alpha / rank (Hu et al. 2021).

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, so that W = W_0 + B A.
        targets: "all-linear" (every linear layer of the blocks, the output head left out), or a
            regular expression over module names.
    """

    kind: Literal["lora"] = "lora"

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Layers of a small model: for wire tables and for tests over every method."""
        return self._example_shapes(("lora",))
