"""A method's terms as one vector of integers, and the sums decoded from such vectors.

    vector = for each name, sorted: the values' integers, row by row, and then the weights' | the examples

A weight is a whole number: the number of examples, at most M, or 1. `Method.aggregate_shapes` gives the names and the
number of weights for each, so both ends know them in advance. A name that a site's method omits is sent as zeros,
which hides the omission.

| case | result |
|---|---|
| a term with a different name or shape, or with a finer mask than its declared weights | ConfigError at the site |
| names other than those that the site must send | PolicyError: nothing is sent |
| scalars sent in the clear that are not the payload's own | ConfigError: this method does not support secure
  aggregation |
| an entry whose weights add up to zero | it has no mean: 0, and `moved` is False |
| a sum of weights impossible for honest sites (above K M, or a mask counting more examples than exist) | WireError |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedveil.contract.contributions import Contribution
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.errors import ConfigError, PolicyError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.sanitize import sanitize


@dataclass(frozen=True)
class VectorSlot:
    """The position of one name in a vector: `values` entries from `start` on, followed by its weights."""

    name: str
    shape: tuple[int, ...]
    weights_shape: tuple[int, ...]
    start: int

    @property
    def values(self) -> int:
        """Return the number of entries."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Return the position after the slot's last weight."""
        return self.start + self.values + math.prod(self.weights_shape)


