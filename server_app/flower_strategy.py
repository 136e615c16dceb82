"""The only Flower strategy: it translates a Method's calls into messages, and replies into uploads.

`MethodStrategy(FedRand(rho=0.5)).start(grid, initial_arrays, num_rounds)` works in any ServerApp. `start` runs its own
loop, which adds up replies one by one as they arrive, so memory stays O(model). A round ends at its deadline with the
sites that have replied; a round below the quorum is retried with a new cohort; every refusal is recorded with its
reason. The five methods of Flower's interface do the same work for a caller with its own loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from logging import INFO

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from fedveil.config import CohortConfig
from fedveil.contract import held_out_report, row_counts
from fedveil.contract.method import FederatedState, Method
from fedveil.contract.param_spec import Spec
from fedveil.errors import ConfigError
from fedveil.server_app import connected_sites
from fedveil.server_app.evaluation import Scores
from fedveil.server_app.message_signing import MessageSigner
from fedveil.server_app.round_attempt import RoundAttempt
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.rounds import RoundLoop
from fedveil.server_app.run_folder import RunFolder, Save
from fedveil.server_app.run_settings import RunSettings


class MethodStrategy(Strategy):
    """Runs one method over Flower.

    Args:
        method: the method with its hyperparameters.
        settings: the settings of the round loop.
        folder: the folder in which the run is recorded, or None to record nothing.
        scores: returns the scores of a server state after a round (round -1: before round 0).
        spec: the parameters that the task trains and their locations in the model; by default, the initial weights.
        device: the device on which a method with `on_device` builds its messages, or None for the CPU.
        save: writes the server's last model to the run folder in a format that other programs load, if not None.
        signer: signs the instructions and verifies the replies in `start` and `run`, or None to sign nothing.
        app: SHA-256 of the bundle, which a secure-aggregation plan names; guarded sites refuse any other bundle.
    """

    def __init__(
        self,
        method: Method,
        settings: RunSettings | None = None,
        *,
        folder: RunFolder | None = None,
        scores: Callable[[FederatedState, int], Scores] | None = None,
        spec: Spec | None = None,
        device: torch.device | None = None,
        save: Save | None = None,
        signer: MessageSigner | None = None,
        app: str = "",
    ) -> None:
        self.rounds = RoundLoop(method, settings or RunSettings(), folder, scores, spec, device, signer, app)
        self._save = save
        self._initialised = False
        self._open: tuple[RoundAttempt, dict[str, int]] | None = None  # for a caller with its own loop

    @property
    def cohort(self) -> CohortConfig:
        """Return the settings that select the participating sites."""
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
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run all rounds. Arguments and result are Flower's; `timeout` additionally limits a round's deadline.

        `should_stop`, as in Flower 1.43 and later, is called after every round that counted, with its number (from 1)
        and the results so far, including the model. If it returns true, the run ends as if this were its last round,
        and `rounds.course.stopped` has the reason. A resumed run continues after that round, and calls it again.

        Raises:
            ConfigError: `evaluate_config` is given. Uploads contain the clients' metrics, so no message would use it.
            QuorumError: there are too few sites, or too few accepted uploads in every attempt at a round.
        """
        if evaluate_config:
            raise ConfigError("evaluate_config: there is no evaluate exchange to configure; leave it out")
        self._initialise(initial_arrays)
        result = Result()

        def done(server_round: int, record: RoundRecord | None) -> None:
            if record is not None:
                result.train_metrics_clientapp[server_round] = _mean_report(record)
            if evaluate_fn and (metrics := evaluate_fn(server_round, self._arrays())) is not None:
                result.evaluate_metrics_serverapp[server_round] = metrics
            if record is not None and should_stop:
                result.arrays = self._arrays()
                self.rounds.course.told = bool(should_stop(server_round, result))

        self.run(grid, num_rounds, timeout, train_config, done)
        result.arrays = self._arrays()
        return result

    def run(
        self,
        grid: Grid,
        num_rounds: int,
        timeout: float = math.inf,
        train_config: ConfigRecord | None = None,
        done: Callable[[int, RoundRecord | None], None] = lambda server_round, record: None,
    ) -> None:
        """Run all rounds from the weights that `rounds` was initialized with, without Flower's copies of the model.

        `done` is called with 0 and None before round 0, and with Flower's round number and the record after each round.
        Raises QuorumError like `start`.
        """
        self.summary()
        self.rounds.course.told = False
        first = self.rounds.resume()
        connected_sites.wait_for(grid, max(self.cohort.sites, self.cohort.min_sites), self.cohort.wait_seconds)
        if first == 0:
            done(0, None)
            self.rounds.score_initial()
        deadline = min(timeout, self.cohort.deadline_seconds)
        for round_ in range(first, num_rounds):
            if why := self.rounds.course.stopped(num_rounds):
                log(INFO, "fedveil: %s", why)
                break
            record = self.rounds.run_round(grid, round_, num_rounds, deadline, train_config or ConfigRecord())
            done(round_ + 1, record)
        self.rounds.end(num_rounds)
        if self.rounds.folder:
            self.rounds.folder.final(self.rounds.method.models(self.rounds.server), self._save)

    # Flower's interface, for a caller with its own loop

    def summary(self) -> None:
        """Log the method and its cohort."""
        log(INFO, "FedVeil: %s; %r", self.rounds.method, self.cohort)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of one round (Flower counts from 1). The first call takes its weights from `arrays`."""
        if self.rounds.settings.secure.enabled:
            raise ConfigError("secure.enabled: it must be false if the caller runs the rounds; call start() instead")
        if self.cohort.buffer_size:
            raise ConfigError(
                "cohort.buffer-size: it must be 0 if the caller runs the rounds, because each of them waits for its "
                f"sites, but it is {self.cohort.buffer_size}; call start() instead"
            )
        if not self._initialised:
            self._initialise(arrays)
        nodes = connected_sites.wait_for(grid, self.cohort.min_sites, self.cohort.wait_seconds)
        attempt, messages = self.rounds.open_attempt(grid, server_round - 1, 0, self.cohort.deadline_seconds, config)
        self._open = attempt, nodes
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies. Below the quorum, return (None, None), which leaves the model unchanged.

        The caller's loop has read them with Flower's own classes, without the checks in server_app/reception.py.
        """
        if self._open is None:
            raise ConfigError("aggregate_train: configure_train was not called for this round; call that first")
        (attempt, nodes), self._open, started = self._open, None, time.monotonic()
        if not self.rounds.record_attempt(attempt.run(attempt.iter_given_uploads(replies, nodes)), started):
            return None, None
        return self._arrays(), _mean_report(self.history[-1])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: uploads contain the clients' evaluation."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: uploads contain the clients' evaluation."""
        return None

    def _initialise(self, arrays: ArrayRecord) -> None:
        self.rounds.initialise(arrays.to_torch_state_dict())
        self._initialised = True

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: w.detach().cpu() for name, w in self.rounds.models().items()})


def _mean_report(record: RoundRecord) -> MetricRecord:
    """Return the mean of each metric over the reporting sites, weighted by their examples or held-out rows."""
    mean = {}
    unaveraged = {"num_examples", held_out_report.ROWS, held_out_report.REFUSED} | row_counts.FIELDS
    for name in sorted({name for report in record.reports.values() for name in report} - unaveraged):
        weight = held_out_report.ROWS if name == held_out_report.LOSS else "num_examples"
        rows = [(r[name], r[weight]) for r in record.reports.values() if name in r]
        mean[name] = sum(value * n for value, n in rows) / sum(n for _, n in rows)
    return MetricRecord({"num-examples": int(sum(r["num_examples"] for r in record.reports.values())), **mean})
