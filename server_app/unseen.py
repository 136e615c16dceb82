"""A round whose uploads nobody sees: its keys, its sum, and the two exchanges that it takes beside the clear one's.

Everything of secure aggregation that is not Flower's stands in fedveil/federation/secure. Keys are asked for before a
cohort is drawn, and a prekey is for one attempt. Nothing of them is kept for a resume: a server that starts again asks
every site for new ones, so no key and no context is ever used twice.

| a site ... | what happens |
|---|---|
| gives no keys | it is left out of the cohort; its reason stands in `record.failed` |
| fails in the round | it is taken for one that has lost its keys |
| opens no shares, or wrong ones | nothing, while t others do |
| gave shares that do not open its secret | the attempt is thrown away, and the run goes on without it |

| the sum ... | what happens |
|---|---|
| cannot be opened, or is none that honest sites have | the attempt is thrown away; `record.unseen` has the reason |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from logging import WARNING
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from flwr.supercore import log
from typing_extensions import override

from fedveil.config import SecureConfig
from fedveil.contract.address import Address
from fedveil.contract.budget import Claim
from fedveil.contract.codec import Buffer
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext, State, Upload
from fedveil.errors import ConfigError, QuorumError, WireError
from fedveil.federation.exchange import Exchange
from fedveil.federation.secure import server, unmasking
from fedveil.federation.secure.membership import Bundle, Member, Roster
from fedveil.federation.secure.statements import Opened
from fedveil.federation.summed.local import settings_of
from fedveil.federation.summed.summands import RingSums
from fedveil.federation.summed.uploads import Summed
from fedveil.foreign import shown
from fedveil.server_app.attempt import REASON_CHARACTERS, Attempt, order_of
from fedveil.server_app.questions import SECONDS, Questions
from fedveil.wire import envelope


@dataclass(frozen=True)
class UnseenAttempt(Attempt):
    """An attempt whose uploads are masked vectors, added up as they come.

    Attributes:
        questions: to the sites that hold shares.
        found: what they are added to.
        summed: their form.
        words: what each site says in clear, by site; filled in while the attempt runs.
    """

    questions: Questions = field(kw_only=True)
    found: unmasking.Attempt = field(kw_only=True)
    summed: Summed = field(kw_only=True)
    words: dict[str, dict[str, str]] = field(default_factory=dict, kw_only=True)

    @override
    def order(self, ctx: RoundContext, anchor: str, deadline: float) -> ConfigRecord:
        order = super().order(ctx, anchor, deadline)
        order["secure"] = self.found.plan.to_bytes().decode()
        return order

    @property
    @override
    def largest_upload(self) -> int:
        return self.summed.largest_upload

    @override
    def _read(self, data: Buffer, ctx: RoundContext) -> tuple[envelope.Message, Upload, float]:
        message, vector, attached = self.summed.receive(data, ctx.address)
        self.found.add(ctx.client, vector, attached)
        self.words[ctx.client] = dict(message.payload.scalars)
        return message, Upload(Payload({}, scalars=message.payload.scalars), 1, ctx), 0.0

    @override
    def _report(self, upload: Upload) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Unseen:
    """Secure aggregation of one run.

    Attributes:
        coordinator: the sites' keys.
        claim: of the run, whose noise may be in the sum.
    """

    exchange: Exchange
    coordinator: server.Coordinator
    claim: Claim | None = None

    @classmethod
    def of(cls, exchange: Exchange, config: SecureConfig, run: str, claim: Claim | None) -> Unseen:
        """Of a run's config. Raises ConfigError for a roster that cannot be read."""
        return cls(exchange, server.Coordinator(run, settings_of(config), read_roster(config.roster)), claim)

    def ready(self, questions: Questions) -> dict[str, str]:
        """Gets every connected site its keys. Returns why others have none."""
        coordinator = self.coordinator
        expelled = {site: why for site, why in coordinator.expelled.items() if site in questions.nodes}
        known = coordinator.members.keys() | expelled.keys()
        hello = dict.fromkeys((site for site in questions.nodes if site not in known), coordinator.hello())
        failed = expelled | questions.ask(hello, lambda site, data: coordinator.admit(site, Member.of(data)))
        try:
            setup = coordinator.settle_on(questions.nodes)
        except QuorumError as error:
            return failed | {site: str(error) for site in questions.nodes if site not in failed}
        lacking = dict.fromkeys((s for s in setup.membership.by_name if s not in coordinator.bundles), setup)
        failed |= questions.ask(lacking, lambda site, data: coordinator.keep(site, Bundle.of(data)))
        for site in failed:
            coordinator.forget(site)
        return failed

    def questions(
        self, grid: Grid, nodes: Mapping[str, int], address: Address, round_: int, config: ConfigRecord
    ) -> Questions:
        """Questions to these sites in one attempt."""
        order: Callable[[RoundContext], ConfigRecord] = lambda ctx: order_of(self.exchange, address.run, ctx, SECONDS)  # noqa: E731
        return Questions(grid, nodes, order, round_, address, config)

    def begin(self, clear: Attempt, questions: Questions) -> Attempt:
        """The same attempt, whose uploads nobody sees. All of its sites have prekeys. One without a cohort is over."""
        if not clear.record.cohort:
            questions.count(clear.record)
            return clear
        found = self.coordinator.attempt(clear.record.round, clear.record.attempt, clear.record.cohort)
        summed = Summed.of(self.exchange, clear.record.round, found.plan.bits, self.claim)
        own = {f.name: getattr(clear, f.name) for f in fields(Attempt)}
        return UnseenAttempt(**own, questions=questions, found=found, summed=summed)

    def settled(
        self, attempt: UnseenAttempt, uploads: Iterable[Upload], quorum: int, server: State, ctx: RoundContext
    ) -> State | None:
        """The next state from an attempt's uploads, which are added up as they come; None if there is no such sum.

        Below the quorum nobody is asked to open one.
        """
        for _ in uploads:
            continue
        try:
            if len(attempt.found.uploads) < quorum:
                raise QuorumError(f"expected at least {quorum} uploads, found {len(attempt.found.uploads)}")
            return self.exchange.method.settle(server, self._opened(attempt), ctx)
        except (QuorumError, WireError) as error:
            attempt.record.unseen["reason"] = shown(str(error), REASON_CHARACTERS)
            log(WARNING, "round %s: no sum: %s", ctx.round + 1, attempt.record.unseen["reason"])
            for site in attempt.found.faulty:
                self.coordinator.expel(site)
            return None
        finally:
            attempt.questions.count(attempt.record)
            for site in attempt.record.failed:  # it may have lost its keys
                self.coordinator.forget(site)

    def _opened(self, attempt: UnseenAttempt) -> RingSums:
        found, record, questions = attempt.found, attempt.record, attempt.questions
        membership = found.membership
        record.unseen |= {"sites": len(found.uploads), "holders": membership.count, "threshold": membership.threshold}
        asked = found.questions()
        take: Callable[[str, bytes], None] = lambda site, data: found.answer(site, Opened.of(data))  # noqa: E731
        record.unseen["deaf"] = questions.ask(asked, take, lambda: not found.wanting)
        for site, attached in found.uploads.items():
            try:
                if attached.next is not None:
                    self.coordinator.keep(site, attached.next)
            except WireError as error:  # it is asked for another one before the next attempt
                log(WARNING, "round %s: %s: its next prekey: %s", record.round + 1, site, error)
        clear = {site: attempt.words.get(site, {}) for site in found.uploads}
        sums = RingSums(attempt.summed.slots, attempt.summed.ring(found.plan), found.total(), clear)
        sums.check(attempt.limits.max_norm)
        return sums


def read_roster(path: str) -> dict[str, str]:
    """All sites' signing keys by name, from the file that `fedveil members roster` writes; {} for "".

    Raises:
        ConfigError: it cannot be read.
    """
    if not path:
        return {}
    try:
        return dict(Roster.of(Path(path).expanduser().read_bytes()).signing_keys)
    except (OSError, WireError) as error:
        raise ConfigError(
            f"secure.roster: expected a file that fedveil members roster has written, found none at {path} ({error})"
        ) from None
