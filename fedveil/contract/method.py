"""The contract between a federated method and everything that runs it.

A method is one file in `strategies/` with the computations of both sides: the server's broadcast, the client's training
and reply, and the sums on the server. It never sees Flower, a model or a file. It sees named tensors.

    down = method.broadcast(server, ctx)                          # server, one client; pure, may be replayed
    private, up = method.client(private, down, trainer, ctx)      # client; private never leaves the site
    terms = method.contributions(up, num_examples, spec, ctx)             # one upload's summands
    server = method.server_update(server, sums, ctx)                     # server; sums over the terms of all clients

Methods are final frozen dataclasses. Their fields are the hyperparameters, validated on creation.
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
        tensors: the method's tensors, by name.
        scalars: the method's JSON values.
        moments: tensors of the server's optimizer (`server.optimizer`), which no method reads or sends.
    """

    tensors: Weights = field(default_factory=dict)
    scalars: Mapping[str, object] = field(default_factory=dict)
    moments: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class RoundContext:
    """The side and round in which one half of a method runs.

    Server and client hold different secrets, so neither can replay the other's draws.

    Attributes:
        round: round number, 0-based.
        client: the site's name; "" when the server completes a round.
        is_new: True if the server has not yet accepted an upload from this site, or the site's last client round
            failed.
        secret: this side's secret, which is never sent.
        seeded: True under run.deterministic: the noise repeats, so it gives no protection.
        address: the address of this client round's messages; for the envelope, not for methods.
        noise_in_sum: True if noise is added to the sum outside the method (secure.noise); the method then adds
            none.
        device: the device on which a method with `on_device` quantizes, masks and packs; None means the tensors'
            device.
        entries: the entries that each site sends under secure aggregation; None in the clear, or if the method does
            not plan entries.
        in_secure_sum: True under secure aggregation, where a method should send all sites the same message.
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
    in_secure_sum: bool = False

    @property
    def site(self) -> str:
        """Return the server's name for the client; a run's fields use this name for the site."""
        return self.address.site or self.client

    def rng(self, purpose: str) -> RandomStream:
        """Return a new stream derived from (secret, round, client, purpose); the same call gives the same draws."""
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
        payload: the decoded payload; its tensors may be read-only views of the received bytes.
        num_examples: number of training examples behind it, within the server's limits.
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
        """Return the number of training passes in a client round, each with the steps set by `train.*`."""
        return 1

    @property
    def upload_kind(self) -> Sends:
        """Return the kind of terms under the spec's names: trained weights, gradients, or weight changes."""
        return "weights"

    @property
    def aggregate_divisor(self) -> float:
        """Return the divisor for terms of trained weights or their changes: at least 1, independent of the examples."""
        return 1.0

    @property
    def uses_local_optimizer(self) -> bool:
        """Return whether clients take the optimizer steps set by `train.*`; if not, the keys for them are refused."""
        return True

    @property
    def server_optimizer_conflict(self) -> str:
        """Return why `server.optimizer` cannot step along the change of `server_update`; "" if it can.

        It can if the trained tensors in the server's state are free, that is, if nothing else in the state or at a site
        has to match the change that `server_update` made to them.
        """
        return ""

    @property
    def stale_upload_conflict(self) -> str:
        """Return why `cohort.buffer-size` cannot add an upload for an earlier server state; "" if it can.

        It can if each contribution of kind "weights" is a trained tensor of the server's state under that tensor's
        name, or each contribution is a gradient or a change, and if `server_update` takes uploads of different rounds.
        The text completes "a method that ...".
        """
        return "does not say what an upload for an earlier server state adds (stale_upload_conflict)"

    @property
    def site_score_conflict(self) -> str:
        """Return why a site cannot score the server's model (`evaluate.validation-share`); "" if it can.

        It can if the weights that `client` first trains, or asks the gradient of, are those of the view "server". The
        text completes "METHOD ...".
        """
        return (
            "keeps a part of the model at each site, so a site scores its own model" if self.keeps_private_state else ""
        )

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
        """Return whether sites may send different entries in the same round, in a run without secure aggregation."""
        return self.has_masked_terms

    @property
    def sends_same_broadcast(self) -> bool:
        """Return whether every site in an attempt gets the same message under secure aggregation.

        If so, with `ctx.in_secure_sum`, `broadcast` does not read the client in `ctx` or `ctx.is_new`, or draw from its
        streams, and secure aggregation binds the message: a site that received a different message is not in the same
        sum.
        """
        return True

    @property
    def has_bound_broadcast(self) -> bool:
        """Return whether, under secure aggregation, a site trains from nothing but a message that all sites get.

        A server that lies then cannot give the sites of one sum different starting points.
        """
        return self.sends_same_broadcast and not self.keeps_private_state

    @property
    def keeps_private_state(self) -> bool:
        """Return whether `client` returns a state that stays at the site."""
        return False

    @property
    def plans_entries(self) -> bool:
        """Return whether, under secure aggregation, the server draws the entries each site sends (`plan_entries`)."""
        return False

    @property
    def has_single_site_entries(self) -> bool:
        """Return whether an entry of a secure sum may come from one site, because sites draw the entries they send."""
        return self.has_partial_uploads and not self.plans_entries

    @property
    def keeps_past(self) -> bool:
        """Return whether clients start unsent tensors from their own previous values; an attack relies on this."""
        return True

    def starting_weights(self, received: Weights, spec: Spec) -> Weights:
        """Return the tensors that a client starts training from; attacks use this to find a client's start."""
        return received

    @property
    def on_device(self) -> bool:
        """Return whether `broadcast` and `client` use `ctx.device`; a device is given only in that case.

        Received codes are then decoded on that device, one tensor at each access, and tensors to send may be on it.
        """
        return False

    @abstractmethod
    def init(self, spec: Spec, weights: Weights, rng: RandomStream) -> FederatedState:
        """Return the server's state before round 0, from the adapter's initial weights."""

    @abstractmethod
    def broadcast(self, server: FederatedState, ctx: RoundContext) -> Payload:
        """Return one client's payload. Pure: another call with the same arguments returns the same payload."""

    @abstractmethod
    def client(
        self, private: FederatedState | None, down: Payload, trainer: Trainer, ctx: RoundContext
    ) -> tuple[FederatedState | None, Payload]:
        """Run one participation. `private` is None in the first one; the returned state stays at the site."""

    @abstractmethod
    def contributions(self, payload: Payload, num_examples: int, spec: Spec, ctx: RoundContext) -> ClientContributions:
        """Return this upload's contributions to the sums, the same on both sides. It reads only the round in `ctx`."""

    def aggregate_shapes(self, spec: Spec, round_: int) -> Mapping[str, tuple[int, ...]]:
        """Return a round's sums: names (from the spec or upload fields) and the shapes of their terms' weights.

        The shape is () if all entries have the same weight (terms without masks). Otherwise it broadcasts to the
        tensor's shape, with one weight for each distinct mask entry. Secure aggregation must know the sums before
        anything is sent.
        """
        sent = {f.name for f in self.layout(spec).fields if f.direction == "up"}
        return {name: () for name in spec if name in sent}

    @abstractmethod
    def server_update(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> FederatedState:
        """Return the server's next state, from sums over at least one client. The server's `ctx` names no client."""

    def changed_entries(self, server: FederatedState, sums: AggregateSums, ctx: RoundContext) -> Mapping[str, Tensor]:
        """Return, for each tensor in the state that any site sent, a mask of the entries that were sent.

        A server optimizer moves only these entries. This is called before `server_update`, which may remove sums.
        """
        return {name: sums.moved(name) for name in server.tensors if name in sums}

    def plan_entries(self, spec: Spec, cohort: Sequence[str], fewest: int, ctx: RoundContext) -> EntryTable:
        """Draw the entries that each site sends in a round under secure aggregation, if `plans_entries` is True.

        The round's contexts on the server and the sites then have the table, and both halves follow it.

        Args:
            cohort: the round's sites, sorted, at least `fewest`.
            fewest: minimum number of sites that send a block, unless no site sends it.
            ctx: the server's context for the round, which names no client.
        """
        raise NotImplementedError(f"{type(self).__name__}: plans_entries is True, so it needs plan_entries")

    def check_entries(self, sites: int, drawn: int, fewest: int) -> None:  # noqa: B027  # most methods always pass
        """Raise ConfigError if some entry can never have enough senders under secure aggregation.

        Args:
            sites: number of sites in the federation.
            drawn: number of sites in a cohort.
            fewest: number of sites in a cohort that must send an entry.
        """

    def models(
        self, server: FederatedState, private: FederatedState | None = None, down: Payload | None = None
    ) -> Mapping[str, Weights]:
        """Return the models to score and attack, by view: always "server", and "client" if `private` is given.

        If no part of the model stays at a site, the server's is the only one.
        """
        return {"server": server.tensors}

    @abstractmethod
    def layout(self, spec: Spec) -> MessageLayout:
        """Return every field on the wire."""

    def check(self, payload: Payload, spec: Spec) -> None:  # noqa: B027  # most methods have nothing to add
        """Check rules that no layout can express, such as fields that must agree. Raises WireError naming the field.

        The server checks every upload before it adds the terms, so that it can refuse a bad upload and still count
        the others.
        """

    def check_site(self, payload: Payload, spec: Spec, site: str) -> None:  # noqa: B027
        """Check settings that apply only to this site, such as its rank; `site` is never taken from the upload.

        Raises WireError naming the field. Masked uploads under secure aggregation cannot be checked.
        """


def hyperparameters_of(method: Method) -> dict[str, Any]:
    """Return every hyperparameter of a method, as in method.params."""
    return asdict(method)  # type: ignore[call-overload,no-any-return]


class Distiller(Protocol):
    """Training by the server before round 0, on its own model and examples."""

    def distil(self, weights: Weights, steps: int, learning_rate: float) -> Weights:
        """Train a proxy from `weights` (every tensor of the spec) toward the server model's hidden states."""
        ...


@runtime_checkable
class ServerTrained(Protocol):
    """A method whose server has its own model and trains before round 0 (FedSP)."""

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
