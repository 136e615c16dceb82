"""The runs that a SuperNode keeps: few, the last ones, and those that a client process still reads."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory

from fedveil.guard import kept_runs
from fedveil.guard.kept_runs import MAX_RUNS, forget_run, limit_runs, mark_used
from tests.fedveil.guard.test_message_intake import large

MIB = 1 << 20


@pytest.fixture
def state() -> Any:
    return NodeStateFactory(ObjectStoreFactory()).state()


def store(state: Any, run_id: int, content: bytes = b"", settings: int = 0, series: int = 0, name: str = "") -> str:
    """Store a run as Flower's loop does, and return the hash of its bundle."""
    digest = hashlib.sha256(content or str(run_id).encode()).hexdigest()
    run = dataclasses.replace(Run.create_empty(run_id), fab_hash=name or digest, series_id=series or run_id)
    state.set_run_series_context(
        run.series_id, Context(run_id, 1, {}, RecordDict(), {"a": "x" * settings}, series_id=run.series_id)
    )
    state.store_run(run)
    state.store_fab(Fab(digest, content or str(run_id).encode(), {}))
    return digest


def kept(state: Any) -> list[int]:
    return [*state.run_store]


def test_the_runs_used_last_are_kept(state: Any) -> None:
    for run_id in range(1, MAX_RUNS + 1):
        store(state, run_id)
    assert mark_used(state, 1)
    assert not mark_used(state, MAX_RUNS + 1)
    limit_runs(state)
    assert len(kept(state)) == MAX_RUNS
    store(state, MAX_RUNS + 1)
    limit_runs(state)
    assert kept(state) == [*range(3, MAX_RUNS + 1), 1, MAX_RUNS + 1]
    assert {*state.run_series_context_store} == {*kept(state)}
    assert {*state.fab_store} == {state.get_run(run_id).fab_hash for run_id in kept(state)}


def test_the_bytes_of_bundles_and_settings_are_bounded(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_runs, "MAX_KEPT_BYTES", 10 * MIB)
    for run_id in range(1, 8):
        store(state, run_id, bytes([run_id]) * 3 * MIB)
        limit_runs(state)
    assert kept(state) == [5, 6, 7]
    store(state, 8, settings=5 * MIB)
    limit_runs(state)
    assert kept(state) == [7, 8]
    for run_id in range(9, 20):
        store(state, run_id, b"one" * MIB)  # one bundle for all
        limit_runs(state)
    assert kept(state) == [*range(8, 20)]
    assert len(state.fab_store) == 2


def test_a_bundle_that_no_run_names_is_dropped(state: Any) -> None:
    store(state, 1, name="another")
    limit_runs(state)
    assert (kept(state), state.fab_store) == ([1], {})


def test_a_run_that_a_client_process_reads_is_kept(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_runs, "MAX_RUNS", 1)
    message = large(1)
    message.metadata.__dict__["_run_id"] = 1
    state.store_message(message)
    hashes = {run_id: store(state, run_id) for run_id in (1, 2, 3)}
    task = state.create_task(task_type="flwr-clientapp", run_id=2, fab_hash=hashes[2])
    assert task is not None
    for run_id in (1, 2):
        forget_run(state, run_id)
    limit_runs(state)
    assert kept(state) == [1, 2, 3]
    state.delete_messages(message_ids=[message.metadata.message_id])
    state.finish_task(task, "failed", "")
    limit_runs(state)
    assert kept(state) == [3]


def test_a_forgotten_run_leaves_what_another_needs(state: Any) -> None:
    digest = store(state, 1, b"one", series=9)
    assert store(state, 2, b"one", series=9) == digest
    store(state, 3)
    forget_run(state, 2)
    forget_run(state, 3)
    assert (kept(state), [*state.fab_store], [*state.run_series_context_store]) == ([1], [digest], [9])
    forget_run(state, 1)
    assert (kept(state), state.fab_store, state.run_series_context_store) == ([], {}, {})
