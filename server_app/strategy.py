"""The only Flower strategy: turns a Method's calls into messages, and replies into uploads.

`MethodStrategy(FedRand(rho=0.5)).start(grid, initial_arrays, num_rounds)` works in anybody's ServerApp. `start` runs our
own loop: replies are folded one by one as they come (memory stays O(model)), a round ends at its deadline with those
who answered, a round below the quorum is repeated with a new cohort, and every refusal is recorded with its reason. The
five methods of Flower's interface do the same work for a caller with a loop of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from logging import INFO, WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from fedveil import cohort as cohorts
from fedveil import rng
from fedveil.config import CohortConfig
from fedveil.errors import ConfigError, QuorumError
from fedveil.exchange import Exchange
from fedveil.method import Method, RoundContext, State, Upload, spec_of
from fedveil.state import digest
from server_app import intake, sites
from server_app.attempt import Attempt
from server_app.record import RoundRecord, RunFolder

Scores = dict[str, dict[str, float]]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class MethodStrategy(Strategy):
    """Runs one method over Flower.

    Args:
        method: with its hyper-parameters.
        cohort: fraction, quorum, deadline, repeats.
        seed, deterministic: with `deterministic` every draw follows from the seed, and replies are folded in the
            order of the site names instead of the order they come in.
        run: name under which sites keep their private state.
        limits: what the intake gate lets in.
        folder: where to record; None records nothing.
        tap: store every message in the folder.
        scores: scores of a server state after a round (round -1: before any).
    """

    def __init__(
        self,
        method: Method,
        *,
        cohort: CohortConfig | None = None,
        seed: int = 0,
        deterministic: bool = False,
        run: str = "run",
        limits: intake.Limits | None = None,
        folder: RunFolder | None = None,
        tap: bool = False,
        scores: Callable[[State, int], Scores] | None = None,
    ) -> None:
        self.method = method
        self.cohort = cohort or CohortConfig()
        self.seed, self.deterministic, self.run_name = seed, deterministic, run
        self.limits = limits or intake.Limits()
        self.folder, self.scores = folder, scores
        self.tap = folder.tap() if folder and tap else None
        self.history: list[RoundRecord] = []
        self._server: State | None = None
        self._exchange: Exchange | None = None
        self._participated: set[str] = set()
        self._secret = rng.secret("server", seed, deterministic)
        self._open: tuple[Attempt, dict[int, RoundContext]] | None = None  # for a caller with a loop of its own

    # The run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Every round. Arguments and result as Flower's; `timeout` is one more bound on a round's deadline.

        Raises:
            ConfigError: an `evaluate_config`; what clients measure rides on their uploads, no message would carry it.
            QuorumError: too few sites, or too few accepted uploads in every repeat of a round.
        """
        if evaluate_config:
            raise ConfigError("evaluate_config: expected none (there is no evaluate exchange), found one; leave it out")
        self._initialise(initial_arrays)
        self.summary()
        first = self._resume() if self.folder and self.folder.resumed else 0
        sites.wait_for(grid, max(self.cohort.sites, self.cohort.min_sites), self.cohort.wait_seconds)
        result = Result(arrays=self._arrays())
        if first == 0:
            self._evaluate(0, evaluate_fn, result)
            if self.scores and self.folder:
                self.folder.scores(-1, self.scores(self.server, -1))
        deadline = min(timeout, self.cohort.deadline_seconds)
        for round_ in range(first, num_rounds):
            if self.folder:
                self.folder.status("running", round_, num_rounds)
            record = self._round(grid, round_, deadline, train_config or ConfigRecord())
            result.arrays = self._arrays()
            result.train_metrics_clientapp[round_ + 1] = _mean_report(record)
            self._evaluate(round_ + 1, evaluate_fn, result)
        if self.folder:
            self.folder.final(self.method.deployed(self.server))
        return result

    def _round(self, grid: Grid, round_: int, deadline: float, config: ConfigRecord) -> RoundRecord:
        """One round, repeated with a new cohort while it stays below the quorum."""
        for number in range(self.cohort.repeats + 1):
            started = time.monotonic()
            attempt, messages, contexts = self._begin(grid, round_, number, deadline, config)
            pending = dict(zip(grid.push_messages(messages), contexts, strict=True))
            del messages
            uploads = attempt.streamed(grid, pending, deadline, self.deterministic)
            if self._finish(attempt, uploads, started):
                return attempt.record
        reasons = (
            "; ".join(f"{site}: {reason}" for site, reason in attempt.record.failed.items()) or "no site connected"
        )
        raise QuorumError(
            f"round {round_}: expected at least {self.cohort.min_sites} accepted uploads, found "
            f"{len(attempt.record.accepted)} in the last of {self.cohort.repeats + 1} attempts ({reasons}); see the sites' "
            "logs or lower cohort.min-sites"
        )

    def _begin(
        self, grid: Grid, round_: int, number: int, deadline: float, config: ConfigRecord
    ) -> tuple[Attempt, list[Message], list[RoundContext]]:
        nodes = sites.connected(grid)
        chosen = cohorts.draw(nodes, self.cohort.fraction, self._secret, round_, number)
        contexts = [RoundContext(round_, s, s not in self._participated, self._secret) for s in chosen]
        record = RoundRecord(round_, number, chosen)
        attempt = Attempt(self.exchange, self.server, record, self.limits, self.run_name, self.folder, self.tap)
        return attempt, attempt.messages(contexts, nodes, deadline, config), contexts

    def _finish(self, attempt: Attempt, uploads: Iterator[Upload], started: float) -> bool:
        """Folds the uploads; with a quorum the result becomes the server's state and the checkpoint."""
        record = attempt.record
        new_state = self.method.aggregate(self.server, uploads)
        record.seconds = round(time.monotonic() - started, 3)
        enough = len(record.accepted) >= self.cohort.min_sites
        if enough:
            self._server = new_state
            # A site that failed may have lost its state: next time it gets everything, as a newcomer.
            self._participated = (self._participated | set(record.accepted)) - set(record.failed)
            deployed = self.method.deployed(new_state)
            record.weights = digest(deployed["server"])
            record.scores = self.scores(new_state, record.round) if self.scores else {}
        self.history.append(record)
        level, verdict = (INFO, "done") if enough else (WARNING, f"below the quorum of {self.cohort.min_sites}")
        log(level, "round %s %s: accepted %s, failed %s", record.round, verdict, record.accepted, record.failed)
        if self.folder:
            self.folder.round(record)
            if enough:
                loop = {"participated": sorted(self._participated), "secret": self._secret.hex()}
                self.folder.checkpoint(new_state, {"round": record.round, **loop})
        return enough

    def _initialise(self, arrays: ArrayRecord) -> None:
        weights = arrays.to_torch_state_dict()
        spec = spec_of(weights)
        self._server = self.method.init(spec, weights, rng.initial(self.seed, "method init"))
        self._exchange = Exchange(self.method, type(self.method).__module__.rpartition(".")[2], spec)

    def _resume(self) -> int:
        assert self.folder is not None
        self._server, loop = self.folder.load_checkpoint()
        self._participated, self._secret = set(loop["participated"]), bytes.fromhex(loop["secret"])
        return int(loop["round"]) + 1

    def _evaluate(self, server_round: int, evaluate_fn: EvaluateFn | None, result: Result) -> None:
        if evaluate_fn and (metrics := evaluate_fn(server_round, result.arrays)) is not None:
            result.evaluate_metrics_serverapp[server_round] = metrics

    # Flower's interface, for a caller with a loop of its own

    def summary(self) -> None:
        """Logs the method and its cohort."""
        log(INFO, "FedVeil: %s; %r", self.method, self.cohort)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages of one round (Flower counts from 1). The first call takes its weights from `arrays`."""
        if self._server is None:
            self._initialise(arrays)
        nodes = sites.wait_for(grid, self.cohort.min_sites, self.cohort.wait_seconds)
        attempt, messages, contexts = self._begin(grid, server_round - 1, 0, self.cohort.deadline_seconds, config)
        self._open = attempt, {nodes[ctx.client]: ctx for ctx in contexts}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Folds the replies; (None, None), which keeps the model, below the quorum."""
        if self._open is None:
            raise ConfigError(
                "aggregate_train: expected after configure_train of the same round, found none; call it first"
            )
        (attempt, waiting), self._open, started = self._open, None, time.monotonic()

        def uploads() -> Iterator[Upload]:
            for reply in replies:
                # An error made by the SuperLink names no node of ours; its site is then left in `waiting`.
                ctx = waiting.pop(reply.metadata.src_node_id, None)
                if ctx is not None and (upload := attempt.judged(reply, ctx)) is not None:
                    yield upload
            attempt.record.failed |= {ctx.client: "no reply" for ctx in waiting.values()}

        if not self._finish(attempt, uploads(), started):
            return None, None
        return self._arrays(), _mean_report(attempt.record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: evaluation rides on the uploads."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None: evaluation rides on the uploads."""
        return None

    # What is there once there are initial weights

    @property
    def exchange(self) -> Exchange:
        """The method on its spec."""
        if self._exchange is None:
            raise ConfigError("initial_arrays: expected before the first round, found none; call start() first")
        return self._exchange

    @property
    def server(self) -> State:
        """The server's state."""
        if self._server is None:
            raise ConfigError("initial_arrays: expected before the first round, found none; call start() first")
        return self._server

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: w.detach().cpu() for name, w in self.method.deployed(self.server)["server"].items()})


def _mean_report(record: RoundRecord) -> MetricRecord:
    """Each reported figure, weighted by examples over the sites that report it."""
    mean = {}
    for name in sorted({name for report in record.reports.values() for name in report} - {"num_examples"}):
        rows = [(r[name], r["num_examples"]) for r in record.reports.values() if name in r]
        mean[name] = sum(value * n for value, n in rows) / sum(n for _, n in rows)
    return MetricRecord({"num-examples": int(sum(r["num_examples"] for r in record.reports.values())), **mean})
