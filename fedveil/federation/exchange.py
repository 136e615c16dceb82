"""An exchange between server and client, as bytes. The Flower apps, the in-process runner and the attacks use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from typing_extensions import override

from fedveil.contract.codec import Buffer
from fedveil.contract.contributions import AddedAggregateSums, AggregateSums, ClientContributions
from fedveil.contract.layout import Direction, MessageLayout, Payload, WireField
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import AcceptedUpload, FederatedState, Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights, movable_names
from fedveil.contract.privacy import Sampling
from fedveil.contract.trainer import BatchIndices, Frozen, Penalty, PerExampleGradientSource, Trainer, TrainingResult
from fedveil.contract.trainer_wrappers import TrainerWrapper, WrappedGradientSource
from fedveil.errors import WireError
from fedveil.ops.running_sums import RunningSums
from fedveil.ops.server_optimizer import ServerOptimizer
from fedveil.rng import RandomStream
from fedveil.wire.envelope import DecodedMessage, EnvelopeStamp, PackedMessage, pack_message_parts, unpack_message
from fedveil.wire.validation import message_bounds

__all__ = ["MessageExchange", "Participate"]

# A client round: maps message, private state, trainer, context and state name to the new state and the upload.
Participate = Callable[
    [Buffer, FederatedState | None, Trainer, RoundContext, str], tuple[FederatedState | None, list[Buffer]]
]


@dataclass(frozen=True)
class MessageExchange:
    """A method for a spec, which must be the same on both ends.

    Attributes:
        method: the method with its hyperparameters.
        name: the method's file name, sent in the envelope.
        spec: the trained tensors.
        optimizer: the server's optimizer, used only by the server; None means the method's own update.
    """

    method: Method
    name: str
    spec: Spec = field(repr=False)
    optimizer: ServerOptimizer | None = None

    @cached_property
    def layout(self) -> MessageLayout:
        """Return every field on the wire."""
        return self.method.layout(self.spec)

    @cached_property
    def largest_upload(self) -> int:
        """Return the maximum size in bytes of any client message."""
        return message_bounds(self.layout, "up").message

    def nbytes(self, field: WireField) -> int:
        """Return the size of a field in bytes; if the sender chooses a length, the size of the largest value."""
        return field.codec.nbytes(field.largest)

    def sizes(self, direction: Direction) -> dict[str, int]:
        """Return the total size of the fields by variant, in bytes without the envelope."""
        fields = {variant: self.layout.fields_of(direction, variant) for variant in self.layout.variants(direction)}
        return {variant: sum(map(self.nbytes, of.values())) for variant, of in fields.items()}

    def largest(self, direction: Direction) -> int:
        """Return the size of the largest variant in bytes."""
        return max(self.sizes(direction).values())

    def broadcast(self, server: FederatedState, ctx: RoundContext) -> bytes:
        """Return the message to one client."""
        return b"".join(self.packed(server, ctx).parts)

    def packed(self, server: FederatedState, ctx: RoundContext) -> PackedMessage:
        """Return the message to one client in parts, with a description of its disclosures."""
        payload = self.method.broadcast(server, ctx)
        return pack_message_parts(
            self.layout,
            EnvelopeStamp.from_exchange(self.method, self.name, ctx.round, "down", ctx.address.of_broadcast),
            payload,
        )

    def participate(
        self, data: Buffer, private: FederatedState | None, trainer: Trainer, ctx: RoundContext, turn: str = ""
    ) -> tuple[FederatedState | None, list[Buffer]]:
        """Run the whole client round: decode, train, encode.

        Returns the new private state, and the reply in parts. If the caller keeps no reference to `data`, its memory
        can be freed while the client trains. `turn` is the site's name for the new state; the reply contains it if
        there is a new state.

        Raises:
            WireError: the message does not match the layout, or contains a value that is not finite.
        """
        received = [self.opened(data, ctx)]
        del data
        private, payload, report = self.trained(private, received, trainer, ctx)
        stamp = EnvelopeStamp.from_exchange(self.method, self.name, ctx.round, "up", ctx.address)
        turn = turn if private is not None else ""
        return private, pack_message_parts(self.layout, stamp, payload, trainer.num_examples, report, turn).parts

    def opened(self, data: Buffer, ctx: RoundContext) -> Payload:
        """Decode a broadcast; if the context has a device, decode the codes there.

        Raises WireError like `participate`.
        """
        stamp = EnvelopeStamp.from_exchange(self.method, self.name, ctx.round, "down", ctx.address.of_broadcast)
        return _finite(unpack_message(data, self.layout, stamp, ctx.device))

    def trained(
        self, private: FederatedState | None, received: list[Payload], trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload, Mapping[str, float]]:
        """Run the method's client step; return the new private state, the payload to send, and the report.

        `received` has one payload. This removes it, so that its memory can be freed while the client trains.
        """
        reporting = _Reporting(trainer)
        private, payload = self.method.client(private, received.pop(), reporting, ctx)
        return private, payload, reporting.report

    def receive(
        self, data: Buffer, round_: int, address: MessageAddress = MessageAddress(), site: str = ""
    ) -> DecodedMessage:
        """Decode a client's message, before upload validation. `site`: the sender, if the address names none.
        Raises WireError.
        """
        message = unpack_message(
            data, self.layout, EnvelopeStamp.from_exchange(self.method, self.name, round_, "up", address)
        )
        self.method.check(message.payload, self.spec)
        if site := site or address.site:
            self.method.check_site(message.payload, self.spec, site)
        return message

    def contributions(self, upload: AcceptedUpload) -> ClientContributions:
        """Return an upload's contributions to the sums."""
        return self.method.contributions(upload.payload, upload.num_examples, self.spec, upload.ctx)

    def aggregate(
        self,
        server: FederatedState,
        uploads: Iterable[AcceptedUpload],
        new_sums: Callable[[], AddedAggregateSums] = RunningSums,
        least: int = 1,
    ) -> FederatedState:
        """Sum the terms of all uploads, one in memory at a time, update the server, and return its next state.

        With fewer than `least` uploads, return the same state object.
        """
        sums, ctx, count = new_sums(), None, 0
        for upload in uploads:
            count += 1
            ctx = upload.ctx
            terms = self.contributions(upload)
            sums.add(ctx.client, upload.num_examples, terms)
            del upload, terms
        if ctx is None or count < least:
            return server
        return self.server_update(server, sums, replace(ctx, client="", is_new=False))

    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the next state: the method's own, or a step of the server's optimizer along the method's change."""
        if self.optimizer is None:
            return self.method.server_update(server, sums, ctx)
        changed = self.method.changed_entries(server, sums, ctx)
        proposed = self.method.server_update(server, sums, ctx)
        return self.optimizer.next_state(server, proposed, changed, movable_names(self.spec))


