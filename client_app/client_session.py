"""The rounds of one site in one run: decode, train, keep what is private, encode. It does not use Flower.

The loaded task, the prepared rows and other ranks stay in memory between the rounds. A round in its steps:

| step | if it fails |
|---|---|
| 1. what it depends on is read (`ClientRound.open`) | PolicyError, WireError, StateError; no row was read |
| 2. task and rows are loaded, where they are not in memory | ConfigError, TaskError |
| 3. the trainer is built (`trainer_stack`), the private state is loaded | ConfigError, StateError |
| 4. the message is the one that this round was served with before, if it was | PolicyError |
| 5. the method trains and makes the upload, masked under secure aggregation | no state changes |
| 6. the rows that the upload was made from are enough for the policy | PolicyError; no state changes |
| 7. the private state is saved | StateError; the last state stays |
| 8. the reference for the next broadcast is saved | StateError; the upload is not sent |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.client_app.client_round import ClientRound, ClientRoundResult, LoadedTask, SiteData
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import decisions
from fedveil.client_app.ranks.launcher import RankLauncher, at_first, count_ranks
from fedveil.client_app.state.data_sets import ID_FILE, ChargedDataset, shelf_of
from fedveil.client_app.state.held_out_record import HeldOutRecord
from fedveil.client_app.trainer_stack import build_trainer
from fedveil.contract.codec import Buffer
from fedveil.contract.task import DatasetShard, PreparedData, Task, Watch, ignore_progress
from fedveil.errors import ConfigError, PolicyError
from fedveil.federation.exchange import MessageExchange
from fedveil.training import optimizers
from fedveil.training.adapter_task import AdaptedTask
from fedveil.training.held_out import HeldOutSplit, split_held_out

log = logging.getLogger("fedveil.turn")

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class _PreparedRows:
    fingerprint: Fingerprint
    prepared: PreparedData


class ClientSession:
    """The rounds of one site in one run. Base model and prepared rows stay in memory between them.

    All rounds must agree in everything that the task is made from; the owner of an instance ensures that. Rows are read
    again if their files have changed.
    """

    def __init__(self) -> None:
        self._task: LoadedTask | None = None
        self._rows: _PreparedRows | None = None
        self._split: tuple[PreparedData, float, SiteData] | None = None
        self._ranks: RankLauncher | None = None

    def run_round(
        self, receive: Callable[[], Buffer], assignment: ClientAssignment, watch: Watch = ignore_progress
    ) -> ClientRoundResult:
        """Run one round of this site. `receive` gives the message, and the caller keeps no copy of it.

        The private state goes on from the round that the instruction names, and is on disk before the upload is
        returned.

        Raises:
            PolicyError: what came is not what the site trains from, the upload was made from fewer rows than the site
                asks, or the round was served with another message before. The last private state stays.
            StateError: the private state cannot be read or written.
        """
        started = time.perf_counter()
        round_ = ClientRound.open(assignment)  # what the site does not permit is refused before a row is read
        task = self.load_task(assignment)
        data = self.load_data(round_, task.task)
        load_seconds = time.perf_counter() - started
        order, exchange = assignment.order, task.exchange
        context = round_.build_context(exchange.method, task.task)
        stack = build_trainer(round_, task, data, context, watch)
        private, turn = round_.states.load(order.last, order.is_new), context.new_turn()
        message, participate = round_.require_same(receive()), round_.select_participate(exchange)
        private, parts = participate(message, private, stack.trainer, context, turn)
        decisions.check_examples(round_.policy, stack.counter.distinct, stack.counter.least)
        round_.states.save(turn, order.last, private)
        stack.guard.keep()
        return ClientRoundResult(parts, load_seconds)

    def load_task(self, assignment: ClientAssignment) -> LoadedTask:
        """Return the task with its exchange, which is loaded once, and the other ranks started.

        Raises:
            PolicyError: the method's fields are not those of the run config, which the policy has judged.
            ConfigError: an optimizer or a number of processes that this method or task cannot have.
        """
        if self._task is None:
            order, config = assignment.order, assignment.config
            method = strategies.create_from_json(order.method, order.fields)
            if assignment.site.policy and method != strategies.create_method(config.method.name, config.method.params):
                # The policy has judged the run config's fields, without a method's code.
                raise PolicyError("order.fields: expected those of the run config, found others; submit the run again")
            optimizers.check_optimizer(method, config)
            task = tasks.load_task(config, method.adapter, at_first(assignment, method))
            self._task = LoadedTask(task, MessageExchange(method, order.method, task.spec))
        if self._ranks is None and assignment.site.processes > 1:
            self._ranks = self.launch_ranks(self._task.task, assignment)
        return self._task

    def launch_ranks(self, task: Task, assignment: ClientAssignment) -> RankLauncher | None:
        """Start the other ranks of the site; None where the task gains nothing from them."""
        if isinstance(task, AdaptedTask) and count_ranks(assignment) > 1:
            return RankLauncher(task, assignment)
        name, asked = assignment.config.task.name, assignment.site.processes
        log.info("processes: only one of %d trains, because %s gains nothing from more", asked, name)
        return None

    def load_data(self, round_: ClientRound, task: Task) -> SiteData:
        """Return the site's prepared rows, and how they are split into rows to train on and rows held out.

        No row is held out where this site would give no score of them.

        Raises:
            ConfigError: neither the node config nor the run config names a folder.
        """
        prepared = self._prepare(round_.assignment, task)
        part = round_.assignment.config.evaluate.held_out
        if not part or not round_.policy.max_scores:
            return SiteData(prepared, HeldOutSplit(prepared.rows, ()))
        if self._split is None or self._split[0] is not prepared or self._split[1] != part:
            self._split = prepared, part, _split_rows(round_, prepared, part)
        return self._split[2]

    def _prepare(self, assignment: ClientAssignment, task: Task) -> PreparedData:
        if not assignment.data:
            raise ConfigError(
                'data: expected a folder in the node config ("data") or the run config (task.data), found none'
            )
        data, site = Path(assignment.data), assignment.site
        fingerprint = _fingerprint(data)
        if self._rows is None or self._rows.fingerprint != fingerprint:
            share = DatasetShard(site.partition_id, site.num_partitions) if site.num_partitions > 1 else None
            self._rows = self._split = None  # not two of them in memory
            # Prepared rows are in the clear: a site that seals what it keeps keeps none.
            shelf = None if site.key_file else shelf_of(site.state_dir, data, site.data_set)
            self._rows = _PreparedRows(fingerprint, task.prepare(data, "train", share, shelf))
        return self._rows.prepared

    def close(self) -> None:
        """End the processes that were started for the rounds."""
        if self._ranks:
            self._ranks.close()


def _split_rows(round_: ClientRound, prepared: PreparedData, part: float) -> SiteData:
    """Return the rows, split as the site's record says. Raises ConfigError or StateError where it cannot be read."""
    assignment = round_.assignment
    dataset = ChargedDataset.from_folder(Path(assignment.data), assignment.site.data_set)
    key = rng.RandomStream.derive(round_.secret, 0, assignment.name, "held out").bytes(32)
    record = HeldOutRecord.open(assignment.site.state_dir, assignment.name)
    chosen = record.select_rows(dataset.id, part, key, dataset.relative_origins(prepared.origins()))
    return SiteData(prepared, split_held_out(prepared.rows, chosen.indices), chosen.refusal, dataset.id)


def _fingerprint(folder: Path) -> Fingerprint:
    """Names, sizes and modification times of the files in a data folder without its id, or of a single file."""
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    stats = [(file.name, file.stat()) for file in files if file.is_file() and file.name != ID_FILE]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
