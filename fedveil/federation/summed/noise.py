"""Noise of a sum: each site adds a share of it to the integers of its vector, before it masks them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedveil.contract.layout import Payload
from fedveil.contract.method import State
from fedveil.contract.sums import Terms
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.secure.masks import Integers
from fedveil.federation.summed.ring import Ring
from fedveil.federation.summed.summands import Slots
from fedveil.privacy import discrete
from fedveil.privacy.dp_sgd import NoisyTrainer
from fedveil.privacy.in_sum import InSum
from fedveil.privacy.noise import Source


@dataclass(frozen=True)
class SharedNoise:
    """The noise of one round's uploads.

    Attributes:
        claim: what it must be.
        slots: of the vector. All values have noise; numbers of sites and of examples depend on no row and have none.
    """

    claim: InSum
    slots: Slots

    @property
    def entries(self) -> int:
        """d."""
        return sum(slot.values for slot in self.slots.slots)

    def ring(self, ring: Ring) -> Ring:
        """The same ring with integers that fit the noise. Raises ConfigError where none do."""
        room = ((1 << (ring.bits - 1)) - 1 - ((1 << ring.bits) >> 51)) / ring.most_summands
        finest = self.claim.scale(self.entries, ring.bound, room)
        return replace(ring, finest=finest, noise=discrete.largest(self.deviation(replace(ring, finest=finest))))

    def deviation(self, ring: Ring) -> float:
        """sigma_i, in the integers of such a ring."""
        return self.claim.deviation(ring.scale, self.entries, ring.bound)

    def add(self, vector: Integers, ring: Ring, source: Source) -> None:
        """Adds the share to a vector, in place."""
        sigma = self.deviation(ring)
        for slot in self.slots.slots:
            values = vector[slot.start : slot.start + slot.values]
            values += discrete.gaussian(slot.values, sigma, source).astype(f"<i{ring.bits // 8}").view(ring.dtype)


def require_the_step_alone(
    trainer: Trainer, private: State | None, payload: Payload, terms: Terms, bound: float, divisor: float = 1.0
) -> None:
    """Checks that a method has made nothing else of a step that has no noise yet.

    Only the sum has noise. So what the method sends must be the stepped weights themselves, or their change, or either
    over its `divisor`, which is 1 or more: a row moves it by no more then. Of anything else nobody knows by how much.
    And it may keep nothing, for a later upload would depend on it.

    Raises:
        ConfigError: it has made something else, or weights were received that are above the bound; the upload is
            withheld.
    """
    if not isinstance(trainer, NoisyTrainer):  # a method with noise of its own says itself what it sends
        return
    found = "" if 1.0 <= divisor < math.inf else f"one whose divisor is {divisor:g}"
    if private is not None:
        found = "one that keeps state at the site"
    if payload.scalars:
        found = f"one that sends {', '.join(payload.scalars)} in clear"
    stepped, started = trainer.without_noise or {}, trainer.started
    for term in terms.tensors:
        name, mask = term.name, torch.ones((), dtype=torch.bool) if term.mask is None else term.mask.cpu()
        value = torch.where(mask, term.value.cpu().float(), 0.0)
        own = (stepped[name], stepped[name] - started[name]) if name in stepped else ()
        whole = [w.cpu().float() for w in own]
        if not any(torch.equal(value, torch.where(mask, w, 0.0)) for w in (*whole, *(w / divisor for w in whole))):
            found = f"one that makes something else of {name}"
        elif float(started[name].abs().max()) > bound:
            found = f"{name} received with values above secure.bound, {bound:g}"
    if found:
        raise ConfigError(
            f'secure.noise: expected a method that sends trained weights as they are, or their change, with "sum", '
            f"found {found}; "
            'choose another method or other fields, or set secure.noise to "site"'
        )
