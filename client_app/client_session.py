"""The rounds of one site in one run: decode, train, save private state, encode. Does not use Flower.

The loaded task, the prepared examples and other ranks stay in memory between rounds. The steps of a round:

| step | if it fails |
|---|---|
| 1. read its inputs (`ClientRound.open`) | PolicyError, WireError, StateError; no example has been read |
| 2. load the task and all examples except those of withdrawn units, if not in memory | ConfigError, TaskError |
| 3. build the trainer (`trainer_stack`), load the private state | ConfigError, StateError |
| 4. if this round was served before, compare the message with the earlier one | PolicyError |
| 5. train and create the upload, masked under secure aggregation | no state changes |
| 6. check that the upload used enough examples for the policy | PolicyError; no state changes |
| 7. save the private state | StateError; the last saved state remains |
| 8. save the reference for the next broadcast | StateError; the upload is not sent |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.client_app.client_round import ClientRound, ClientRoundResult, LoadedTask, SiteData
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import decisions
from fedveil.client_app.ranks.launcher import RankLauncher, at_first, count_ranks
from fedveil.client_app.site_columns import describe_site_columns, name_site_columns
from fedveil.client_app.state.data_sets import ID_FILE, SiteDataset, remove_outdated, remove_shelves, shelf_of
from fedveil.client_app.state.held_out_record import HeldOutRecord
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord, WithdrawnUnits
from fedveil.client_app.trainer_stack import build_trainer, why_counts_stay
from fedveil.contract.codec import Buffer
from fedveil.contract.held_out_report import NOT_PERMITTED, REFUSALS
from fedveil.contract.task import DatasetShard, PreparedData, Task, Watch, ignore_progress
from fedveil.data.reading_notes import collect_notes
from fedveil.data.split_files import find_split_files
from fedveil.data.units import UnitRows, group_rows, group_rows_of_run, mark_rows
from fedveil.errors import ConfigError, PolicyError, TaskError
from fedveil.federation.exchange import MessageExchange
from fedveil.training import optimizers
from fedveil.training.adapter_task import AdaptedTask
from fedveil.training.held_out import ExampleSubset, HeldOutSplit, split_held_out

log = logging.getLogger("fedveil.turn")

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class _PreparedRows:
    fingerprint: Fingerprint
    withdrawn: WithdrawnUnits
    prepared: PreparedData
    units: UnitRows | None
    notes: tuple[str, ...]


class ClientSession:
    """The rounds of one site in one run. The base model and the prepared examples stay in memory between rounds.

    All rounds must agree on everything that determines the task; the owner of an instance ensures this. The examples
    are reloaded if their files have changed.
    """

    def __init__(self) -> None:
        self._task: LoadedTask | None = None
        self._rows: _PreparedRows | None = None
        self._split: tuple[_PreparedRows, float, SiteData] | None = None
        self._ranks: RankLauncher | None = None

    def run_round(
        self, receive: Callable[[], Buffer], assignment: ClientAssignment, watch: Watch = ignore_progress
    ) -> ClientRoundResult:
        """Run one of this site's rounds. `receive` returns the message, and the caller keeps no copy of it.

        The private state continues from the round that the instruction names, and is on disk before the upload is
        returned.

        Raises:
            PolicyError: the site refuses to train from the received weights, the upload used fewer examples than the
                site requires, or the round was already served with a different message. The saved private state does
                not change.
            StateError: the private state cannot be read or written.
        """
        started = time.perf_counter()
        round_ = ClientRound.open(assignment)  # the site refuses a forbidden round before it reads an example
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
        notes = (*(self._rows.notes if self._rows else ()), *([data.note] if data.note else []))
        return ClientRoundResult(parts, load_seconds, data.prepared.counts, notes)

    def load_task(self, assignment: ClientAssignment) -> LoadedTask:
        """Return the task with its exchange, loading it once and starting the other ranks.

        Raises:
            PolicyError: the method's parameters differ from those in the run config, which the policy has checked.
            ConfigError: the method or task does not support the optimizer or the number of processes.
        """
        if self._task is None:
            order, config = assignment.order, assignment.config
            method = strategies.create_from_json(order.method, order.fields)
            if assignment.site.policy and method != strategies.create_method(config.method.name, config.method.params):
                # The policy has checked the parameters in the run config, without running the method's code.
                raise PolicyError("order.fields: these differ from the run config's; submit the run again")
            optimizers.check_optimizer(method, config)
            task = tasks.load_task(assignment.site_config, method.adapter, at_first(assignment, method))
            self._task = LoadedTask(task, MessageExchange(method, order.method, task.spec))
        if self._ranks is None and assignment.site.processes > 1:
            self._ranks = self.launch_ranks(self._task.task, assignment)
        return self._task

    def launch_ranks(self, task: Task, assignment: ClientAssignment) -> RankLauncher | None:
        """Start the site's other ranks; return None if the task does not benefit from them."""
        if isinstance(task, AdaptedTask) and count_ranks(assignment) > 1:
            return RankLauncher(task, assignment)
        name, asked = assignment.config.task.name, assignment.site.processes
        log.info("processes: only one of %d trains, because %s does not benefit from more", asked, name)
        return None

    def load_data(self, round_: ClientRound, task: Task) -> SiteData:
        """Return the site's prepared examples, and their split into training and held-out examples.

        No examples are held out if this site would not report a score for them.

        Raises:
            ConfigError: neither the node config nor the run config names a folder.
        """
        with name_site_columns(round_.assignment.config, round_.assignment.site):
            read = self._prepare(round_, task)
        config = round_.assignment.config
        part = config.held_out_fraction
        if not part or not round_.policy.max_scores:
            note = f"{config.held_out_key}: {REFUSALS[NOT_PERMITTED]}; no example is held out" if part else ""
            return SiteData(read.prepared, HeldOutSplit(read.prepared.rows, ()), units=read.units, note=note)
        if self._split is None or self._split[0] is not read or self._split[1] != part:
            self._split = read, part, _split_rows(round_, read.prepared, part)
            log.info("%s", self._split[2].note)
        return self._split[2]

    def _prepare(self, round_: ClientRound, task: Task) -> _PreparedRows:
        assignment = round_.assignment
        if not assignment.data:
            raise ConfigError(
                'data: neither the node config ("data") nor the run config (task.data) names a data folder; set one'
            )
        data, site = Path(assignment.data), assignment.site
        fingerprint, withdrawn = _fingerprint(data), WithdrawalRecord.open(site.state_dir, round_.seal).read()
        if self._rows is None or (self._rows.fingerprint, self._rows.withdrawn) != (fingerprint, withdrawn):
            share = DatasetShard(site.partition_id, site.num_partitions) if site.num_partitions > 1 else None
            self._rows = self._split = None  # never two data sets in memory
            if said := describe_site_columns(assignment.config, site.columns):
                log.info("%s", said)
            # Prepared examples are stored unencrypted and cover all rows, so a site that encrypts its stored files or
            # has withdrawn a unit does not store them.
            is_shelved = not site.key_file and not withdrawn.units
            if withdrawn.units:
                remove_shelves(site.state_dir)
            shelf = shelf_of(site.state_dir, data, site.data_set) if is_shelved else None
            if shelf is not None and remove_outdated(shelf, fingerprint):
                log.info("task.data: its files have changed, so the examples prepared from earlier ones were removed")
            with collect_notes() as notes:
                prepared = task.prepare(data, "train", share, shelf)
            task.require_shared_classes()
            prepared = _leave_out(withdrawn, site.unit_column, prepared, data)
            units = group_rows_of_run(assignment.site_config, prepared, data, share)
            if (units is not None or withdrawn.units) and _fingerprint(data) != fingerprint:
                raise TaskError(f'task.data: "{data}" changed while it was being read; start the round again')
            self._rows = _PreparedRows(fingerprint, withdrawn, prepared, units, tuple(notes))
            if (counts := prepared.counts) is not None and self._task is not None:
                stay = why_counts_stay(round_, self._task.exchange.method)
                where = f"these counts stay at this site: {stay}" if stay else "the server gets these counts"
                log.info("task.data: %s; %s", counts.words, where)
        return self._rows

    def close(self) -> None:
        """Stop the processes that were started for the rounds."""
        if self._ranks:
            self._ranks.close()


