"""The only Flower strategy: turns a Method's calls into messages, and replies into uploads.

`MethodStrategy(FedRand(rho=0.5)).start(grid, initial_arrays, num_rounds)` works in anybody's ServerApp. `start` runs our
own loop: replies are folded one by one as they come (memory stays O(model)), a round ends at its deadline with those
who answered, a round below the quorum is repeated with a new cohort, and every refusal is recorded with its reason. The
five methods of Flower's interface do the same work for a caller with a loop of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from fedveil.config import CohortConfig
from fedveil.contract.method import Method, RoundContext, State, Upload
from fedveil.contract.spec import Spec
from fedveil.errors import ConfigError
from fedveil.server_app import sites
from fedveil.server_app.attempt import Attempt
from fedveil.server_app.record import RoundRecord, RunFolder
from fedveil.server_app.rounds import Rounds, Scores
from fedveil.server_app.settings import RunSettings


class MethodStrategy(Strategy):
    """Runs one method over Flower.

    Args:
        method: with its hyper-parameters.
        settings: how the run is run.
        folder: where to record; None records nothing.
        scores: scores of a server state after a round (round -1: before any).
        spec: what the task trains, with the tensors' places in the model; without it, as the initial weights are.
    """

    def __init__(
        self,
        method: Method,
        settings: RunSettings | None = None,
        *,
        folder: RunFolder | None = None,
        scores: Callable[[State, int], Scores] | None = None,
        spec: Spec | None = None,
    ) -> None:
        self.rounds = Rounds(method, settings or RunSettings(), folder, scores, spec)
        self._initialised = False
        self._open: tuple[Attempt, dict[int, RoundContext]] | None = None  # for a caller with a loop of its own

    @property
    def cohort(self) -> CohortConfig:
        """Who takes part."""
        return self.rounds.settings.cohort

    @property
    def history(self) -> list[RoundRecord]:
        """Every attempt at a round, in order."""
        return self.rounds.history

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
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
        first = self.rounds.resume()
        sites.wait_for(grid, max(self.cohort.sites, self.cohort.min_sites), self.cohort.wait_seconds)
        result = Result(arrays=self._arrays())

        def evaluate(server_round: int) -> None:
            if evaluate_fn and (metrics := evaluate_fn(server_round, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = metrics

        if first == 0:
            evaluate(0)
            self.rounds.score_initial()
        deadline = min(timeout, self.cohort.deadline_seconds)
        for round_ in range(first, num_rounds):
            record = self.rounds.run_round(grid, round_, num_rounds, deadline, train_config or ConfigRecord())
            result.arrays = self._arrays()
            result.train_metrics_clientapp[round_ + 1] = _mean_report(record)
            evaluate(round_ + 1)
        if self.rounds.folder:
            self.rounds.folder.final(self.rounds.method.deployed(self.rounds.server))
        return result

    # Flower's interface, for a caller with a loop of its own

    def summary(self) -> None:
        """Logs the method and its cohort."""
        log(INFO, "FedVeil: %s; %r", self.rounds.method, self.cohort)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages of one round (Flower counts from 1). The first call takes its weights from `arrays`."""
        if not self._initialised:
            self._initialise(arrays)
        nodes = sites.wait_for(grid, self.cohort.min_sites, self.cohort.wait_seconds)
        attempt, messages, contexts = self.rounds.begin(grid, server_round - 1, 0, self.cohort.deadline_seconds, config)
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

        if not self.rounds.finish(attempt, uploads(), started):
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

    def _initialise(self, arrays: ArrayRecord) -> None:
        self.rounds.initialise(arrays.to_torch_state_dict())
        self._initialised = True

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: w.detach().cpu() for name, w in self.rounds.deployed().items()})


def _mean_report(record: RoundRecord) -> MetricRecord:
    """Each reported figure, weighted by examples over the sites that report it."""
    mean = {}
    for name in sorted({name for report in record.reports.values() for name in report} - {"num_examples"}):
        rows = [(r[name], r["num_examples"]) for r in record.reports.values() if name in r]
        mean[name] = sum(value * n for value, n in rows) / sum(n for _, n in rows)
    return MetricRecord({"num-examples": int(sum(r["num_examples"] for r in record.reports.values())), **mean})
