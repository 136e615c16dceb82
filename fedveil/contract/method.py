"""The contract between a federated method and everything that runs it.

A method is one file in `strategies/` with both halves of its maths: what the server sends, what a client does with it and
returns, and what the server adds up. It never sees Flower, a model or a file: it sees tensors by name.

    down = method.broadcast(server, ctx)                          # server, one client; pure, may be replayed
    private, up = method.client(private, down, trainer, ctx)      # client; private never leaves the site
    terms = method.terms(up, num_examples, spec, ctx)             # what is added up over clients
    server = method.settle(server, sums, ctx)                     # server; the sums of all terms

Methods are final frozen dataclasses. Their fields are the hyper-parameters, validated on creation.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from fedveil.contract.adapter import Adapter
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.sums import Sums, Terms
from fedveil.contract.trainer import Trainer
from fedveil.rng import Stream

Sends = Literal["weights", "gradients", "changes"]

# What a client may report beside its payload. Anything else is refused by the codec on both sides.
REPORT_FIELDS = frozenset({"loss_received", "loss_trained", "steps", "tokens", "train_seconds"})


@dataclass(frozen=True)
class State:
    """Flat state of a server or of a client: named tensors and JSON values, so one checkpoint format serves all."""

    tensors: Weights = field(default_factory=dict)
    scalars: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundContext:
    """Where and when a half of a method runs.

    Server and client hold different secrets, so neither can replay the other's draws.

    Attributes:
        round: 0-based.
        client: the site's name; "" where the server settles a round.
        is_new: the server has accepted no upload of this site yet (or the site reported that it lost its state).
        secret: this side's secret; never on the wire.
        seeded: run.deterministic: noise repeats, and protects nobody.
    """

    round: int
    client: str
    is_new: bool
    secret: bytes = field(repr=False)
    seeded: bool = False

    def rng(self, purpose: str) -> Stream:
        """A fresh stream derived from (secret, round, client, purpose): the same call gives the same draws."""
        return Stream.derive(self.secret, self.round, self.client, purpose)

    def noise(self, purpose: str) -> Callable[[int], bytes]:
        """Where noise that protects people comes from: the operating system, and a stream in a deterministic run only."""
        return self.rng(purpose).bytes if self.seeded else os.urandom


@dataclass(frozen=True)
class Upload:
    """An accepted reply, as the fold sees it.

    Attributes:
        payload: decoded; its tensors may be read-only views of the received bytes.
        num_examples: training examples behind it, validated.
        ctx: the server's own context of that client and round, never the client's.
        report: figures that the client reports (see REPORT_FIELDS).
    """

    payload: Payload
    num_examples: int
    ctx: RoundContext
    report: Mapping[str, float] = field(default_factory=dict)


class Method(ABC):
    """A federated method. Subclasses are final: `@final @dataclass(frozen=True)`."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # an unknown field in the run config is refused
    version: ClassVar[int] = 1
    adapter: Adapter

    @property
    def sends(self) -> Sends:
        """What the terms are, under the spec's names: trained weights, gradients, or changes of the weights received."""
        return "weights"

    @abstractmethod
    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """The server's state before round 0, from the adapter's initial weights."""

    @abstractmethod
    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """What one client gets. Pure: the same arguments give the same payload, so it may be replayed."""

    @abstractmethod
    def client(
        self, private: State | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """One participation. `private` is None at the first one; the returned state stays on the site."""

    @abstractmethod
    def terms(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> Terms:
        """What this upload adds to the sums. Pure, and the same on either side: of `ctx` it uses the round at most."""

    @abstractmethod
    def settle(self, server: State, sums: Sums, ctx: RoundContext) -> State:
        """The server's next state, from the sums over at least one client; `ctx` is the server's own, of no client."""

    @abstractmethod
    def deployed(
        self, server: State, private: State | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """The models that exist: "server" always, "client" where `private` is given. These are scored and attacked."""

    @abstractmethod
    def layout(self, spec: Spec) -> Layout:
        """Every field on the wire."""

    def check(self, payload: Payload, spec: Spec) -> None:  # noqa: B027  # most methods have nothing to add
        """What the layout cannot say about an upload, such as two fields that must fit. Raises WireError naming the field.

        Called on every upload before it may be folded, so that one that does not fit costs its sender's part only.
        """


def fields_of(method: Method) -> dict[str, Any]:
    """Every hyper-parameter of a method, as method.fields has them."""
    return asdict(method)  # type: ignore[call-overload,no-any-return]


class Distilling(Protocol):
    """What the server can do by itself before round 0, on its own model and rows."""

    def distil(self, weights: Weights, steps: int, learning_rate: float) -> Weights:
        """Trains a proxy with `weights` (every tensor of the spec) to have the hidden states of the server's model."""
        ...


@runtime_checkable
class ServerTrained(Protocol):
    """A method whose server has a model and work of its own before round 0. Few methods do (FedSP)."""

    @property
    def server_adapter(self) -> Adapter:
        """What the view "server" of `deployed` is scored with; its tensors are some of the adapter's."""
        ...

    @property
    def needs_server_rows(self) -> bool:
        """Whether `before_round_0` is to be called, with rows of the server's own (task.server-data)."""
        ...

    def before_round_0(self, weights: Weights, server: Distilling) -> Weights:
        """From the adapter's initial weights to those that `init` gets."""
        ...
