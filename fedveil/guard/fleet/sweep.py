"""Clean up every 30 s: incomplete replies, refusal counts, and Flower's data on ended runs.

Flower drops the objects of an ended run only when an operator lists runs, stops one or follows its log, and its
database file never shrinks.

| case | result |
|---|---|
| a run has ended and has objects | Flower's own `cleanup_run` |
| a run is active | its objects stay, and the database file is unchanged |
| no run is active, and 256 MiB of the file are free | the file is rewritten (VACUUM); calls wait meanwhile |
| the state is in memory | there is no file |
| the database is locked | the next sweep tries again |
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from logging import ERROR, INFO
from typing import Any

from flwr.common.constant import Status
from flwr.supercore import log

from fedveil.guard import fleet_limits as limits
from fedveil.guard.flower import link_states


class PeriodicSweep:
    """A thread that calls `sweep` every `seconds`; errors are logged, and the next sweep still runs."""

    def __init__(self, sweep: Callable[[], None], seconds: float = limits.SWEEP_SECONDS) -> None:
        self._sweep, self._seconds = sweep, seconds
        self._end = threading.Event()

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        threading.Thread(target=self._run, name="fedveil-sweep", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread after the current sweep."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self._sweep()
            except Exception as error:
                log(ERROR, "the fleet port's cleanup failed", exc_info=error)


def clean_up_runs(state: Any) -> None:
    """Remove the messages and objects of runs that have ended."""
    for run_id in link_states.runs_with_objects(state):
        status = state.get_run_status({run_id}).get(run_id)
        if status is not None and status.status == Status.FINISHED:
            log(INFO, "the objects of run %s are removed", run_id)
            state.cleanup_run(run_id)


def shrink_database(state: Any) -> None:
    """Rewrite Flower's database if much of it is free and no run is active."""
    engine = getattr(state, "_engine", None)
    if engine is None or not engine.url.database or engine.url.database == ":memory:":
        return
    if state.get_run_info(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING], limit=1):
        return
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        free = connection.exec_driver_sql("PRAGMA freelist_count").scalar()
        size = connection.exec_driver_sql("PRAGMA page_size").scalar()
        if free * size > limits.MAX_FREE_DATABASE_BYTES:
            log(INFO, "the database has %s free bytes; compacting it", free * size)
            connection.exec_driver_sql("VACUUM")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
