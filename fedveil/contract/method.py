"""The contract between a federated method and everything that runs it.

A method is one file in `strategies/` with the computations of both sides: what the server sends, how a client uses it
and replies, and what the server adds up. It never sees Flower, a model or a file. It sees named tensors.

    down = method.broadcast(server, ctx)                          # server, one client; pure, may be replayed
    private, up = method.client(private, down, trainer, ctx)      # client; private never leaves the site
    terms = method.contributions(up, num_examples, spec, ctx)             # one upload's summands
    server = method.server_update(server, sums, ctx)                     # server; sums over the terms of all clients

Methods are final frozen dataclasses. Their fields are the hyper-parameters, validated on creation.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedveil.contract import held_out_report, row_counts
from fedveil.contract.adapter import Adapter
from fedveil.contract.contributions import AggregateSums, ClientContributions
from fedveil.contract.entry_table import EntryTable
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import Trainer
from fedveil.rng import RandomStream

__all__ = [
    "REPORT_FIELDS",
    "TRAINING_FIELDS",
    "AcceptedUpload",
    "Distiller",
    "FederatedState",
    "Method",
    "RoundContext",
    "Sends",
    "ServerTrained",
    "hyperparameters_of",
]

Sends = Literal["weights", "gradients", "changes"]

# The values that a client may report along with its payload. Both ends refuse anything else.
TRAINING_FIELDS = frozenset({"loss_received", "loss_trained", "steps", "tokens", "train_seconds"})
REPORT_FIELDS = held_out_report.FIELDS | row_counts.FIELDS | TRAINING_FIELDS


@dataclass(frozen=True)
class FederatedState:
    """State of a server or a client: named tensors and JSON values, so one checkpoint format serves all methods.

    Attributes:
        tensors: tensors of the method, by name.
        scalars: JSON values of the method.
        moments: tensors of the server's optimizer (`server.optimizer`), which no method reads or sends.
    """

    tensors: Weights = field(default_factory=dict)
    scalars: Mapping[str, object] = field(default_factory=dict)
    moments: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class RoundContext:
    """The place and time at which one half of a method runs.

    Server and client hold different secrets, so neither can replay the other's draws.

    Attributes:
        round: round number, 0-based.
        client: the site's name; "" where the server completes a round.
        is_new: the server has not accepted an upload of this site yet, or the site's last client round
            failed.
        secret: this side's secret, which is never sent.
        seeded: true under run.deterministic: the noise repeats and protects no one.
        address: the address of this client round's messages; for the envelope, not for methods.
        noise_in_sum: True if noise is added to the sum outside the method (secure.noise), which then adds
            none to it.
        device: the device on which a method with `on_device` quantizes, masks and packs; None means the device of the
            tensors.
        entries: who sends which entries under secure aggregation; None in the clear, or if the method plans
            none.
    """

    round: int
    client: str
    is_new: bool
    secret: bytes = field(repr=False)
    seeded: bool = False
    address: MessageAddress = MessageAddress()
    noise_in_sum: bool = False
    device: torch.device | None = None
    entries: EntryTable | None = field(default=None, repr=False)

    @property
    def site(self) -> str:
        """Return the name by which the server knows the client; fields of a run use this name for the site."""
        return self.address.site or self.client

    def rng(self, purpose: str) -> RandomStream:
        """Return a new stream derived from (secret, round, client, purpose): the same call gives the same draws."""
        return RandomStream.derive(self.secret, self.round, self.client, purpose)

    def noise(self, purpose: str) -> Callable[[int], bytes]:
        """Return the source of privacy noise: the operating system or, in a deterministic run, a stream."""
        return self.rng(purpose).bytes if self.seeded else os.urandom

    def new_turn(self) -> str:
        """Return 16 hex digits that distinguish this participation from the site's others, even in the same round."""
        return f"{self.round:016x}" if self.seeded else os.urandom(8).hex()