def _finite(message: DecodedMessage) -> Payload:
    """Return a broadcast's payload. Check all values, even those that no trainer sees, such as a penalty's center."""
    for name, norm in message.norms.items():
        if not math.isfinite(norm):
            raise WireError(
                f"{name}: the broadcast contains NaN or infinity; lower the learning rate, or correct the method's "
                "params"
            )
    return message.payload


class _Reporting(TrainerWrapper):
    """A trainer that stores the last training report, and counts all steps on per-example gradients."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.report: Mapping[str, float] = {}

    @property
    @override
    def rows(self) -> PerExampleGradientSource:
        return _Counting(self._trainer.rows, self)

    @override
    def train(self, weights: Weights, frozen: Frozen | None = None, penalty: Penalty | None = None) -> TrainingResult:
        trained = super().train(weights, frozen, penalty)
        self.report = trained.report
        return trained

    @override
    def gradient(self, weights: Weights) -> TrainingResult:
        result = super().gradient(weights)
        self.report = result.report
        return result


class _Counting(WrappedGradientSource):
    """Per-example gradients that report how many batches were drawn."""

    def __init__(self, rows: PerExampleGradientSource, to: _Reporting) -> None:
        super().__init__(rows)
        self._to = to

    @override
    def batches(self, sampling: Sampling, steps: int, rng: RandomStream, skip: int = 0) -> list[BatchIndices]:
        drawn = super().batches(sampling, steps, rng, skip)
        self._to.report = {"steps": self._to.report.get("steps", 0.0) + len(drawn)}
        return drawn