def _split_rows(round_: ClientRound, prepared: PreparedData, part: float) -> SiteData:
    """Return the split of the examples from the site's record, which never divides a unit of the site's `unit-column`.

    Raises ConfigError or StateError if the record is unreadable, TaskError if the units cannot be found.
    """
    assignment = round_.assignment
    data, column, key = Path(assignment.data), assignment.site.unit_column, assignment.config.held_out_key
    try:
        has_blanks = assignment.config.dp.no_unit == "one"
        units = group_rows(data, "train", column, prepared.origins(), has_blanks) if column else None
    except TaskError as error:
        raise TaskError(
            f"{key}: cannot read the units in the node config's unit-column, and a unit must not be divided: {error}; "
            "or set max-scores = 0 in the policy, so that no example is held out"
        ) from None
    dataset = SiteDataset.from_folder(data, assignment.site.data_set)
    draw = rng.RandomStream.derive(round_.secret, 0, assignment.name, "held out").bytes(32)
    record = HeldOutRecord.open(assignment.site.state_dir, assignment.name)
    chosen = record.select_rows(dataset.id, part, draw, dataset.relative_origins(prepared.origins()), units)
    split = split_held_out(prepared.rows, chosen.indices, chosen.unscored)
    note = f"{key}: {len(split.held):,} of {len(prepared.rows):,} examples are held out: scored, but never trained on"
    if chosen.refusal:
        note = f"{key}: {len(chosen.indices):,} examples are held out, without scores: {REFUSALS[chosen.refusal]}"
    return SiteData(prepared, split, chosen.refusal, dataset.id, note=note)


