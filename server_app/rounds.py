"""The server side of a run: its state, and how a round changes the state.

A round draws a cohort and adds up the uploads. It counts only with a quorum; otherwise it is retried with a new
cohort. The state changes completely or not at all, and every change is followed by a checkpoint to resume from.

With `cohort.buffer-size`, a round is one server step, and sites go on training while it is taken
(buffered_attempt.py). A checkpoint then holds no uploads: each one is either in the state, or lost by a restart.

An attempt at a round returns an `AttemptResult` (round_attempt.py). Only this loop records it: in the state, the
history, the run folder and its metrics.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedveil import rng
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, Method, RoundContext, hyperparameters_of
from fedveil.contract.param_spec import Spec, Weights, param_specs_of
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.plan import config_digest
from fedveil.federation.update_buffer import BufferedExchange, SitesInFlight
from fedveil.ops.server_optimizer import ServerOptimizer
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.records.tensor_state import state_digest
from fedveil.server_app import connected_sites, run_fingerprint
from fedveil.server_app.buffered_attempt import BufferedAttempt
from fedveil.server_app.completion import BestRoundTracker
from fedveil.server_app.evaluation import Scores
from fedveil.server_app.known_sites import KnownSitesStore
from fedveil.server_app.message_recorder import RunMessageRecorder
from fedveil.server_app.message_signing import MessageSigner
from fedveil.server_app.pending_sum import PendingSum, PendingSumStore
from fedveil.server_app.reception import Reception
from fedveil.server_app.round_attempt import AttemptResult, AttemptTally, RoundAttempt
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.server_app.secure_round import ServerSecAgg
from fedveil.wire import mmap_tensors

_BACK_OFF_SECONDS = 2.0


class RoundLoop:
    """The rounds of one run. Takes the arguments of `MethodStrategy`.

    Attributes:
        history: every attempt at a round, in order.
        course: the rounds that counted, and the best of them.
    """

    def __init__(
        self,
        method: Method,
        settings: RunSettings,
        folder: RunFolder | None,
        scores: Callable[[FederatedState, int], Scores] | None,
        spec: Spec | None = None,
        device: torch.device | None = None,
        signer: MessageSigner | None = None,
        app: str = "",
    ) -> None:
        self._signer, self._app = signer, app
        self._device = device if method.on_device else None
        self.method, self.settings, self.folder, self.scores = method, settings, folder, scores
        # Sites store private state under this name, so no other run may use it.
        self.run_name = f"{settings.name}-{folder.id if folder else secrets.token_hex(4)}"
        self._pending = PendingSumStore(folder.folder) if folder else None
        self._known = KnownSitesStore(folder.folder) if folder else None
        self._capture = folder.tap() if folder and settings.tap else None
        self.history: list[RoundRecord] = []
        self.course = BestRoundTracker(settings.choice, folder.folder if folder else None)
        self._spec = spec
        self._server: FederatedState | None = None
        self._exchange: MessageExchange | None = None
        self._unseen: ServerSecAgg | None = None
        self._participated: set[str] = set()
        self._out: dict[str, str] = {}  # by site: why the site is no longer asked; a resume asks it again
        self._lost = 0  # number of consecutive lost rounds
        self._last: dict[str, str] = {}  # by site: the client round of its last upload in the state
        self._secret = rng.derive_secret("server", settings.seed, settings.deterministic)
        cohort = settings.cohort
        self._flight = SitesInFlight(cohort.max_staleness) if cohort.buffer_size else None
        self._expires: dict[str, float] = {}  # by site in flight: when its request ends
        self._reception: Reception | None = None  # with a buffer, one for all attempts
        self._attempt = (0, 0)  # round and number, for audit lines about dropped messages

    def initialise(self, weights: Mapping[str, Tensor]) -> None:
        """Create the state before round 0."""
        spec = self._spec or param_specs_of(weights)
        self._server = self.method.init(spec, weights, rng.initial_stream(self.settings.seed, "method init"))
        self._exchange = MessageExchange(
            self.method, self.settings.method or type(self.method).__module__.rpartition(".")[2], spec,
            ServerOptimizer.from_config(self.settings.server),
        )  # fmt: skip
        self.settings.check(self._exchange)
        if self.settings.secure.enabled:
            config = parse(self.settings.config)
            digest = config_digest(config.flat(), self._exchange.name, json.dumps(hyperparameters_of(self.method)))
            claim, secure = guarantee_of(self.method, config), self.settings.secure
            self._unseen = ServerSecAgg.from_config(self._exchange, secure, self.run_name, claim, digest, self._app)

    def resume(self) -> int:
        """Load the folder's checkpoint, or write the one before round 0. Return the next round.

        Raises:
            ConfigError: the checkpoint belongs to a run with different settings (run_fingerprint.py).
            StateError: no checkpoint can be read.
        """
        if self.folder is None or not self.folder.resumed:
            self._checkpoint(-1)
            if self.folder is not None and self.folder.restarted:
                self.folder.resume(0, {})
            return 0
        server, loop = self.folder.load_checkpoint()
        changes = run_fingerprint.changed_terms(loop["terms"], self._terms)
        self._server, round_ = server, int(loop["round"]) + 1
        self.course.resume(loop)
        self._park()
        if lost := loop.get("in_flight"):
            self.folder.notes["in-flight"] = lost
            log(WARNING, "the restart discarded what these sites were training, by round from 0: %s", lost)
        if self._unseen and self._known:
            self._known.load(self._unseen.coordinator)
        self.folder.resume(round_, changes)
        self._participated, self._last = set(loop["participated"]), dict(loop["turns"])
        self._secret = bytes.fromhex(loop["secret"])
        return round_

    @cached_property
    def _terms(self) -> run_fingerprint.Terms:
        return run_fingerprint.run_terms(self._begun, self.settings)

    @property
    def _begun(self) -> MessageExchange:
        """Return the method with its layout. Raises ConfigError before `initialise`."""
        if self._exchange is None:
            raise ConfigError("initial_arrays: they are not set before the first round; call start() first")
        return self._exchange

    @property
    def server(self) -> FederatedState:
        """Return the server's state. Raises ConfigError before `initialise`."""
        if self._server is None:
            raise ConfigError("initial_arrays: they are not set before the first round; call start() first")
        return self._server

    def models(self) -> Weights:
        """Return the server's current models."""
        return self.method.models(self.server)["server"]

    def score_initial(self) -> None:
        """Score the model before round 0 and record the scores in the folder."""
        if self.scores and self.folder and not self.folder.is_scored(-1):
            self.folder.scores(-1, self.scores(self.server, -1))

    def run_round(self, grid: Grid, round_: int, rounds: int, deadline: float, config: ConfigRecord) -> RoundRecord:
        """Run one round of this loop. A lost round (secure_round.py) leaves the state as it was.

        Raises:
            QuorumError: every attempt stayed below the quorum, or too many consecutive rounds were lost.
        """
        if self.folder:
            self.folder.status("running", round_, rounds, **self.course.about)
        cohort, quorum = self.settings.cohort, self.settings.quorum
        before: RoundRecord | None = None
        if (pending := self._pending.load(round_) if self._pending else None) is not None:
            return self._settle_pending(pending, grid, round_, config)
        for number in range(cohort.max_retries + 1):
            if number:
                time.sleep(min(_BACK_OFF_SECONDS * 2 ** (number - 1), cohort.wait_seconds))
            connected_sites.await_quorum(grid, round_, quorum, cohort, before, self.folder, self._out)
            started = time.monotonic()
            reception = self.open_reception(grid, round_, number)
            attempt, messages = self.open_attempt(grid, round_, number, deadline, config, reception)
            sites = [ctx.client for ctx in attempt.asked]
            reception.ask(dict(zip(sites, messages, strict=True)), attempt.largest_upload)
            del messages
            # The result goes directly into the record, so its state is not in memory during the next attempt.
            result = attempt.run(attempt.iter_uploads(reception, deadline))
            is_over = self._conclude(result, started)
            del result
            if self._flight is None:
                reception.close()
            before = self.history[-1]
            if is_over:
                return before
        raise QuorumError(
            f"round {round_ + 1}: at least {quorum} uploads must be accepted, but the last of "
            f"{cohort.max_retries + 1} attempts had only {len(before.accepted) if before else 0} "
            f"({before.reasons if before else 'none'}); {connected_sites.suggest_remedy(before, self._out)}"
        )

    def _settle_pending(self, pending: PendingSum, grid: Grid, round_: int, config: ConfigRecord) -> RoundRecord:
        """Reveal the sum whose list was closed before the server restart. Raises QuorumError like `run_round`."""
        started, plan = time.monotonic(), pending.unmasking.plan
        log(INFO, "round %s: unmasking the sum whose list was closed before the restart", round_ + 1)
        connected_sites.await_quorum(grid, round_, plan.quorum, self.settings.cohort, None, self.folder, self._out)
        reception, address = (
            self.open_reception(grid, round_, plan.attempt),
            MessageAddress(self.run_name, plan.attempt),
        )
        server_ctx = RoundContext(round_, "", False, self._secret, self.settings.deterministic, in_secure_sum=True)
        contexts = [replace(server_ctx, client=site, address=replace(address, site=site)) for site in plan.cohort]
        clear = RoundAttempt(
            self._begun, self.server, self.settings, address, round_, contexts,
            RunMessageRecorder(self.folder, None, plan.cohort), last=self._last,
        )  # fmt: skip
        assert self._unseen is not None  # a pending sum belongs to a secure run, as the checkpoint's settings guarantee
        requests = self._unseen.open_requests(reception, connected_sites.connected_sites(grid), address, round_, config)
        attempt = self._unseen.resume(pending, clear, requests, server_ctx)
        is_over = self._conclude(attempt.run(iter(())), started)
        reception.close()
        assert is_over  # the list is closed, so the round counts or is lost
        return self.history[-1]

    def _conclude(self, result: AttemptResult, started: float) -> bool:
        """Record an attempt. Return whether its round is over: it counts, or is lost. Raises QuorumError."""
        self._keep_known_sites()
        self._leave_out(connected_sites.sites_out(result.record))
        if self.record_attempt(result, started):
            self._lost = 0
        elif result.is_lost:
            self._lose_round(self.history[-1])
        else:
            return False
        if self._pending:
            self._pending.remove()
        return True

    def _leave_out(self, out: Mapping[str, str]) -> None:
        """Stop asking these sites in this run, and record it: each further attempt would charge the other sites too."""
        for site, why in out.items():
            if site not in self._out and self.folder:
                self.folder.audit("left-out", {"site": site, "reason": why})
            self._out[site] = why

    def _keep_known_sites(self) -> None:
        if self._unseen and self._known:
            self._known.save(self._unseen.coordinator)

    def _lose_round(self, record: RoundRecord) -> None:
        """Continue with the old state: the sites that agreed to a sum in this round would refuse another attempt.

        Raises:
            QuorumError: too many consecutive rounds were lost.
        """
        self._lost += 1
        self._checkpoint(record.round)
        if self._lost > self.settings.cohort.max_retries:
            raise QuorumError(
                f"round {record.round + 1}: it is lost, like the {self._lost - 1} before it "
                f"({record.reasons}); {connected_sites.suggest_remedy(record, self._out)}"
            )

    def open_reception(self, grid: Grid, round_: int, number: int) -> Reception:
        """Return the reception for one attempt, before any site is asked; with a buffer, the run's only one."""
        self._attempt = round_, number
        if self._reception is not None:
            return self._reception

        def note_dropped(about: Mapping[str, Any]) -> None:
            if self.folder:
                at = dict(zip(("round", "attempt"), self._attempt, strict=True))
                self.folder.audit("dropped", {**at, **about})

        folder = self.folder.folder if self.folder else None
        reception = Reception.from_grid(grid, folder, note_dropped, self._signer)
        if self._flight is not None:
            self._reception = reception
        return reception

    def open_attempt(
        self,
        grid: Grid,
        round_: int,
        number: int,
        deadline: float,
        config: ConfigRecord,
        reception: Reception | None = None,
    ) -> tuple[RoundAttempt, list[Message]]:
        """Draw a cohort from the connected sites. Return the attempt, and a message for each of its contexts.

        With secure aggregation, `reception` asks the sites for their keys.

        Raises:
            QuorumError: there were too few sites for the rule throughout cohort.wait-seconds.
        """
        settings, cohort, secagg = self.settings, self.settings.cohort, self._unseen
        least = aggregation_rules.fewest_sites(settings.aggregate, cohort.fraction)
        nodes = connected_sites.wait_for(
            grid, least, cohort.wait_seconds, "aggregate.num-byzantine and aggregate.num-selected", self._out
        )
        address, tally, requests = MessageAddress(self.run_name, number), AttemptTally(), None
        if secagg and reception:
            requests = secagg.open_requests(reception, nodes, address, round_, config)
            tally.failed |= secagg.distribute_keys(requests)
            self._keep_known_sites()
            nodes = {site: node for site, node in nodes.items() if site not in tally.failed}
            if secagg.is_lost(requests, settings.quorum):
                tally.unseen |= {"lost": True, "reason": "its sites agreed to a sum before the server restart"}
                nodes = {}
        chosen = (
            aggregation_rules.draw_cohort(nodes, cohort.fraction, self._secret, round_, number)
            if len(nodes) >= settings.quorum
            else []
        )
        if secagg and chosen:
            try:
                secagg.check_cohort(len(chosen))
            except QuorumError as error:
                tally.failed |= dict.fromkeys(chosen, str(error))
                chosen = []
        if self._flight is not None:
            chosen = [site for site in nodes if site not in self._flight.contexts]
        server_ctx = RoundContext(round_, "", False, self._secret, settings.deterministic)
        if secagg:
            server_ctx = replace(server_ctx, in_secure_sum=True)
            server_ctx = replace(server_ctx, entries=secagg.plan_entries(chosen, server_ctx))
        contexts = [
            replace(
                server_ctx, client=site, is_new=site not in self._participated, address=replace(address, site=site),
                device=self._device,
            )
            for site in chosen
        ]  # fmt: skip
        if self._flight is not None:
            attempt: RoundAttempt = self._buffered_attempt(self._flight, address, round_, contexts)
        else:
            attempt = RoundAttempt(
                self._begun, self.server, settings, address, round_, contexts,
                RunMessageRecorder(self.folder, self._capture, chosen), self.folder.folder if self.folder else None,
                self._last, tally=tally,
            )  # fmt: skip
        if secagg and requests:
            attempt = secagg.mask(attempt, requests, server_ctx, self._pending)
        messages = attempt.build_messages(nodes, deadline, config)
        mmap_tensors.evict(self.server.tensors)
        return attempt, messages

    def _buffered_attempt(
        self, flight: SitesInFlight, address: MessageAddress, round_: int, asked: list[RoundContext]
    ) -> BufferedAttempt:
        """Return an attempt at a server step that asks these sites, besides those that are still training."""
        flight.begin(round_, self.server)
        for ctx in asked:
            flight.ask(ctx)
        exchange = BufferedExchange.from_exchange(self._begun, round_, flight.states)
        recorder = RunMessageRecorder(self.folder, self._capture, sorted(flight.contexts), round_, address.attempt)
        return BufferedAttempt(
            exchange, self.server, self.settings, address, round_, list(flight.contexts.values()), recorder,
            self.folder.folder if self.folder else None, self._last, flight=flight, expires=self._expires,
            newly_asked=asked,
        )  # fmt: skip

    def record_attempt(self, result: AttemptResult, started: float) -> bool:
        """Record an attempt. With a quorum, its state becomes the server's state. Return whether the round counts."""
        record = replace(result.record, seconds=round(time.monotonic() - started, 3))
        if is_counted := result.state is not None:
            self._server = result.state
            # A site that failed may have lost its state, so next time it gets everything, like a new site.
            self._participated = (self._participated | set(record.accepted)) - set(record.failed)
            self._last = self._last | dict(result.turns)
            scores = self.scores(result.state, record.round) if self.scores else {}
            record = replace(record, weights=state_digest(self.models()), scores=scores)
            self.course.scored_by_sites(record.reports)
            self.course.scored(record.round, record.scores)
        self.history.append(record)
        below = "lost" if result.is_lost else f"below the quorum of {self.settings.quorum}"
        level, verdict = (INFO, "done") if is_counted else (WARNING, below)
        log(level, "round %s %s: accepted %s, failed %s", record.round + 1, verdict, record.accepted, record.failed)
        if self.folder:
            self.folder.round(record)
            if is_counted:
                self._checkpoint(record.round)
        return is_counted

    def _checkpoint(self, round_: int) -> None:
        """Store the start of the next round on disk, if there is a folder."""
        if self.folder:
            in_flight = {"in_flight": self._flight.rounds} if self._flight is not None else {}
            loop = {"participated": sorted(self._participated), "turns": self._last, "secret": self._secret.hex()}
            about = {"round": round_, "terms": self._terms, **self.course.saved()}
            self.folder.checkpoint(self.server, about | loop | in_flight)
            self.course.keep()
            self._park()

    def end(self, rounds: int) -> None:
        """Set the run's final state, and score it unless a round's scores are already the final ones.

        With a buffer, the requests of the sites that are still training end.

        Raises:
            StateError: the best round's state cannot be read.
        """
        if self._reception is not None and self._flight is not None:
            if self.folder and self._flight.contexts:
                self.folder.audit("unanswered", {"sites": self._flight.rounds})
            self._reception.close()
            self._reception = None
            self._flight.contexts.clear()
        if (best := self.course.replaced()) is not None:
            self._server = best
            self._park()
        if self.scores and self.course.is_unscored(rounds):
            self.course.final = self.scores(self.server, rounds - 1)

    def _park(self) -> None:
        """Move the state out of memory: until the next round ends, it is only read, one tensor at a time."""
        if self.folder:
            tensors = mmap_tensors.mmap_weights(self.server.tensors, self.folder.folder)
            moments = mmap_tensors.mmap_weights(self.server.moments, self.folder.folder)
            self._server = FederatedState(tensors, self.server.scalars, moments)
