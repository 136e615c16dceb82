"""One exchange between server and client, as bytes. Flower's apps, the in-process runner and the attacks all use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from typing_extensions import override

from fedveil.algebra.sums import RunningSums
from fedveil.contract.address import Address
from fedveil.contract.budget import Sampling
from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Direction, Field, Layout, Payload
from fedveil.contract.method import Method, RoundContext, State, Upload
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import AddedSums, Terms
from fedveil.contract.trainer import Batch, Frozen, Penalty, RowGradients, Trained, Trainer
from fedveil.errors import WireError
from fedveil.privacy.wrapped import WrappedRows, WrappedTrainer
from fedveil.rng import Stream
from fedveil.wire.conformity import bounds
from fedveil.wire.envelope import Message, Packed, Stamp, packed, unpack

# A client's turn: message, private state, trainer, context and the turn's name give the new state and the upload.
Participate = Callable[[Buffer, State | None, Trainer, RoundContext, str], tuple[State | None, list[Buffer]]]


@dataclass(frozen=True)
class Exchange:
    """A method on a spec, which both ends must share.

    Attributes:
        method: with its hyper-parameters.
        name: the method's file name, which the envelope carries.
        spec: what is trained.
    """

    method: Method
    name: str
    spec: Spec = field(repr=False)

    @cached_property
    def layout(self) -> Layout:
        """Every field on the wire."""
        return self.method.layout(self.spec)

    @cached_property
    def largest_upload(self) -> int:
        """The most bytes that a client's message can have, whatever it holds."""
        return bounds(self.layout, "up").message

    def nbytes(self, field: Field) -> int:
        """Bytes of a field; where a length is the sender's, those of the largest value."""
        return field.codec.nbytes(field.largest)

    def sizes(self, direction: Direction) -> dict[str, int]:
        """Bytes of the fields by variant, without the envelope."""
        fields = {variant: self.layout.fields_of(direction, variant) for variant in self.layout.variants(direction)}
        return {variant: sum(map(self.nbytes, of.values())) for variant, of in fields.items()}

    def largest(self, direction: Direction) -> int:
        """Those of the largest variant."""
        return max(self.sizes(direction).values())

    def broadcast(self, server: State, ctx: RoundContext) -> bytes:
        """The message to one client."""
        return b"".join(self.packed(server, ctx).parts)

    def packed(self, server: State, ctx: RoundContext) -> Packed:
        """The same message in parts, with what it discloses."""
        payload = self.method.broadcast(server, ctx)
        return packed(
            self.layout, Stamp.of(self.method, self.name, ctx.round, "down", ctx.address.of_broadcast), payload
        )

    def participate(
        self, data: Buffer, private: State | None, trainer: Trainer, ctx: RoundContext, turn: str = ""
    ) -> tuple[State | None, list[Buffer]]:
        """The client's whole turn: decode, train, encode.

        Returns the new private state and the reply, in parts. If the caller keeps no reference to `data`, its memory
        can be freed while the client trains. `turn` is the site's name for the state, which the reply carries if there
        is one to keep.

        Raises:
            WireError: a message that is not what the layout declares, or holds a value that is not finite.
        """
        received = [self.opened(data, ctx)]
        del data
        private, payload, report = self.trained(private, received, trainer, ctx)
        stamp = Stamp.of(self.method, self.name, ctx.round, "up", ctx.address)
        turn = turn if private is not None else ""
        return private, packed(self.layout, stamp, payload, trainer.num_examples, report, turn).parts

    def opened(self, data: Buffer, ctx: RoundContext) -> Payload:
        """What a broadcast holds; with a device in the context, codes are decoded there. Raises WireError as
        `participate`.
        """
        stamp = Stamp.of(self.method, self.name, ctx.round, "down", ctx.address.of_broadcast)
        return _finite(unpack(data, self.layout, stamp, ctx.device))

    def trained(
        self, private: State | None, received: list[Payload], trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload, Mapping[str, float]]:
        """The method's own half: the new private state, what is to be sent, and the report.

        `received` has one payload, which is taken out of it, so that its memory can be freed while the client trains.
        """
        reporting = _Reporting(trainer)
        private, payload = self.method.client(private, received.pop(), reporting, ctx)
        return private, payload, reporting.report

    def receive(self, data: Buffer, round_: int, address: Address = Address(), site: str = "") -> Message:
        """A client's message, decoded; the intake gate has not checked it yet. `site`: whose it is, where the address
        does not say. Raises WireError.
        """
        message = unpack(data, self.layout, Stamp.of(self.method, self.name, round_, "up", address))
        self.method.check(message.payload, self.spec)
        if site := site or address.site:
            self.method.check_site(message.payload, self.spec, site)
        return message

    def terms(self, upload: Upload) -> Terms:
        """What an upload adds to the sums."""
        return self.method.terms(upload.payload, upload.num_examples, self.spec, upload.ctx)

    def aggregate(
        self,
        server: State,
        uploads: Iterable[Upload],
        new_sums: Callable[[], AddedSums] = RunningSums,
        least: int = 1,
    ) -> State:
        """The next state: adds up the terms of all uploads, one in memory at a time, and settles the sums.

        With fewer than `least` uploads the state is the same object.
        """
        sums, ctx, count = new_sums(), None, 0
        for upload in uploads:
            count += 1
            ctx = upload.ctx
            terms = self.terms(upload)
            sums.add(ctx.client, upload.num_examples, terms)
            del upload, terms
        if ctx is None or count < least:
            return server
        return self.method.settle(server, sums, replace(ctx, client="", is_new=False))


def _finite(message: Message) -> Payload:
    """The payload of a broadcast. Also what no trainer ever sees is finite, such as the centre of a penalty."""
    for name, norm in message.norms.items():
        if not math.isfinite(norm):
            raise WireError(f"{name}: expected finite values in the broadcast, found others; mend the run")
    return message.payload


class _Reporting(WrappedTrainer):
    """A trainer that keeps the report of the last training; of steps on single rows, it counts all."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.report: Mapping[str, float] = {}

    @property
    @override
    def rows(self) -> RowGradients:
        return _Counting(self._trainer.rows, self)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> Trained:
        trained = super().train(weights, frozen, penalty)
        self.report = trained.report
        return trained

    @override
    def gradient(self, weights: Weights) -> Trained:
        found = super().gradient(weights)
        self.report = found.report
        return found


class _Counting(WrappedRows):
    """Row gradients that report how many batches were drawn."""

    def __init__(self, rows: RowGradients, to: _Reporting) -> None:
        super().__init__(rows)
        self._to = to

    @override
    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        drawn = super().batches(sampling, steps, rng, skip)
        self._to.report = {"steps": self._to.report.get("steps", 0.0) + len(drawn)}
        return drawn
