"""One participation of this site: decode, train, keep what is private, encode. No Flower in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from client_app.assignment import Assignment
from client_app.private import PrivateStore
from fedveil import tasks
from fedveil.errors import ConfigError
from fedveil.exchange import Exchange
from fedveil.method import RoundContext
from fedveil.tasks.base import Rows, Share, Task, Watch, unwatched
from fedveil.wire.codec import Buffer

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Turn:
    """What a turn gave.

    Attributes:
        parts: the upload, to be joined; dense parts are views of what was trained.
        load_seconds: spent on the base model and the rows before the training; next to nothing once they are held.
    """

    parts: list[Buffer]
    load_seconds: float


class Turns:
    """The turns of one site in one run. Base model and prepared rows stay between them.

    Two turns must agree in everything that the task is made from; whoever keeps an instance sees to that. Rows are
    read anew where their files have changed.
    """

    def __init__(self) -> None:
        self._loaded: tuple[Task, Exchange] | None = None
        self._rows: tuple[Fingerprint, Rows] | None = None

    def take(self, receive: Callable[[], Buffer], assignment: Assignment, watch: Watch = unwatched) -> Turn:
        """One turn. `receive` gives the message; nobody else holds it then.

        The next private state is prepared on disk before the upload is returned, and is not yet committed.
        """
        started = time.perf_counter()
        order, config = assignment.order, assignment.config
        task, exchange = self._task_and_exchange(assignment)
        rows = self._prepared(task, assignment)
        load_seconds = time.perf_counter() - started
        store = PrivateStore.of(assignment.site.state_dir, order.run, assignment.name)
        secret = store.secret(config.run.seed, assignment.name, config.run.deterministic)
        ctx = RoundContext(order.round, assignment.name, order.is_new, secret)
        local = task.local(rows, ctx.rng("batches"), watch)
        private, parts = exchange.participate(receive(), store.load(), local, ctx)
        store.prepare(private)
        return Turn(parts, load_seconds)

    def _task_and_exchange(self, assignment: Assignment) -> tuple[Task, Exchange]:
        if self._loaded is None:
            import strategies

            order = assignment.order
            method = strategies.create_from_json(order.method, order.fields)
            task = tasks.load(assignment.config, method.adapter, assignment.site.device)
            self._loaded = task, Exchange(method, order.method, task.spec)
        return self._loaded

    def _prepared(self, task: Task, assignment: Assignment) -> Rows:
        if not assignment.data:
            raise ConfigError(
                'data: expected a folder in the node config ("data") or the run config (task.data), found none'
            )
        site, folder = assignment.site, Path(assignment.data)
        found = _fingerprint(folder)
        if self._rows is None or self._rows[0] != found:
            share = Share(site.partition_id, site.num_partitions) if site.num_partitions > 1 else None
            self._rows = found, task.prepare(task.examples(folder, "train", share))
        return self._rows[1]


def _fingerprint(folder: Path) -> Fingerprint:
    """Names, sizes and times of the files in a data folder, or of the one file."""
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