def _leave_out(withdrawn: WithdrawnUnits, own: str, prepared: PreparedData, data: Path) -> PreparedData:
    """Return the examples without the rows of withdrawn units, and log their number.

    Args:
        own: the node config's `unit-column`.

    Raises:
        TaskError: the rows of withdrawn units cannot be found, or no other rows are left.
    """
    columns = withdrawn.columns(own)
    if not columns:
        return prepared
    origins = list(prepared.origins())
    if len(origins) != len(prepared.rows):
        raise TaskError(
            f"withdrawn units: this task gives {len(origins)} origins for {len(prepared.rows)} examples, so it cannot "
            "leave out the rows of withdrawn units"
        )
    left_out: set[int] = set()
    for column in columns:
        in_column = "" if own else column
        try:
            marks = mark_rows(data, "train", column, origins, partial(withdrawn.covers, in_column))
        except TaskError as error:
            raise TaskError(
                f'withdrawn units: cannot read column "{column}", which shows which rows to leave out: {error}; or '
                "set unit-column in the node config"
            ) from None
        left_out.update(index for index, is_marked in enumerate(marks) if is_marked)
    kept = [index for index in range(len(origins)) if index not in left_out]
    if not kept:
        raise TaskError(
            f"withdrawn units: all {len(origins)} rows in {data} belong to withdrawn units; this site cannot take part "
            "with this data"
        )
    log.info("withdrawn units: this site leaves out %d of %d rows", len(left_out), len(origins))
    rows = ExampleSubset(prepared.rows, kept)
    cut = None if prepared.cut is None else prepared.cut[kept]
    return PreparedData(rows, lambda: [origins[index] for index in kept], prepared.dropped, cut)


def _fingerprint(folder: Path) -> Fingerprint:
    """Return the names, sizes and modification times of a data folder's files (without its id), or of a single file.

    Subfolders are included only if they hold files of the training split.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    if folder.is_dir():
        files += [file for file in find_split_files(folder, "train") if file.parent != folder]
    names = (file.relative_to(folder).as_posix() if file != folder else file.name for file in files)
    stats = [(name, file.stat()) for name, file in zip(names, files, strict=True) if file.is_file() and name != ID_FILE]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
