"""Noise in a sum: each site adds its share of the noise to the integers of its vector before masking them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedveil.contract.contributions import ClientContributions
from fedveil.contract.layout import Payload
from fedveil.contract.method import FederatedState
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.flatten import VectorLayout
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.privacy import discrete_gaussian
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.privacy.dp_sgd import NoisyTrainer
from fedveil.privacy.gaussian_noise import Source


@dataclass(frozen=True)
class DistributedNoise:
    """The noise of one round's uploads.

    Attributes:
        claim: the guarantee that the noise must satisfy.
        slots: slots of the vector. All values get noise. Numbers of sites and examples depend on no row and get none.
    """

    claim: DistributedDiscreteGaussian
    slots: VectorLayout

    @property
    def entries(self) -> int:
        """Return d, the number of entries that get noise."""
        return sum(slot.values for slot in self.slots.slots)

    def ring(self, ring: FixedPointRing) -> FixedPointRing:
        """Return the same ring with room for the noise in its integers. Raises ConfigError if they are too small."""
        room = ((1 << (ring.bits - 1)) - 1 - ((1 << ring.bits) >> 51)) / ring.most_summands
        finest = self.claim.scale(self.entries, ring.bound, room)
        return replace(
            ring, finest=finest, noise=discrete_gaussian.max_draw(self.deviation(replace(ring, finest=finest)))
        )

    def deviation(self, ring: FixedPointRing) -> float:
        """Return sigma_i, in integers of the ring."""
        return self.claim.deviation(ring.scale, self.entries, ring.bound)

    def charged(self, ring: FixedPointRing) -> DistributedDiscreteGaussian:
        """Return the guarantee that a site charges for an upload in this ring."""
        return self.claim.at_scale(ring.scale, self.entries, ring.bound)

    def add(self, vector: Integers, ring: FixedPointRing, source: Source) -> None:
        """Add the site's share of the noise to a vector, in place."""
        sigma = self.deviation(ring)
        for slot in self.slots.slots:
            values = vector[slot.start : slot.start + slot.values]
            values += (
                discrete_gaussian.draw_discrete_gaussian(slot.values, sigma, source)
                .astype(f"<i{ring.bits // 8}")
                .view(ring.dtype)
            )


def require_the_step_alone(
    trainer: Trainer,
    private: FederatedState | None,
    payload: Payload,
    terms: ClientContributions,
    bound: float,
    divisor: float = 1.0,
) -> None:
    """Check that a method sends only the step itself, which has no noise yet.

    Only the sum has noise. So the method must send the stepped weights, their change, or either of them
    divided by `divisor`, which is at least 1. An example then moves the upload no further than the step. For
    anything else, the effect of an example is unknown. The method must not keep state either, because a later
    upload would depend on it.

    Raises:
        ConfigError: the method sends something else, or it received weights above the bound; the upload is
            withheld.
    """
    if not isinstance(trainer, NoisyTrainer):  # a method with its own noise declares what it sends
        return
    problem = "" if 1.0 <= divisor < math.inf else f"one whose divisor is {divisor:g}"
    if private is not None:
        problem = "one that keeps state at the site"
    if payload.scalars:
        problem = f"one that sends {', '.join(payload.scalars)} in the clear"
    stepped, started = trainer.without_noise or {}, trainer.started
    for term in terms.tensors:
        name, mask = term.name, torch.ones((), dtype=torch.bool) if term.mask is None else term.mask.cpu()
        value = torch.where(mask, term.value.cpu().float(), 0.0)
        own = (stepped[name], stepped[name] - started[name]) if name in stepped else ()
        whole = [w.cpu().float() for w in own]
        if not any(torch.equal(value, torch.where(mask, w, 0.0)) for w in (*whole, *(w / divisor for w in whole))):
            problem = f"one that changes {name} further"
        elif float(started[name].abs().max()) > bound:
            problem = f"{name} received with values above secure.clip-bound, {bound:g}"
    if problem:
        raise ConfigError(
            'secure.noise: expected a method that sends trained weights or their change unmodified with "sum", found '
            f'{problem}; choose another method or other fields, or set secure.noise to "site"'
        )
