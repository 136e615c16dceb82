"""The contract between a federated method and everything that runs it.

A method is one file in `strategies/` with both halves of its maths: what the server sends, what a client
does with it and returns, and how the server folds the returns. It never sees Flower, a model or a file:
it sees tensors by name.

    down = method.broadcast(server, ctx)                      # server, one client; pure, may be replayed
    private, up = method.client(private, down, local, ctx)    # client; private never leaves the site
    server = method.aggregate(server, uploads)                # server; uploads is an iterator

Methods are final frozen dataclasses. Their fields are the hyper-parameters, validated on creation.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from fedveil.contract.adapter import Adapter
from fedveil.contract.budget import Budget, Plan
from fedveil.contract.layout import Layout, Payload
from fedveil.contract.spec import Spec, Weights
from fedveil.contract.trainer import Local, Preparing
from fedveil.rng import Stream

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
        client: the site's name.
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
    """An accepted reply, as aggregate sees it.

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
    def plain(self) -> Method:
        """The method of the file; another one where this one only changes how its clients train."""
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """Every hyper-parameter, as method.fields has them."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @property
    def server_adapter(self) -> Adapter:
        """What the view "server" of `deployed` is scored with; its tensors are some of the adapter's."""
        return self.adapter

    @property
    def prepares(self) -> bool:
        """Whether the server has work of its own before round 0, on rows of its own (task.server-data)."""
        return False

    def prepare(self, weights: Weights, server: Preparing) -> Weights:
        """That work: from the adapter's initial weights to those that `init` gets. Called only where `prepares` says so."""
        return weights

    @abstractmethod
    def init(self, spec: Spec, weights: Weights, rng: Stream) -> State:
        """The server's state before round 0, from the adapter's initial weights."""

    @abstractmethod
    def broadcast(self, server: State, ctx: RoundContext) -> Payload:
        """What one client gets. Pure: the same arguments give the same payload, so aggregate may replay it."""

    @abstractmethod
    def client(
        self, private: State | None, down: Payload, local: Local, ctx: RoundContext
    ) -> tuple[State | None, Payload]:
        """One participation. `private` is None at the first one; the returned state stays on the site."""

    @abstractmethod
    def aggregate(self, server: State, uploads: Iterator[Upload]) -> State:
        """The next server state. Holds O(model) memory however many uploads come; none leaves `server` unchanged."""

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

    @property
    def uploads(self) -> Literal["weights", "gradients", "coded"]:
        """What an adversary may take the tensors of an upload for, under the spec's names; "coded" needs the method to read."""
        return "weights"

    @property
    def budget(self) -> Budget | None:
        """What a record of a site may be charged. None: the method makes no claim, and there is no ledger."""
        return None

    def privacy_spent(self, plan: Plan) -> Mapping[tuple[str, int, int, float], int]:
        """What the most looked-at record of a site is charged over the plan (`fedveil.privacy.accounting.Spent`)."""
        return {("gaussian", 0, 0, 0.0): plan.rounds * plan.steps}

    def dp_event(self, plan: Plan | None) -> object:
        """The dp-accounting event of a run; without a plan, or a claim, it is non-private: epsilon = inf."""
        from dp_accounting import NonPrivateDpEvent

        from fedveil.privacy import accounting

        return NonPrivateDpEvent() if plan is None else accounting.event(self.privacy_spent(plan))
