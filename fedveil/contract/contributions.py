"""A method's contributions, which are summed over clients, and the sums that the method gets back.

    weight(name) = sum_k w_k m_k        mean(name) = sum_k w_k m_k x_k / sum_k w_k m_k        entry by entry

x_k is the value that client k adds under that name, w_k its weight, and m_k its mask (all ones without a
mask). The server needs nothing from a client except its part in these sums. Secure aggregation, distributed
noise and intermediate aggregators build on this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["AddedAggregateSums", "AggregateSums", "ClientContributions", "Contribution", "weighted_contributions"]


@dataclass(frozen=True)
class Contribution:
    """One client's summand under one name.

    Attributes:
        name: the sum that it belongs to. Under one name, either all terms have a mask or none do.
        value: read-only; may be a view of received bytes. Entries where the mask is False do not count.
        weight: a number above 0.
        mask: has the value's shape; None means that every entry counts.
    """

    name: str
    value: Float[Tensor, "*s"]
    weight: float
    mask: Bool[Tensor, "*s"] | None = None


@dataclass(frozen=True)
class ClientContributions:
    """All of one client's summands.

    Attributes:
        tensors: read one at a time, so that a decoded upload is never entirely in memory.
        clear: values from this client that the server needs and sees individually, not as a sum.
    """

    tensors: Iterable[Contribution]
    clear: Mapping[str, str | float] = field(default_factory=dict)


class AggregateSums(Protocol):
    """The sums over the clients of a round, at least one of them."""

    @property
    def examples(self) -> int:
        """Return the total number of training examples of all clients."""
        ...

    @property
    def clear(self) -> Mapping[str, Mapping[str, str | float]]:
        """Return `ClientContributions.clear` of every client in the sums, by the client's name."""
        ...

    def __contains__(self, name: str) -> bool:
        """Return whether any client contributed a term with this name."""
        ...

    def weight(self, name: str) -> float:
        """Return the sum of the weights under a name without masks; 0.0 if no client sent the name."""
        ...

    def mean(self, name: str) -> Float[Tensor, "..."]:
        """Return the weighted mean, fp32; zero where no client's mask is True."""
        ...

    def take(self, name: str) -> Float[Tensor, "..."]:
        """Remove the mean from the sums and return it; the caller may write to it. A name can be taken once."""
        ...

    def moved(self, name: str) -> Bool[Tensor, "..."]:
        """Return True where at least one client's mask is True; callers must not write to the result."""
        ...

    def means(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each mean, in its dtype in `otherwise`, or the tensor in `otherwise` if no client sent the name."""
        ...


class AddedAggregateSums(AggregateSums, Protocol):
    """Sums that terms can be added to."""

    def add(self, client: str, num_examples: int, terms: ClientContributions) -> None:
        """Add all terms of one client. All terms must be added before any sum is read."""
        ...


def weighted_contributions(tensors: Mapping[str, Tensor], weight: float) -> ClientContributions:
    """Return the terms of a weighted mean: every tensor with the same weight and no mask."""
    return ClientContributions(Contribution(name, value, weight) for name, value in tensors.items())
