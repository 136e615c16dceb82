"""A secure aggregation upload as a message: one masked vector, and the site's attachment.

    sum        the vector, `ring.bits` per entry: uniform to anyone who lacks one of its masks
    attached   shares of the masks' secrets, and the site's next prekey (messages.py)

Its header contains neither the number of examples nor training metrics: they are part of the sum, or
are not sent. If a guarantee's noise is in the sum (privacy/distributed_dgauss.py), a site adds
its share of the noise to the integers before it masks them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from logging import INFO, WARNING, getLogger
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedveil.contract.codec import Buffer
from fedveil.contract.layout import MessageLayout, Payload, WireField
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.contract.trainer import Trainer
from fedveil.errors import WireError
from fedveil.federation.exchange import MessageExchange, Participate
from fedveil.federation.secagg.distributed_noise import DistributedNoise, require_the_step_alone
from fedveil.federation.secagg.entry_plan import names_to_send
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.flatten import VectorLayout
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.messages import UploadAttachment
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.plan_checks import RoundTerms
from fedveil.federation.secagg.refusals import number_refusals
from fedveil.federation.secagg.schema import MOST_HOLDERS, MOST_NEIGHBORS
from fedveil.federation.secagg.shamir import SECRET_BYTES
from fedveil.federation.secagg.site import SecAggSite
from fedveil.privacy.distributed_dgauss import DistributedDiscreteGaussian
from fedveil.wire import integers
from fedveil.wire.envelope import DecodedMessage, EnvelopeStamp, pack_message_parts, unpack_message
from fedveil.wire.raw_bytes import RawBytesCodec
from fedveil.wire.validation import message_bounds

log = getLogger("fedveil.secure")

_SUM, _ATTACHED = "sum", "attached"
_NAME_BYTES = 64 + 8  # with quotes and punctuation
_SHARE_DIGEST_BYTES = 32 + 3
_ROW_OVERHEAD = 12 + 16  # nonce and tag


def most_attached(holders: int, partners: int) -> int:
    """Return the maximum size in bytes of an attachment from a site with this many holders and partners.

    It has a hex row and share digests for each holder, a digest for each partner, and the rest.
    """
    shares = 1 + partners
    row = 2 * (_ROW_OVERHEAD + SECRET_BYTES * shares) + shares * _SHARE_DIGEST_BYTES + 2 * _NAME_BYTES
    return holders * row + partners * (64 + _NAME_BYTES) + 4096


@dataclass(frozen=True)
class MaskedUploadCodec:
    """Codec for a method's masked uploads in one round.

    Attributes:
        slots: layout of the vector.
        bits: number of bits of the ring's integers.
        noise: the noise that each site adds to its vector, if the guarantee's noise is in the sum.
    """

    exchange: MessageExchange
    round: int
    slots: VectorLayout
    bits: int
    noise: DistributedNoise | None = None

    @classmethod
    def from_exchange(
        cls, exchange: MessageExchange, round_: int, bits: int, claim: PrivacyGuarantee | None = None
    ) -> MaskedUploadCodec:
        """Create the codec for one round in a run with this privacy guarantee."""
        slots = VectorLayout.from_exchange(exchange, round_)
        return cls(
            exchange,
            round_,
            slots,
            bits,
            DistributedNoise(claim, slots) if isinstance(claim, DistributedDiscreteGaussian) else None,
        )

    def ring(self, plan: AttemptPlan) -> FixedPointRing:
        """Return the ring of a plan's integers. Raises WireError or ConfigError if none fits."""
        return self.noise.ring(FixedPointRing.from_plan(plan)) if self.noise else FixedPointRing.from_plan(plan)

    @cached_property
    def layout(self) -> MessageLayout:
        """Return every field on the wire; broadcasts have the method's own fields."""
        down = tuple(field for field in self.exchange.layout.fields if field.direction == "down")
        up = (
            WireField(_SUM, "up", integers.IntegerCodec(self.bits), (self.slots.length,), "masked integer"),
            WireField(
                _ATTACHED,
                "up",
                RawBytesCodec(),
                (None,),
                "byte of keys",
                most=(most_attached(MOST_HOLDERS, MOST_NEIGHBORS),),
            ),
        )
        return MessageLayout((*down, *up), self.exchange.layout.scalars)

    @cached_property
    def largest_upload(self) -> int:
        """Return the maximum size in bytes of a client's message."""
        return message_bounds(self.layout, "up").message

    def of_site(self, site: SecAggSite, plan: AttemptPlan, terms: RoundTerms) -> Participate:
        """Return a function for the client round under a plan: `MessageExchange.participate` with a masked upload.

        The function raises PolicyError and WireError like `SecAggSite.begin`, before training, and ConfigError for
        a method that does not support secure aggregation or noise in the sum.
        """

        def participate(
            data: Buffer, private: FederatedState | None, trainer: Trainer, ctx: RoundContext, turn: str = ""
        ) -> tuple[FederatedState | None, list[Buffer]]:
            site.begin(plan, terms)
            method, ctx = self.exchange.method, replace(ctx, entries=terms.entry_table)
            with site.log_refusals("mask", plan), number_refusals("T8"):
                ring = self.ring(plan)
            received = [self.exchange.opened(data, ctx)]
            del data
            private, payload, _ = self.exchange.trained(private, received, trainer, ctx)
            names = names_to_send(method, ctx.entries, ctx.site, self.slots.names)
            vector, clipped = self.slots.vector(self.exchange, payload, trainer.num_examples, self.round, ring, names)
            if self.noise:
                added = method.contributions(payload, ring.most_weight, self.exchange.spec, ctx)
                require_the_step_alone(trainer, private, payload, added, ring.bound, method.aggregate_divisor)
                self.noise.add(vector, ring, ctx.noise("noise in the sum"))
            log.log(WARNING if clipped else INFO, "masked; %s entries were clipped to +-%g", clipped, ring.bound)
            state_turn = turn if private is not None else ""
            return private, self._packed(payload, vector, site.mask(plan, terms, vector), ctx, state_turn)

        return participate

    def _packed(
        self, payload: Payload, vector: Integers, attached: UploadAttachment, ctx: RoundContext, turn: str
    ) -> list[Buffer]:
        signed = torch.from_numpy(vector.view(f"<i{self.bits // 8}"))
        sent = Payload({_SUM: signed, _ATTACHED: attached.to_bytes()}, scalars=payload.scalars)
        stamp = EnvelopeStamp.from_exchange(self.exchange.method, self.exchange.name, ctx.round, "up", ctx.address)
        return pack_message_parts(self.layout, stamp, sent, turn=turn).parts

    def receive(
        self, data: Buffer, address: MessageAddress | None = MessageAddress()
    ) -> tuple[DecodedMessage, Integers, UploadAttachment]:
        """Decode a client's message; return it with its (read-only) masked vector and its attachment. Raises WireError.

        Without an address, the message comes from a capture.
        """
        stamp = EnvelopeStamp.from_exchange(self.exchange.method, self.exchange.name, self.round, "up", address)
        message = unpack_message(data, self.layout, stamp)
        if message.num_examples is not None or message.report:
            raise WireError("num_examples: a masked vector must come without it and without a report; send neither")
        vector = cast(Tensor, message.payload.fields[_SUM]).numpy().view(np.dtype(f"<u{self.bits // 8}"))
        return message, vector, UploadAttachment.from_bytes(cast(bytes, message.payload.fields[_ATTACHED]))