@dataclass(frozen=True)
class VectorLayout:
    """The layout of a round's vector."""

    slots: tuple[VectorSlot, ...]

    @classmethod
    def from_exchange(cls, exchange: MessageExchange, round_: int) -> VectorLayout:
        """Create the layout for a method and its spec, in one round."""
        shapes = {field.name: field.largest for field in exchange.layout.fields if field.direction == "up"}
        shapes |= {name: tensor.shape for name, tensor in exchange.spec.items()}
        slots: list[VectorSlot] = []
        start = 0
        for name, weights_shape in sorted(exchange.method.aggregate_shapes(exchange.spec, round_).items()):
            slots.append(VectorSlot(name, tuple(shapes[name]), tuple(weights_shape), start))
            start = slots[-1].end
        return cls(tuple(slots))

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the slots."""
        return frozenset(slot.name for slot in self.slots)

    @property
    def length(self) -> int:
        """Return the number of integers in a vector."""
        return (self.slots[-1].end if self.slots else 0) + 1

    def vector(
        self,
        exchange: MessageExchange,
        payload: Payload,
        examples: int,
        round_: int,
        ring: FixedPointRing,
        names: frozenset[str] | None = None,
    ) -> tuple[Integers, int]:
        """Return an upload's vector before masking, and how many entries were clipped to the bound.

        Args:
            names: the exact names that the upload must have (entry_plan.py); None allows any names.

        Raises:
            ConfigError: the method's terms do not match its declaration, or their values are not finite.
            PolicyError: the upload's names differ from `names`.
        """
        counted = min(examples, ring.most_weight)
        terms = exchange.method.contributions(payload, counted, exchange.spec, RoundContext(round_, "", False, b""))
        if dict(terms.clear) not in ({}, dict(payload.scalars)):
            raise ConfigError(
                f"secure.enabled: expected a method that needs only sums, found {exchange.name}, which sends "
                f"{', '.join(terms.clear)} of each site in the clear; change its fields, or set secure.enabled to "
                "false"
            )
        vector, slots, clipped = np.zeros(self.length, ring.dtype), {slot.name: slot for slot in self.slots}, 0
        for term in terms.tensors:
            slot = slots.pop(term.name, None)
            if slot is None or tuple(term.value.shape) != slot.shape or not float(term.weight).is_integer():
                raise ConfigError(
                    f"{term.name}: expected a term that {exchange.name} declares as summed, once, with its shape and "
                    f"a whole weight, found shape {tuple(term.value.shape)} and weight {term.weight}"
                )
            weight, values = int(term.weight), vector[slot.start : slot.start + slot.values]
            try:
                clipped += ring.encode(term.value, weight, term.mask, values)
            except ValueError as error:
                raise ConfigError(f"{term.name}: {error}; see the site's training") from None
            vector[slot.start + slot.values : slot.end] = _weights(term, slot).flatten().numpy() * weight
        sent = self.names - slots.keys()
        if names is not None and sent != names:
            raise PolicyError(
                f"entries: the {len(sent)} tensors to send are not the {len(names)} that other sites send too: they "
                f"differ in {sanitize(min(sent ^ names), 80)}; nothing is sent, because some entries of the sum could "
                "come from too few sites"
            )
        vector[-1] = counted
        return vector, clipped


def _weights(term: Contribution, slot: VectorSlot) -> Tensor:
    """Return 1 where the term counts, in the declared shape."""
    if term.mask is None:
        return torch.ones(slot.weights_shape, dtype=torch.int64)
    if slot.weights_shape == slot.shape:
        return term.mask.to(torch.int64)
    narrow = term.mask[tuple(slice(0, 1) if n == 1 else slice(None) for n in slot.weights_shape)]
    if len(slot.weights_shape) != term.mask.ndim or not torch.equal(narrow.expand(term.mask.shape), term.mask):
        raise ConfigError(
            f"{term.name}: its mask varies within an entry, so one weight for each entry of shape "
            f"{slot.weights_shape} cannot express it"
        )
    return narrow.to(torch.int64)


@final
class FixedPointSums:
    """Implements `fedveil.contract.contributions.AggregateSums` on the sum of the vectors of `clients`.

    Raises:
        WireError: the sum is impossible for honest sites.
    """

    def __init__(
        self, slots: VectorLayout, ring: FixedPointRing, total: Integers, clear: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._slots, self._ring, self._total = {slot.name: slot for slot in slots.slots}, ring, total
        self.clear, self.examples = clear, int(total[-1])
        most = len(clear) * ring.most_weight
        if not len(clear) <= self.examples <= most:
            raise WireError(
                f"secure: expected {len(clear)} to {most} examples in the sum, found {self.examples}: a site "
                "sent a wrong vector"
            )
        for slot in slots.slots:
            largest = int(self._weights(slot).max(initial=0))
            if largest > most:
                raise WireError(f"{slot.name}: expected weights of at most {most} in the sum, found {largest}")

    def _weights(self, slot: VectorSlot) -> Integers:
        return self._total[slot.start + slot.values : slot.end]

    def __contains__(self, name: str) -> bool:
        """Return whether any client had a term with this name; without masks, whether its weight is above 0."""
        slot = self._slots.get(name)
        return slot is not None and bool(self._weights(slot).any())

    def weight(self, name: str) -> float:
        """Return the sum of the weights for a name without masks; 0.0 if no client sent the name."""
        slot = self._slots.get(name)
        if slot is None:
            return 0.0
        if slot.weights_shape != ():
            raise ValueError(f"{name}: its mask gives it several weights; a single one was asked for")
        return float(self._weights(slot)[0])

    def mean(self, name: str) -> Float[Tensor, "..."]:
        """Return the weighted mean, fp32; zero where no client's mask is True."""
        slot = self._slots[name]
        values = self._ring.decode(self._total[slot.start : slot.start + slot.values]).reshape(slot.shape)
        weights = torch.from_numpy(self._weights(slot).astype(np.float64)).reshape(slot.weights_shape)
        return torch.where(weights > 0, values / weights.clamp(min=1), 0.0).to(torch.float32)

    def take(self, name: str) -> Float[Tensor, "..."]:
        """Return the mean, which the caller may keep."""
        return self.mean(name)

    def moved(self, name: str) -> Bool[Tensor, "..."]:
        """Return True where at least one client's mask is True."""
        slot = self._slots[name]
        some = torch.from_numpy(self._weights(slot) > 0).reshape(slot.weights_shape)
        return some.expand(slot.shape)

    def means(self, otherwise: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return each mean, in its dtype in `otherwise`, or the tensor in `otherwise` if no client sent the name."""
        return {name: self.mean(name).to(old.dtype) if name in self else old for name, old in otherwise.items()}

    def check(self, max_norm: float) -> None:
        """Check the sum, since single uploads are hidden. Raises WireError if it is impossible for honest sites."""
        for slot in self._slots.values():
            values = self._ring.decode(self._total[slot.start : slot.start + slot.values])
            weights = torch.from_numpy(self._weights(slot).astype(np.float64)).reshape(slot.weights_shape)
            more = 1 + len(self.clear) * self._ring.noise / self._ring.scale  # rounding adds less than 1
            most = (self._ring.bound * weights + more).expand(slot.shape).flatten()
            norm = float(torch.linalg.vector_norm(values)) / max(float(weights.max()), 1.0) if slot.values else 0.0
            if bool((values.abs() > most).any()) or norm > max_norm:
                raise WireError(
                    f"{slot.name}: expected a sum of values within +-{self._ring.bound:g} each and a mean with a norm "
                    f"of at most {max_norm:g}, found larger values; a site sent a wrong vector"
                )
