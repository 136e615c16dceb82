"""Two low-rank pairs a layer, multiplied entry by entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from fedveil.adapters.pairs import Pairs


@final
@dataclass(frozen=True)
class HadamardLora(Pairs):
    """Two low-rank pairs a layer, multiplied entry by entry (Hyeon-Woo et al. 2022): W = W_0 + scale * (B A) o M.

    | form | M | initial values |
    |---|---|---|
    | "plus-one" | B_p A_p + 1 | B and B_p zero |
    | "product" | B_p A_p | B zero, B_p from N(0, 1/r); with B_p zero too no gradient would ever differ from zero |

    A and A_p are random in both. The change of W has rank up to r^2, so a forward pass forms it whole.

    Attributes:
        rank: r, the inner width of each pair.
        alpha: the numerator of the scale; None means `rank`, which gives scale 1.
        targets: as for `Lora`.
        form: what the private pair is made into.
    """

    kind: Literal["hadamard-lora"] = "hadamard-lora"
    form: Literal["plus-one", "product"] = "plus-one"

    @property
    def private_b_std(self) -> float:
        """Standard deviation of B_p's initial entries."""
        return 0.0 if self.form == "plus-one" else self.rank**-0.5

    def example_shapes(self) -> dict[str, tuple[int, ...]]:
        """Layers of a small model: for wire tables and for tests over every method."""
        return self._example_shapes(("lora", "private"))
