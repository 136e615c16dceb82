"""One participation of this site: decode, train, keep what is private, encode. It does not use Flower."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fedveil import rng, strategies, tasks
from fedveil.client_app.ranks.launched import Launched, at_first, size
from fedveil.client_app.site import policy, secure
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.site.data_sets import ID_FILE, DataSet, shelf_of
from fedveil.client_app.site.private import PrivateStore, ledger_of
from fedveil.client_app.site.received import Judged, Received
from fedveil.client_app.site.witness import Witness
from fedveil.config import RunConfig
from fedveil.contract import held_out
from fedveil.contract.codec import Buffer
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.task import Prepared, Share, Task, Watch, unwatched
from fedveil.contract.trainer import Trainer
from fedveil.errors import ConfigError, PolicyError
from fedveil.federation.exchange import Exchange, Participate
from fedveil.federation.summed.uploads import Summed
from fedveil.privacy.claims import checked_claim, claim_of
from fedveil.privacy.dp_sgd import DpSgd, NoisyTrainer
from fedveil.privacy.metered import MeteredRows, RowsOnly
from fedveil.rows.held_out import Divided, divided
from fedveil.sealed import Seal
from fedveil.training import optimisers
from fedveil.training.adapted import AdaptedTask
from fedveil.training.held_out import Scored
from fedveil.training.per_sample import SampleLoss
from fedveil.wire import header

log = logging.getLogger("fedveil.turn")

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Turn:
    """The result of a turn.

    Attributes:
        parts: the upload, to be joined; dense parts are views of the trained tensors.
        load_seconds: time to load the base model and the rows before the training; almost 0 once they are in memory.
    """

    parts: list[Buffer]
    load_seconds: float


class Turns:
    """The turns of one site in one run. Base model and prepared rows stay in memory between them.

    All turns must agree in everything that the task is made from; the owner of an instance ensures that. Rows are read
    again if their files have changed.
    """

    def __init__(self) -> None:
        self._loaded: tuple[Task, Exchange] | None = None
        self._rows: tuple[Fingerprint, Prepared] | None = None
        self._parts: tuple[Prepared, Divided] | None = None
        self._ranks: Launched | None = None

    def take(self, receive: Callable[[], Buffer], assignment: Assignment, watch: Watch = unwatched) -> Turn:
        """One turn. `receive` gives the message, and the caller keeps no copy of it.

        The private state goes on from the turn that the order names, and is on disk before the upload is returned.

        Raises:
            PolicyError: what came is not what the site trains from, the upload was made from fewer rows than the site
                asks, or the round was served with another message before. The last private state stays.
            StateError: the private state cannot be read or written.
        """
        started = time.perf_counter()
        unseen = secure.begun(assignment)  # before a row is read
        order, config = assignment.order, assignment.config
        task, exchange = self._task_and_exchange(assignment)
        prepared = self._prepared(task, assignment)
        load_seconds = time.perf_counter() - started
        seal = Seal.of(assignment.site.key_file)
        store = PrivateStore.of(assignment.site.state_dir, order.run, assignment.name, seal)
        secret = store.secret(config.run.seed, assignment.name, config.run.deterministic)
        seeded = config.run.deterministic
        in_sum = config.secure.noise == "sum"
        device = device_for(exchange.method, task, config, bool(unseen))
        ctx = RoundContext(order.round, assignment.name, order.is_new, secret, seeded, order.address, in_sum, device)
        received = Received.of(assignment.site.state_dir, order.run, assignment.name, seal)
        initial = lambda: task.initial(rng.initial(config.run.seed, "weights"))  # noqa: E731
        rows = self._divided(prepared, assignment, secret)
        trained: Trainer = task.trainer(rows.trained, ctx.rng("batches"), watch, ctx.round)
        if config.evaluate.held_out:
            trained = Scored(trained, rows.held, lambda: refusal(assignment, rows))
        judged = Judged(trained, assignment.site, received, initial)
        witness = Witness(judged)
        trainer = self._bounded(witness, exchange.method, assignment, ctx, prepared)
        private, turn = store.load(order.last, order.is_new), ctx.new_turn()
        participate: Participate = exchange.participate
        if unseen:
            claim = claim_of(exchange.method, config)
            participate = Summed.of(exchange, order.round, unseen.plan.bits, claim).of_site(unseen.site, unseen.plan)
        private, parts = participate(_same(receive(), assignment), private, trainer, ctx, turn)
        policy.check_rows(assignment.site, witness.distinct, witness.least)
        store.save(turn, order.last, private)
        judged.keep()
        return Turn(parts, load_seconds)

    def _bounded(
        self, trainer: Trainer, method: Method, assignment: Assignment, ctx: RoundContext, prepared: Prepared
    ) -> Trainer:
        """The trainer for the method. If the run makes a claim, every look at the rows is charged to the site's ledger.

        A deterministic run is not charged, because its seeded noise protects nobody.
        """
        config = assignment.config
        claim = checked_claim(method, config, isinstance(self._task, SampleLoss))
        if claim is None:
            return trainer
        rows = trainer.rows
        if not config.run.deterministic:
            ledger = ledger_of(assignment.site.state_dir, assignment.name, Seal.of(assignment.site.key_file))
            own = policy.of(assignment.site).budget
            data_set = DataSet.of(Path(assignment.data), assignment.site.data_set)
            rows = MeteredRows(rows, claim, own, ledger, ledger.names(data_set.records(prepared.origins())))
            trainer = RowsOnly(trainer.spec, rows)
        dp = DpSgd.of(config.dp)
        return NoisyTrainer(trainer.spec, rows, dp, ctx) if dp else trainer

    @property
    def _task(self) -> Task | None:
        return self._loaded[0] if self._loaded else None

    def _task_and_exchange(self, assignment: Assignment) -> tuple[Task, Exchange]:
        if self._loaded is None:
            order = assignment.order
            method = strategies.create_from_json(order.method, order.fields)
            config = assignment.config
            if assignment.site.policy and method != strategies.create(config.method.name, config.method.fields):
                # The policy has judged the run config's fields, without a method's code.
                raise PolicyError("order.fields: expected those of the run config, found others; submit the run anew")
            optimisers.check(method, config)
            task = tasks.load(config, method.adapter, at_first(assignment, method))
            self._loaded = task, Exchange(method, order.method, task.spec)
        if self._ranks is None and assignment.site.processes > 1:
            self._ranks = self._launched(self._loaded[0], assignment)
        return self._loaded

    def _launched(self, task: Task, assignment: Assignment) -> Launched | None:
        if isinstance(task, AdaptedTask) and size(assignment) > 1:
            return Launched(task, assignment)
        name, asked = assignment.config.task.name, assignment.site.processes
        log.info("processes: one of %d trains, for %s gains nothing from more", asked, name)
        return None

    def close(self) -> None:
        """Ends what was started for the turns."""
        if self._ranks:
            self._ranks.close()

    def _divided(self, prepared: Prepared, assignment: Assignment, secret: bytes) -> Divided:
        """The rows that are trained on, and those held out: none where this site would give no score of them."""
        part = assignment.config.evaluate.held_out
        if not part or not policy.of(assignment.site).max_scores:
            return Divided(prepared.rows, ())
        if self._parts is None or self._parts[0] is not prepared:
            key = rng.Stream.derive(secret, 0, assignment.name, "held out").bytes(32)
            self._parts = prepared, divided(prepared.rows, prepared.origins(), key, part)
        return self._parts[1]

    def _prepared(self, task: Task, assignment: Assignment) -> Prepared:
        if not assignment.data:
            raise ConfigError(
                'data: expected a folder in the node config ("data") or the run config (task.data), found none'
            )
        data, site = Path(assignment.data), assignment.site
        found = _fingerprint(data)
        if self._rows is None or self._rows[0] != found:
            share = Share(site.partition_id, site.num_partitions) if site.num_partitions > 1 else None
            self._rows = self._parts = None  # not two of them in memory
            # Prepared rows are in the clear: a site that seals what it keeps keeps none.
            shelf = None if site.key_file else shelf_of(site.state_dir, data, site.data_set)
            self._rows = found, task.prepare(data, "train", share, shelf)
        return self._rows[1]


def refusal(assignment: Assignment, rows: Divided) -> int:
    """Why this site gives no score of held-out rows, as `held_out.REFUSALS` has it; 0: it does, and has counted it."""
    most = policy.of(assignment.site).max_scores
    if not most:
        return held_out.NOT_PERMITTED
    if not rows.held:
        return held_out.TOO_FEW
    return 0 if policy.served_of(assignment).count_score(most) else held_out.SPENT


def device_for(method: Method, task: Task, config: RunConfig, is_unseen: bool) -> torch.device | None:
    """Where the method works on whole tensors; None: on the CPU.

    What is summed unseen, and noise of steps, is made on the CPU, of tensors that lie there.
    """
    return task.accelerator if method.on_device and not is_unseen and DpSgd.of(config.dp) is None else None


def _same(message: Buffer, assignment: Assignment) -> Buffer:
    """The message, if the round was not served with another one, or from another state, before. Raises PolicyError."""
    said = f"{header.digest(message)} {assignment.order.last}"
    policy.served_of(assignment).require_same(assignment.order.round, said)
    return message


def _fingerprint(folder: Path) -> Fingerprint:
    """Names, sizes and modification times of the files in a data folder without its id, or of a single file."""
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    stats = [(file.name, file.stat()) for file in files if file.is_file() and file.name != ID_FILE]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
