"""Bound the runs, bundles and contexts that a SuperNode keeps.

Flower keeps each run that it has seen, with its bundle of up to 10 MiB, until the SuperNode ends. So a server that
names a new run in each message would fill the site's memory. If a run was dropped, it is fetched again, with its
bundle, when its next message arrives.

Formal guarantees, once `limit_runs` has returned:
- the SuperNode keeps at most `MAX_RUNS` runs and `MAX_KEPT_BYTES` bytes of bundles, runs and settings, not counting the
  runs with a message or an unfinished task;
- it keeps no bundle that none of these runs names, and no context of another series.

| run | result |
|---|---|
| with a message or an unfinished task | kept: a client process reads it |
| least recently used, above a limit | dropped; what an app keeps in its context (`context.state`) is lost. FedVeil's
  own apps keep nothing there |
| brought by a message that was refused, or whose parts did not arrive | dropped |
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict
from typing import Any

MAX_RUNS = 64
MAX_KEPT_BYTES = 64 << 20
_BYTES_OF_A_VALUE = 64  # in a dict
_FINISHED = "finished"


def mark_used(state: Any, run_id: int) -> bool:
    """Mark a run as most recently used. Return whether the SuperNode has it. `state`: Flower's InMemoryNodeState."""
    with state.lock_run_store:
        if run_id not in state.run_store:
            return False
        state.run_store[run_id] = state.run_store.pop(run_id)
        return True


def forget_run(state: Any, run_id: int) -> None:
    """Drop a run that has no messages or unfinished tasks, and everything that only this run needs."""
    if not _is_open(state, run_id):
        _keep_only(state, [kept for kept in _stored_runs(state) if kept != run_id])


def limit_runs(state: Any) -> None:
    """Drop the least recently used runs if there are too many or their bundles are too large."""
    kept: list[int] = []
    bundles: set[str] = set()
    size, is_full = 0, False
    for run_id, run in reversed(_stored_runs(state).items()):
        size += _size(asdict(run)) + _size(_settings_of(state, run))
        if run.fab_hash not in bundles:
            size += _size_of_bundle(state, run.fab_hash)
        is_full = is_full or len(kept) >= MAX_RUNS or size > MAX_KEPT_BYTES
        if not is_full or _is_open(state, run_id):
            kept.append(run_id)
            bundles.add(run.fab_hash)
    _keep_only(state, kept)


def _is_open(state: Any, run_id: int) -> bool:
    with state.lock_msg_store:
        if any(entry.message.metadata.run_id == run_id for entry in state.msg_store.values()):
            return True
    return any(task.status.status != _FINISHED for task in state.get_tasks(run_ids=[run_id]))


def _stored_runs(state: Any) -> dict[int, Any]:
    with state.lock_run_store:
        return dict(state.run_store)


def _settings_of(state: Any, run: Any) -> Mapping[str, Any]:
    context = state.get_run_series_context(run.series_id)
    return {} if context is None else context.run_config


def _size_of_bundle(state: Any, fab_hash: str) -> int:
    bundle = state.get_fab(fab_hash)
    return 0 if bundle is None else len(bundle.content) + _size(bundle.verifications)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(entry) + _BYTES_OF_A_VALUE for key, entry in value.items())
    return 0


def _keep_only(state: Any, kept: Container[int]) -> None:
    with state.lock_run_store:
        for run_id in [stored for stored in state.run_store if stored not in kept]:
            del state.run_store[run_id]
        runs = [*state.run_store.values()]
    for lock, store, named in (
        (state.lock_fab_store, state.fab_store, {run.fab_hash for run in runs}),
        (state.lock_run_series_context_store, state.run_series_context_store, {run.series_id for run in runs}),
    ):
        with lock:
            for key in [stored for stored in store if stored not in named]:
                del store[key]
