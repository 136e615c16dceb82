"""The inputs of one client round at this site, read before any example. Does not use Flower.

`ClientRound.open` reads all of them once, so a policy change during a round takes effect in the next round. Only the
check of the upload before it leaves the site reads the current policy file (`decisions.check_upload`, in another
process).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedveil.client_app.guards.broadcast_guard import BroadcastReferenceStore
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy.site_policy import SitePolicy, load_policy
from fedveil.client_app.secure_round import SecureClientRound, begin_secure_round
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.config import RunConfig
from fedveil.contract.codec import Buffer
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.privacy import PrivacyGuarantee
from fedveil.contract.row_counts import RowCounts
from fedveil.contract.task import PreparedData, Task
from fedveil.data.units import UnitRows
from fedveil.encrypted_files import FileSeal
from fedveil.federation.exchange import MessageExchange, Participate
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.privacy.own_share import charged_guarantee
from fedveil.training.held_out import HeldOutSplit
from fedveil.wire import header


@dataclass(frozen=True)
class LoadedTask:
    """The task with its base model in memory, and the method's message exchange for it."""

    task: Task
    exchange: MessageExchange


@dataclass(frozen=True)
class SiteData:
    """The site's prepared examples, and their split into training and held-out examples.

    Attributes:
        refusal: why the site reports no held-out score: a key of `held_out_report.REFUSALS`; 0 if it may report
            one.
        data_set: id of the data set; "" if no example is held out.
        units: rows of each unit; None if each row is a unit.
        note: how many examples are held out, for the site's own records; "" if the run requests none.
    """

    prepared: PreparedData
    split: HeldOutSplit
    refusal: int = 0
    data_set: str = ""
    units: UnitRows | None = None
    note: str = ""


@dataclass(frozen=True)
class ClientRoundResult:
    """The result of a client round.

    Attributes:
        parts: the upload, in parts to be joined; dense parts are views of the trained tensors.
        load_seconds: time to load the base model and the examples; almost 0 once they are in memory.
        counts: how many of the site's rows were truncated or dropped; None if the task does neither.
        notes: how the site's data was read, see `fedveil.data.reading_notes`; the notes stay at the site.
    """

    parts: list[Buffer]
    load_seconds: float
    counts: RowCounts | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClientRound:
    """The inputs of one client round, loaded before any example is read.

    Attributes:
        assignment: the server's instruction, the run config, the node config.
        policy: the site's policy, read once per round.
        seal: encryption of the files that the site stores.
        states: the site's private state in the run, by round.
        secret: the secret from which the site derives its random draws for the run.
        replays: the record of the rounds that the site has already served.
        references: the record of the weights that the site last trained from.
        secagg: this round's part in secure aggregation; None if uploads are not masked.
    """

    assignment: ClientAssignment
    policy: SitePolicy
    seal: FileSeal
    states: ClientStateStore
    secret: bytes
    replays: ReplayGuard
    references: BroadcastReferenceStore
    secagg: SecureClientRound | None

    @classmethod
    def open(cls, assignment: ClientAssignment) -> ClientRound:
        """Read policy, key file and state folder, and accept the secure-aggregation plan.

        Raises:
            PolicyError, WireError: the policy is unreadable, or the site rejects the plan.
            StateError, ConfigError: the site's stored state for the run is unreadable.
        """
        site, run, name, config = assignment.site, assignment.order.run, assignment.name, assignment.config
        policy = load_policy(site)
        secagg = begin_secure_round(assignment, policy)
        seal = FileSeal.from_key_file(site.key_file)
        states = ClientStateStore.open(site.state_dir, run, name, seal)
        return cls(
            assignment,
            policy,
            seal,
            states,
            states.secret(config.run.seed, name, config.run.deterministic),
            ReplayGuard.open(site.state_dir, run, name),
            BroadcastReferenceStore.open(site.state_dir, run, name, seal),
            secagg,
        )

    def build_context(self, method: Method, task: Task) -> RoundContext:
        """Return the context for the method: identity, round, random streams, and the device for whole tensors."""
        order, config = self.assignment.order, self.assignment.config
        return RoundContext(
            order.round,
            self.assignment.name,
            order.is_new,
            self.secret,
            config.run.deterministic,
            order.address,
            config.secure.noise == "sum",
            device_for(method, task, config, is_masked=self.secagg is not None),
            in_secure_sum=self.secagg is not None,
        )

    def select_participate(self, exchange: MessageExchange) -> Participate:
        """Return the site's half of the exchange, which masks the upload if secure aggregation is on."""
        if self.secagg is None:
            return exchange.participate
        return self._codec(exchange).of_site(self.secagg.site, self.secagg.plan, self.secagg.terms)

    def charged_guarantee(self, exchange: MessageExchange, guarantee: PrivacyGuarantee) -> PrivacyGuarantee:
        """Return the guarantee as charged to the ledger: noise in the sum depends on this round's integers."""
        if self.secagg is not None and (noise := self._codec(exchange).noise) is not None:
            guarantee = noise.charged(self._codec(exchange).ring(self.secagg.plan))
        return charged_guarantee(guarantee, self.policy.roster)

    def _codec(self, exchange: MessageExchange) -> MaskedUploadCodec:
        assert self.secagg is not None
        guarantee = guarantee_of(exchange.method, self.assignment.config)
        return MaskedUploadCodec.from_exchange(exchange, self.assignment.order.round, self.secagg.plan.bits, guarantee)

    def require_same(self, message: Buffer) -> Buffer:
        """Return the message if it matches the plan, and the round was not served with a different message or state.

        Raises PolicyError, WireError.
        """
        order, digest = self.assignment.order, header.message_digest(message)
        if self.secagg is not None:
            self.secagg.require_broadcast(digest)
        self.replays.require_same(order.round, f"{digest} {order.last}")
        return message


def device_for(method: Method, task: Task, config: RunConfig, is_masked: bool) -> torch.device | None:
    """Return the device on which the method works on whole tensors, or None for the CPU.

    Secure-aggregation masks and step noise are generated on the CPU, so the tensors have to be there.
    """
    works_there = method.on_device and not is_masked and DpSgdConfig.from_config(config.dp) is None
    return task.accelerator if works_there else None
