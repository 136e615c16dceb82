"""What Flower leaves of runs that have ended, and a sweep that fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from flwr.common.constant import SubStatus

from fedveil.guard import fleet_limits as limits
from fedveil.guard.fleet import sweep
from fedveil.guard.flower import link_states
from tests.fedveil.guard.fleet.conftest import Fleet
from tests.fedveil.guard.flower.states import Superlink


def end_run(superlink: Superlink) -> None:
    task = superlink.state.get_run_info(run_ids=[superlink.run])[0].primary_task_id
    superlink.state.finish_task(task, SubStatus.COMPLETED, "")


def test_objects_of_an_ended_run_go_and_those_of_an_active_one_stay(superlink: Superlink) -> None:
    before = len(superlink.state.object_store)
    sweep.clean_up_runs(superlink.state)
    assert len(superlink.state.object_store) == before > 0
    end_run(superlink)
    assert len(superlink.state.object_store) == before  # Flower leaves them until somebody looks at the run
    sweep.clean_up_runs(superlink.state)
    assert len(superlink.state.object_store) == 0
    assert superlink.state.get_message_ids_from_run_id(superlink.run) == set()
    assert link_states.runs_with_objects(superlink.state) == set()


def test_the_file_becomes_small_once_no_run_is_active(
    sql_superlink: Superlink, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, state = tmp_path / "state.db", sql_superlink.state
    monkeypatch.setattr(limits, "MAX_FREE_DATABASE_BYTES", 1 << 20)
    with state.session() as session:
        session.connection().exec_driver_sql("CREATE TABLE filler (content BLOB)")
        session.connection().exec_driver_sql("INSERT INTO filler VALUES (zeroblob(8000000))")
    with state.session() as session:
        session.connection().exec_driver_sql("DROP TABLE filler")
    size = lambda: file.stat().st_size + file.with_name("state.db-wal").stat().st_size  # noqa: E731
    large = size()
    sweep.shrink_database(state)
    assert size() >= large  # a run is active
    end_run(sql_superlink)
    sweep.shrink_database(state)
    assert size() < large - 7_000_000
    small = size()
    sweep.shrink_database(state)
    assert size() == small


def test_a_state_in_memory_has_no_file() -> None:
    superlink = Superlink()
    end_run(superlink)
    sweep.shrink_database(superlink.state)


def test_a_sweep_that_fails_is_followed_by_the_next() -> None:
    calls, done = list[int](), threading.Event()

    def fails() -> None:
        calls.append(1)
        if len(calls) == 3:
            done.set()
        raise KeyError("x")

    periodic = sweep.PeriodicSweep(fails, seconds=0.01)
    periodic.start()
    assert done.wait(10)
    periodic.stop()


def test_one_sweep_does_all(fleet: Fleet) -> None:
    fleet.pull(0)
    end_run(fleet.superlink)
    fleet.port.sweep()
    assert len(fleet.state.object_store) == 0
