"""The server's side of a run: its state, and how a round changes it.

A round draws a cohort and adds up the uploads. It counts only with a quorum; below that it is repeated with a new
cohort. The state changes whole or not at all, and every change is followed by a checkpoint to resume from.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedveil import rng
from fedveil.algebra.robust import sums_of
from fedveil.contract.address import Address
from fedveil.contract.method import Method, RoundContext, State, Upload
from fedveil.contract.spec import Spec, Weights, spec_of
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation import cohort as cohorts
from fedveil.federation import shares
from fedveil.federation.exchange import Exchange
from fedveil.records.state import digest
from fedveil.server_app import sites
from fedveil.server_app.attempt import Attempt
from fedveil.server_app.record import RoundRecord, RunFolder
from fedveil.server_app.settings import RunSettings
from fedveil.wire import parked

Scores = dict[str, dict[str, float]]


class Rounds:
    """One run's rounds. Takes the arguments of `MethodStrategy`.

    Attributes:
        history: every attempt at a round, in order.
    """

    def __init__(
        self,
        method: Method,
        settings: RunSettings,
        folder: RunFolder | None,
        scores: Callable[[State, int], Scores] | None,
        spec: Spec | None = None,
    ) -> None:
        self.method, self.settings, self.folder, self.scores = method, settings, folder, scores
        # Sites keep private state under this name, so no other run may have it.
        self.run_name = f"{settings.name}-{folder.id if folder else secrets.token_hex(4)}"
        self.tap = folder.tap() if folder and settings.tap else None
        self.history: list[RoundRecord] = []
        self._spec = spec
        self._server: State | None = None
        self._exchange: Exchange | None = None
        self._participated: set[str] = set()
        self._last: dict[str, str] = {}  # by site: the turn of its last upload that is in the state
        self._secret = rng.secret("server", settings.seed, settings.deterministic)

    def initialise(self, weights: Mapping[str, Tensor]) -> None:
        """Makes the state before round 0."""
        spec = self._spec or spec_of(weights)
        self._server = self.method.init(spec, weights, rng.initial(self.settings.seed, "method init"))
        self._exchange = Exchange(
            self.method, self.settings.method or type(self.method).__module__.rpartition(".")[2], spec
        )

    def resume(self) -> int:
        """Loads the folder's checkpoint, or writes that before round 0. Returns the next round."""
        if self.folder is None or not self.folder.resumed:
            self._checkpoint(-1)
            return 0
        self._server, loop = self.folder.load_checkpoint()
        self._park()
        self._participated, self._last = set(loop["participated"]), dict(loop["turns"])
        self._secret = bytes.fromhex(loop["secret"])
        return int(loop["round"]) + 1

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
        if self.scores and self.folder:
            self.folder.scores(-1, self.scores(self.server, -1))

    def run_round(self, grid: Grid, round_: int, rounds: int, deadline: float, config: ConfigRecord) -> RoundRecord:
        """One round of our own loop. Raises QuorumError if every attempt stays below the quorum."""
        if self.folder:
            self.folder.status("running", round_, rounds)
        for number in range(self.settings.cohort.repeats + 1):
            started = time.monotonic()
            attempt, messages, contexts = self.begin(grid, round_, number, deadline, config)
            pending = dict(zip(grid.push_messages(messages), contexts, strict=True))
            del messages
            if self.finish(attempt, attempt.streamed(grid, pending, deadline, self.settings.deterministic), started):
                return attempt.record
        failed = attempt.record.failed
        reasons = "; ".join(f"{site}: {reason}" for site, reason in failed.items()) or "no site connected"
        raise QuorumError(
            f"round {round_}: expected at least {self.settings.cohort.min_sites} accepted uploads, found "
            f"{len(attempt.record.accepted)} in the last of {self.settings.cohort.repeats + 1} attempts ({reasons}); "
            "see the sites' logs or lower cohort.min-sites"
        )

    def begin(
        self, grid: Grid, round_: int, number: int, deadline: float, config: ConfigRecord
    ) -> tuple[Attempt, list[Message], list[RoundContext]]:
        """Draws a cohort of the connected sites. Returns the attempt, and a message and a context for each site."""
        nodes = sites.connected(grid)
        chosen = cohorts.draw(nodes, self.settings.cohort.fraction, self._secret, round_, number)
        contexts = [
            RoundContext(
                round_, site, site not in self._participated, self._secret, self.settings.deterministic,
                Address(self.run_name, number, site),
            )
            for site in chosen
        ]  # fmt: skip
        record = RoundRecord(round_, number, chosen)
        attempt = Attempt(
            self._begun, self.server, record, self.settings.limits, self.run_name, self.folder, self.tap, self._last
        )
        messages = attempt.messages(contexts, nodes, deadline, config)
        parked.leave(self.server.tensors)
        return attempt, messages, contexts

    def finish(self, attempt: Attempt, uploads: Iterator[Upload], started: float) -> bool:
        """Adds up the uploads; with a quorum the result becomes the new state. Returns whether there was a quorum."""
        record = attempt.record
        rule, cohort = self.settings.aggregate, self.settings.cohort
        if cohort.norm_factor:
            uploads = attempt.within(uploads, cohort.norm_factor)
        uploads = shares.bounded(uploads, cohort.max_share, record.cut.__setitem__)
        new_state = self._begun.aggregate(self.server, uploads, lambda: sums_of(rule.rule, rule.trim))
        if record.cut:
            log(WARNING, "round %s: cohort.max-share cut the examples that count: %s", record.round, record.cut)
        record.seconds = round(time.monotonic() - started, 3)
        enough = len(record.accepted) >= self.settings.cohort.min_sites
        if enough:
            self._server = new_state
            # A site that failed may have lost its state, so next time it gets everything, as a newcomer does.
            self._participated = (self._participated | set(record.accepted)) - set(record.failed)
            self._last = self._last | {site: attempt.turns[site] for site in record.accepted}
            record.weights = digest(self.deployed())
            record.scores = self.scores(new_state, record.round) if self.scores else {}
        self.history.append(record)
        level, verdict = (
            (INFO, "done") if enough else (WARNING, f"below the quorum of {self.settings.cohort.min_sites}")
        )
        log(level, "round %s %s: accepted %s, failed %s", record.round, verdict, record.accepted, record.failed)
        if self.folder:
            self.folder.round(record)
            if enough:
                self._checkpoint(record.round)
        return enough

    def _checkpoint(self, round_: int) -> None:
        """Keeps on disk what the next round starts from, if there is a folder."""
        if self.folder:
            loop = {"participated": sorted(self._participated), "turns": self._last, "secret": self._secret.hex()}
            self.folder.checkpoint(self.server, {"round": round_, **loop})
            self._park()

    def _park(self) -> None:
        """Until the next round ends, the state is only read, a tensor at a time: it needs no memory for that."""
        if self.folder:
            self._server = State(parked.weights(self.server.tensors, self.folder.folder), self.server.scalars)
