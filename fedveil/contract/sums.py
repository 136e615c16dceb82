"""What a method adds up over clients, and what it gets back.

    weight(name) = sum_k w_k m_k        mean(name) = sum_k w_k m_k x_k / sum_k w_k m_k        entry by entry

x_k: what client k adds under that name; w_k: its weight; m_k: its mask, of ones where it has none. That the server needs
nothing of a client but its part in such sums is what secure aggregation, shared noise and an aggregator in between stand on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Term:
    """One client's summand under one name.

    Attributes:
        name: whose sum it goes into. A method gives a name a mask always or never.
        value: only read; may be a view of received bytes. Where the mask is False it counts for nothing.
        weight: above 0.
        mask: of the value's shape; None stands for ones everywhere.
    """

    name: str
    value: Float[Tensor, "*s"]
    weight: float
    mask: Bool[Tensor, "*s"] | None = None


@dataclass(frozen=True)
class Terms:
    """All of one client's summands.

    Attributes:
        tensors: asked for one at a time, so that a decoded upload is never whole in memory.
        clear: values that the server needs of this client by itself, and sees.
    """

    tensors: Iterable[Term]
    clear: Mapping[str, str | float] = field(default_factory=dict)


class Sums(Protocol):
    """The sums over the clients of a round, at least one of them."""

    @property
    def examples(self) -> int:
        """Training examples of all clients together."""
        ...

    @property
    def clear(self) -> Mapping[str, Mapping[str, str | float]]:
        """What each client gave in clear, by its name; every client of the sum is in it."""
        ...

    def __contains__(self, name: str) -> bool:
        """Whether any client had a term of that name."""
        ...

    def weight(self, name: str) -> float:
        """Sum of the weights of a name without masks; 0.0 for one that nobody sent."""
        ...

    def mean(self, name: str) -> Float[Tensor, "..."]:
        """fp32; zero where no client's mask was True."""
        ...

    def moved(self, name: str) -> Bool[Tensor, "..."]:
        """True where at least one client's mask was."""
        ...

    def means(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of every name of `otherwise`, in its dtype; its own tensor where nobody sent the name."""
        ...


def weighted(tensors: Mapping[str, Tensor], weight: float) -> Terms:
    """Every tensor with one weight and no mask: what a weighted mean takes."""
    return Terms([Term(name, value, weight) for name, value in tensors.items()])
