"""The server's side of a run: its state, and how a round changes it.

A round draws a cohort and adds up the uploads. It counts only with a quorum; below that it is repeated with a new
cohort. The state changes whole or not at all, and every change is followed by a checkpoint to resume from.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from logging import INFO, WARNING

import torch
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedveil import rng
from fedveil.algebra.krum import KrumSums
from fedveil.config import parse
from fedveil.contract.address import Address
from fedveil.contract.method import Method, RoundContext, State, Upload
from fedveil.contract.spec import Spec, Weights, spec_of
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation import cohort as cohorts
from fedveil.federation import rules, shares
from fedveil.federation.exchange import Exchange
from fedveil.privacy.claims import claim_of
from fedveil.records.state import digest
from fedveil.server_app import fingerprint, sites
from fedveil.server_app.attempt import Attempt
from fedveil.server_app.ending import Course
from fedveil.server_app.evaluate import Scores
from fedveil.server_app.record import RoundRecord, RunFolder
from fedveil.server_app.settings import RunSettings
from fedveil.server_app.unseen import Unseen, UnseenAttempt
from fedveil.wire import parked

_BACK_OFF_SECONDS = 2.0


class Rounds:
    """One run's rounds. Takes the arguments of `MethodStrategy`.

    Attributes:
        history: every attempt at a round, in order.
        course: the rounds that counted, and which of them is best.
    """

    def __init__(
        self,
        method: Method,
        settings: RunSettings,
        folder: RunFolder | None,
        scores: Callable[[State, int], Scores] | None,
        spec: Spec | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._device = device if method.on_device else None
        self.method, self.settings, self.folder, self.scores = method, settings, folder, scores
        # Sites keep private state under this name, so no other run may have it.
        self.run_name = f"{settings.name}-{folder.id if folder else secrets.token_hex(4)}"
        self.tap = folder.tap() if folder and settings.tap else None
        self.history: list[RoundRecord] = []
        self.course = Course(settings.choice, folder.folder if folder else None)
        self._spec = spec
        self._server: State | None = None
        self._exchange: Exchange | None = None
        self._unseen: Unseen | None = None
        self._participated: set[str] = set()
        self._last: dict[str, str] = {}  # by site: the turn of its last upload that is in the state
        self._secret = rng.secret("server", settings.seed, settings.deterministic)

    @property
    def quorum(self) -> int:
        """The accepted uploads that a round needs."""
        secure, least = self.settings.secure, self.settings.cohort.min_sites
        return max(least, secure.min_sites) if secure.enabled else least

    def initialise(self, weights: Mapping[str, Tensor]) -> None:
        """Makes the state before round 0."""
        spec = self._spec or spec_of(weights)
        self._server = self.method.init(spec, weights, rng.initial(self.settings.seed, "method init"))
        self._exchange = Exchange(
            self.method, self.settings.method or type(self.method).__module__.rpartition(".")[2], spec
        )
        self.settings.check(self._exchange)
        if self.settings.secure.enabled:
            claim = claim_of(self.method, parse(self.settings.config))
            self._unseen = Unseen.of(self._exchange, self.settings.secure, self.run_name, claim)

    def resume(self) -> int:
        """Loads the folder's checkpoint, or writes that before round 0. Returns the next round.

        Raises:
            ConfigError: the checkpoint is of a run with other terms (fingerprint.py).
            StateError: no checkpoint can be read.
        """
        if self.folder is None or not self.folder.resumed:
            self._checkpoint(-1)
            return 0
        server, loop = self.folder.load_checkpoint()
        changes = fingerprint.changes(loop["terms"], self._terms)
        self._server, round_ = server, int(loop["round"]) + 1
        self.course.resume(loop)
        self._park()
        self.folder.resume(round_, changes)
        self._participated, self._last = set(loop["participated"]), dict(loop["turns"])
        self._secret = bytes.fromhex(loop["secret"])
        return round_

    @cached_property
    def _terms(self) -> fingerprint.Terms:
        return fingerprint.of(self._begun, self.settings)

    @property
    def _begun(self) -> Exchange:
        """The method on its spec. Raises ConfigError before `initialise`."""
        if self._exchange is None:
            raise ConfigError("initial_arrays: expected before the first round, found none; call start() first")
        return self._exchange

    @property
    def server(self) -> State:
        """The server's state. Raises ConfigError before `initialise`."""
        if self._server is None:
            raise ConfigError("initial_arrays: expected before the first round, found none; call start() first")
        return self._server

    def deployed(self) -> Weights:
        """The model that the server holds now."""
        return self.method.deployed(self.server)["server"]

    def score_initial(self) -> None:
        """Scores the model before round 0 and records the scores in the folder."""
        if self.scores and self.folder and not self.folder.is_scored(-1):
            self.folder.scores(-1, self.scores(self.server, -1))

    def run_round(self, grid: Grid, round_: int, rounds: int, deadline: float, config: ConfigRecord) -> RoundRecord:
        """One round of our own loop. Raises QuorumError if every attempt stays below the quorum."""
        if self.folder:
            self.folder.status("running", round_, rounds, **self.course.about)
        cohort = self.settings.cohort
        before: RoundRecord | None = None
        for number in range(cohort.repeats + 1):
            if number:
                time.sleep(min(_BACK_OFF_SECONDS * 2 ** (number - 1), cohort.wait_seconds))
            sites.await_quorum(grid, round_, self.quorum, cohort, before, self.folder)
            started = time.monotonic()
            attempt, messages, contexts = self.begin(grid, round_, number, deadline, config)
            pending = dict(zip(grid.push_messages(messages), contexts, strict=True))
            del messages
            if self.finish(attempt, attempt.streamed(grid, pending, deadline, self.settings.deterministic), started):
                return attempt.record
            before = attempt.record
        raise QuorumError(
            f"round {round_ + 1}: expected at least {self.quorum} accepted uploads, found "
            f"{len(before.accepted) if before else 0} in the last of {cohort.repeats + 1} attempts "
            f"({before.reasons if before else 'none'}); {sites.remedy(before)}"
        )

    def begin(
        self, grid: Grid, round_: int, number: int, deadline: float, config: ConfigRecord
    ) -> tuple[Attempt, list[Message], list[RoundContext]]:
        """Draws a cohort of the connected sites. Returns the attempt, and a message and a context for each site.

        Raises:
            QuorumError: a cohort has too few sites for the rule, and stays so for cohort.wait-seconds.
        """
        rule, cohort = self.settings.aggregate, self.settings.cohort
        least = rules.fewest_sites(rule, cohort.fraction)
        nodes = sites.wait_for(grid, least, cohort.wait_seconds, "aggregate.hostile and aggregate.best")
        address, failed, questions = Address(self.run_name, number), dict[str, str](), None
        if self._unseen:
            questions = self._unseen.questions(grid, nodes, address, round_, config)
            failed = self._unseen.ready(questions)
            nodes = {site: node for site, node in nodes.items() if site not in failed}
        chosen = cohorts.draw(nodes, cohort.fraction, self._secret, round_, number) if len(nodes) >= self.quorum else []
        contexts = [
            RoundContext(
                round_, site, site not in self._participated, self._secret, self.settings.deterministic,
                replace(address, site=site), device=self._device,
            )
            for site in chosen
        ]  # fmt: skip
        record = RoundRecord(round_, number, chosen, failed=failed)
        attempt = Attempt(
            self._begun, self.server, record, self.settings.limits, self.run_name, self.folder, self.tap, self._last,
            cohort.norm_factor,
        )  # fmt: skip
        if self._unseen and questions:
            attempt = self._unseen.begin(attempt, questions)
        messages = attempt.messages(contexts, nodes, deadline, config)
        parked.leave(self.server.tensors)
        return attempt, messages, contexts

    def finish(self, attempt: Attempt, uploads: Iterator[Upload], started: float) -> bool:
        """Adds up the uploads; with a quorum the result becomes the new state. Returns whether there was a quorum."""
        record = attempt.record
        if self._unseen and isinstance(attempt, UnseenAttempt):
            ctx = RoundContext(record.round, "", False, self._secret, self.settings.deterministic)
            new_state = self._unseen.settled(attempt, uploads, self.quorum, self.server, ctx)
        else:
            new_state = self._added(attempt, uploads)
        record.seconds = round(time.monotonic() - started, 3)
        enough = new_state is not None and len(record.accepted) >= self.quorum
        if new_state is not None and enough:
            self._server = new_state
            # A site that failed may have lost its state, so next time it gets everything, as a newcomer does.
            self._participated = (self._participated | set(record.accepted)) - set(record.failed)
            self._last = self._last | {site: attempt.turns[site] for site in record.accepted}
            record.weights = digest(self.deployed())
            record.scores = self.scores(new_state, record.round) if self.scores else {}
            self.course.scored(record.round, record.scores)
        self.history.append(record)
        level, verdict = (INFO, "done") if enough else (WARNING, f"below the quorum of {self.quorum}")
        log(level, "round %s %s: accepted %s, failed %s", record.round + 1, verdict, record.accepted, record.failed)
        if self.folder:
            self.folder.round(record)
            if enough:
                self._checkpoint(record.round)
        return enough

    def _added(self, attempt: Attempt, uploads: Iterator[Upload]) -> State:
        """The next state from uploads in the clear; the same with too few of them."""
        record, cohort, sums = attempt.record, self.settings.cohort, rules.sums_of(self.settings.aggregate)
        if cohort.norm_factor:
            uploads = attempt.within(uploads)
        uploads = shares.bounded(uploads, cohort.max_share, record.cut.__setitem__)
        new_state = self._begun.aggregate(self.server, uploads, lambda: sums, cohort.min_sites)
        if record.cut:
            log(WARNING, "round %s: cohort.max-share cut the examples that count: %s", record.round + 1, record.cut)
        if isinstance(sums, KrumSums) and len(record.accepted) >= cohort.min_sites:
            record.left_out = sorted(set(record.accepted) - set(sums.chosen))
        return new_state

    def _checkpoint(self, round_: int) -> None:
        """Keeps on disk what the next round starts from, if there is a folder."""
        if self.folder:
            loop = {"participated": sorted(self._participated), "turns": self._last, "secret": self._secret.hex()}
            about = {"round": round_, "terms": self._terms, **self.course.saved()}
            self.folder.checkpoint(self.server, about | loop)
            self.course.keep()
            self._park()

    def end(self, rounds: int) -> None:
        """Makes the state that which the run ends with, and scores it, if no round's scores are its last ones.

        Raises:
            StateError: the best round's state cannot be read.
        """
        if (best := self.course.replaced()) is not None:
            self._server = best
            self._park()
        if self.scores and self.course.is_unscored(rounds):
            self.course.final = self.scores(self.server, rounds - 1)

    def _park(self) -> None:
        """Until the next round ends, the state is only read, a tensor at a time: it needs no memory for that."""
        if self.folder:
            self._server = State(parked.weights(self.server.tensors, self.folder.folder), self.server.scalars)