@dataclass(frozen=True)
class AcceptedUpload:
    """An accepted reply.

    Attributes:
        payload: decoded; its tensors may be read-only views of the received bytes.
        num_examples: training examples behind it, within the server's limits.
        ctx: the server's own context of that client and round, never the client's.
        report: metrics that the client reports (see REPORT_FIELDS).
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
    def trainings(self) -> int:
        """Return how often a client trains in a client round, each time with the steps of `train.*`."""
        return 1

    @property
    def upload_kind(self) -> Sends:
        """Return the kind of terms under the spec's names: trained weights, gradients, or weight changes."""
        return "weights"

    @property
    def aggregate_divisor(self) -> float:
        """Return the divisor of terms of trained weights or their changes: at least 1, independent of examples."""
        return 1.0

    @property
    def uses_local_optimizer(self) -> bool:
        """Return whether clients make the optimizer steps of `train.*`; if not, keys of such steps are refused."""
        return True

    @property
    def server_optimizer_conflict(self) -> str:
        """Return why `server.optimizer` cannot step along the change of `server_update`; "" if it can.

        It can if the trained tensors of the server's state are free: nothing else in the state, or at a site, must
        agree with the change that `server_update` made to them.
        """
        return ""

    @property
    def requests_raw_gradient(self) -> bool:
        """Return whether clients ask for a batch's raw gradient, which no accountant covers."""
        return self.upload_kind == "gradients"

    @property
    def has_masked_terms(self) -> bool:
        """Return whether terms may have masks: two uploads may then have few or no entries in common."""
        return False

    @property
    def has_partial_uploads(self) -> bool:
        """Return whether sites of a round may send different entries, in a run in the clear."""
        return self.has_masked_terms

    @property
    def sends_same_broadcast(self) -> bool:
        """Return whether every site of an attempt gets the same message.

        Then `broadcast` reads neither the client of `ctx` nor `ctx.is_new`, nor draws from its streams, and secure
        aggregation binds the message: a site that was sent another one is not in the same sum.
        """
        return True

    def sends_same_broadcast_in(self, entries: EntryTable | None) -> bool:
        """Return whether every site gets the same message in a round with this table of entries.

        A method may do so in some rounds alone, as FedQSN does where all sites have one mask.
        """
        return self.sends_same_broadcast

    @property
    def keeps_private_state(self) -> bool:
        """Return whether `client` returns a state that stays at the site."""
        return False

    @property
    def plans_entries(self) -> bool:
        """Return whether, under secure aggregation, the server draws who sends which entries (`plan_entries`)."""
        return False

    @property
    def has_single_site_entries(self) -> bool:
        """Return whether an entry of a secure sum may come from one site: sites draw for themselves what they send."""
        return self.has_partial_uploads and not self.plans_entries

    @property
    def keeps_past(self) -> bool:
        """Return whether clients start a tensor that was not sent from their previous value; an attack relies on it."""
        return True

    def starting_weights(self, received: Weights, spec: Spec) -> Weights:
        """Return the tensors that a client starts training from; attacks use this to find a client's start."""
        return received

    @property
    def on_device(self) -> bool:
        """Return whether `broadcast` and `client` use `ctx.device`; only then is a device given.

        Received codes are then decoded on it, one tensor at each access, and the tensors to send may be on it.
        """
        return False

    @abstractmethod
    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return the server's state before round 0, from the adapter's initial weights."""

    @abstractmethod
    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return one client's payload. Pure: the server may call it again with the same arguments and result."""

    @abstractmethod
    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run one participation. `private` is None at the first one; the returned state stays at the site."""

    @abstractmethod
    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return what this upload adds to the sums, the same on both sides. It reads only the round of `ctx`."""

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return the sums of a round: names (of the spec or of upload fields) and the shapes of their terms' weights.

        The shape is () if all entries have the same weight (terms without masks). Otherwise it broadcasts to the
        tensor's shape, with one weight for each distinct entry of a mask. Secure aggregation must know the sums before
        anything is sent.
        """
        sent = {f.name for f in self.layout(spec).fields if f.direction == "up"}
        return {name: () for name in spec if name in sent}

    @abstractmethod
    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the server's next state, from sums over at least one client. The server's `ctx` names no client."""

    def changed_entries(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> Mapping[str, Tensor]:
        """Return, for each tensor of the state that some site sent, a mask of the entries that some site sent.

        A server optimizer moves only these. It is called before `server_update`, which may take sums away.
        """
        return {name: sums.moved(name) for name in server.tensors if name in sums}

    def plan_entries(self, spec: Spec, cohort: Sequence[str], fewest: int, ctx: RoundContext) -> EntryTable:
        """Draw which site sends which entries of a round under secure aggregation, if `plans_entries` is True.

        The server's and the sites' contexts of the round then have the table, and both halves follow it.

        Args:
            cohort: the round's sites, sorted, at least `fewest`.
            fewest: minimum number of sites that send a block, unless no site sends it.
            ctx: the server's context of the round, which names no client.
        """
        raise NotImplementedError(f"{type(self).__name__}: plans_entries is True, so it needs plan_entries")

    def check_entries(self, sites: int, drawn: int, fewest: int) -> None:  # noqa: B027  # most methods always can
        """Raise ConfigError if some entry can never have enough senders under secure aggregation.

        Args:
            sites: number of sites of the federation.
            drawn: number of sites of a cohort.
            fewest: number of a cohort's sites that must send an entry.
        """

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the models by view, to be scored and attacked: "server" always, "client" with `private`.

        If no part of the model stays at a site, the server's is the only one.
        """
        return {"server": server.tensors}

    @abstractmethod
    def layout(self, spec: Spec) -> MessageLayout:
        """Return every field on the wire."""

    def check(self, payload: Payload, spec: Spec) -> None:  # noqa: B027  # most methods have nothing to add
        """Check what the layout cannot express, such as two fields that must agree. Raises WireError naming the field.

        The server checks every upload before it adds its terms, so that a bad one is refused and the others still
        count.
        """

    def check_site(self, payload: Payload, spec: Spec, site: str) -> None:  # noqa: B027
        """Check settings that apply only to this site, such as its rank; `site` is never taken from the upload.

        Raises WireError naming the field. Masked uploads of secure aggregation cannot be checked.
        """


def hyperparameters_of(method: Method) -> dict[str, Any]:
    """Return every hyper-parameter of a method, as in method.params."""
    return asdict(method)  # type: ignore[call-overload,no-any-return]


class Distiller(Protocol):
    """Training by the server before round 0, on its own model and examples."""

    def distil(self, weights: Weights, steps: int, learning_rate: float) -> Weights:
        """Train a proxy, from `weights` (every tensor of the spec), towards the server model's hidden states."""
        ...


@runtime_checkable
class ServerTrained(Protocol):
    """A method whose server has its own model, and trains before round 0 (FedSP)."""

    @property
    def server_adapter(self) -> Adapter:
        """Return the adapter with which the view "server" is scored; its tensors are part of the method's adapter."""
        ...

    @property
    def needs_server_rows(self) -> bool:
        """Return whether the server calls `before_round_0`, which needs its own examples (task.server-data)."""
        ...

    def before_round_0(self, weights: Weights, server: Distiller) -> Weights:
        """Return the weights for `init`, computed from the adapter's initial weights."""
        ...
