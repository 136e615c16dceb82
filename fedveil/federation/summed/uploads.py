"""An upload of secure aggregation as a message: one masked vector, and what its site attaches.

    sum        the vector, `ring.bits` an entry: uniform to whoever has not all of its masks
    attached   shares of the mask's secret, and the site's next prekey (statements.py)

Its header says neither examples nor figures of the training: they are summands, or they are not sent. Where the noise
of a claim is in the sum (privacy/in_sum.py), a site adds its share to the integers before it masks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from logging import INFO, WARNING, getLogger
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedveil.contract.address import Address
from fedveil.contract.budget import Claim
from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Field, Layout, Payload
from fedveil.contract.method import RoundContext, State
from fedveil.contract.trainer import Trainer
from fedveil.errors import WireError
from fedveil.federation.exchange import Exchange, Participate
from fedveil.federation.secure.forms import HOLDER_CHARACTERS, MOST_SITES
from fedveil.federation.secure.masks import Integers
from fedveil.federation.secure.site import Site
from fedveil.federation.secure.statements import Attached, Plan
from fedveil.federation.summed.noise import SharedNoise, require_the_step_alone
from fedveil.federation.summed.ring import Ring
from fedveil.federation.summed.summands import Slots
from fedveil.privacy.in_sum import InSum
from fedveil.wire import integers
from fedveil.wire.conformity import bounds
from fedveil.wire.envelope import Message, Stamp, packed, unpack
from fedveil.wire.opaque import Opaque

log = getLogger("fedveil.secure")

_SUM, _ATTACHED = "sum", "attached"
_MOST_ATTACHED = MOST_SITES * HOLDER_CHARACTERS + 4096


@dataclass(frozen=True)
class Summed:
    """A method's uploads of one round, as they are summed unseen.

    Attributes:
        slots: of the vector.
        bits: of the ring.
        noise: what each site adds to its vector, if the noise of the run's claim is in the sum.
    """

    exchange: Exchange
    round: int
    slots: Slots
    bits: int
    noise: SharedNoise | None = None

    @classmethod
    def of(cls, exchange: Exchange, round_: int, bits: int, claim: Claim | None = None) -> Summed:
        """Of one round, in a run with this claim."""
        slots = Slots.of(exchange, round_)
        return cls(exchange, round_, slots, bits, SharedNoise(claim, slots) if isinstance(claim, InSum) else None)

    def ring(self, plan: Plan) -> Ring:
        """What the integers of a plan stand for. Raises WireError, ConfigError where none fit."""
        return self.noise.ring(Ring.of(plan)) if self.noise else Ring.of(plan)

    @cached_property
    def layout(self) -> Layout:
        """Every field on the wire; the broadcast's are the method's own."""
        down = tuple(field for field in self.exchange.layout.fields if field.direction == "down")
        up = (
            Field(_SUM, "up", integers.Integers(self.bits), (self.slots.length,), "masked integer"),
            Field(_ATTACHED, "up", Opaque(), (None,), "byte of keys", most=(_MOST_ATTACHED,)),
        )
        return Layout((*down, *up), self.exchange.layout.scalars)

    @cached_property
    def largest_upload(self) -> int:
        """The most bytes that a client's message can have."""
        return bounds(self.layout, "up").message

    def of_site(self, site: Site, plan: Plan) -> Participate:
        """A client's whole turn under a plan, as `Exchange.participate`, with a masked upload.

        The turn raises PolicyError and WireError as `Site.begin` does, before anything is trained, and ConfigError for
        a method that cannot be summed unseen, or that noise in the sum does not cover.
        """

        def participate(
            data: Buffer, private: State | None, trainer: Trainer, ctx: RoundContext, turn: str = ""
        ) -> tuple[State | None, list[Buffer]]:
            site.begin(plan)
            ring = self.ring(plan)
            received = [self.exchange.opened(data, ctx)]
            del data
            private, payload, _ = self.exchange.trained(private, received, trainer, ctx)
            vector, clipped = self.slots.vector(self.exchange, payload, trainer.num_examples, self.round, ring)
            if self.noise:
                method = self.exchange.method
                terms = method.terms(payload, ring.most_weight, self.exchange.spec, ctx)
                require_the_step_alone(trainer, private, payload, terms, ring.bound, method.divisor)
                self.noise.add(vector, ring, ctx.noise("noise in the sum"))
            log.log(WARNING if clipped else INFO, "masked; %s entries were clipped to +-%g", clipped, ring.bound)
            kept = turn if private is not None else ""
            return private, self._packed(payload, vector, site.mask(plan, vector), ctx, kept)

        return participate

    def _packed(
        self, payload: Payload, vector: Integers, attached: Attached, ctx: RoundContext, turn: str
    ) -> list[Buffer]:
        signed = torch.from_numpy(vector.view(f"<i{self.bits // 8}"))
        sent = Payload({_SUM: signed, _ATTACHED: attached.to_bytes()}, scalars=payload.scalars)
        stamp = Stamp.of(self.exchange.method, self.exchange.name, ctx.round, "up", ctx.address)
        return packed(self.layout, stamp, sent, turn=turn).parts

    def receive(self, data: Buffer, address: Address | None = Address()) -> tuple[Message, Integers, Attached]:
        """A client's message, its masked vector, which is only to be read, and what is attached. Raises WireError.

        Without an address: a message that is only read from a tap.
        """
        stamp = Stamp.of(self.exchange.method, self.exchange.name, self.round, "up", address)
        message = unpack(data, self.layout, stamp)
        if message.num_examples is not None or message.report:
            raise WireError("num_examples: expected none beside a masked vector, nor a report, found one; send neither")
        vector = cast(Tensor, message.payload.fields[_SUM]).numpy().view(np.dtype(f"<u{self.bits // 8}"))
        return message, vector, Attached.of(cast(bytes, message.payload.fields[_ATTACHED]))
