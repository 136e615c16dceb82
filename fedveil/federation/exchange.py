"""One exchange between a server and a client, as bytes. Flower, the in-process runner and the attacks all go through here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedveil.contract.budget import Sampling
from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Layout
from fedveil.contract.method import Method, RoundContext, State
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Around, Batch, FeatureGradients, Local, PerSample, Trained
from fedveil.rng import Stream
from fedveil.wire.envelope import Message, Stamp, pack, pack_parts, unpack


@dataclass(frozen=True)
class Exchange:
    """A method on a spec: what both ends must share.

    Attributes:
        method: with its hyper-parameters.
        name: its file name, as the envelope carries it.
        spec: what is trained.
    """

    method: Method
    name: str
    spec: Spec = field(repr=False)

    @cached_property
    def layout(self) -> Layout:
        """Every field on the wire."""
        return self.method.layout(self.spec)

    def broadcast(self, server: State, ctx: RoundContext) -> bytes:
        """The message to one client."""
        payload = self.method.broadcast(server, ctx)
        return pack(self.layout, Stamp.of(self.method, self.name, ctx.round, "down"), payload)

    def participate(
        self, data: Buffer, private: State | None, local: Local, ctx: RoundContext
    ) -> tuple[State | None, list[Buffer]]:
        """The client's whole turn: decode, train, encode.

        Returns the new private state and the message back, in parts. `data` is let go once the method has returned,
        where the caller has let it go too.
        """
        reporting = _Reporting(local)
        received = [unpack(data, self.layout, Stamp.of(self.method, self.name, ctx.round, "down")).payload]
        del data
        private, payload = self.method.client(private, received.pop(), reporting, ctx)
        stamp = Stamp.of(self.method, self.name, ctx.round, "up")
        return private, pack_parts(self.layout, stamp, payload, local.num_examples, reporting.report)

    def receive(self, data: Buffer, round_: int) -> Message:
        """A client's message, decoded; the gate has still to judge it. Raises WireError."""
        message = unpack(data, self.layout, Stamp.of(self.method, self.name, round_, "up"))
        self.method.check(message.payload, self.spec)
        return message


class _Reporting(Around):
    """A Local that remembers what the last training reported; of steps on rows apart, how many there were in all."""

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self.report: Mapping[str, float] = {}

    def train(self, weights: Weights, frozen: Weights | None = None) -> Trained:
        trained = self._local.train(weights) if frozen is None else self._local.train(weights, frozen)
        self.report = trained.report
        return trained

    def gradient(self, weights: Weights) -> Trained:
        found = self._local.gradient(weights)
        self.report = found.report
        return found

    def batches(self, sampling: Sampling, steps: int, rng: Stream, skip: int = 0) -> list[Batch]:
        drawn = self._local.batches(sampling, steps, rng, skip)
        self.report = {"steps": self.report.get("steps", 0.0) + len(drawn)}
        return drawn

    def per_sample_gradients(self, weights: Weights, batch: Batch) -> PerSample:
        return self._local.per_sample_gradients(weights, batch)

    def feature_gradients(self, weights: Weights, batch: Batch) -> FeatureGradients:
        return self._local.feature_gradients(weights, batch)
