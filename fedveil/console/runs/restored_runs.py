"""The runs of a restored state folder whose served rounds come from the backup, and may lack later rounds.

    <state-dir>/.ledger/restored-runs    a JSON list of RUN/SITE, from a restore until `fedveil site ledger recover`

`recover` closes them, because a server could otherwise have rounds served again. They stay open only if the site says
that it did not run since the backup (`--nothing-lost`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedveil.client_app.state.client_state import LEDGER
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.errors import StateError
from fedveil.records.atomic_files import write_atomic

__all__ = ["close_noted_runs", "close_runs", "forget_noted_runs", "note_runs"]

_FILE = "restored-runs"


def note_runs(state: Path, runs: Iterable[str]) -> None:
    """Note the runs, named RUN/SITE, in addition to those that are noted already. Raises OSError or StateError."""
    write_atomic(_file(state), json.dumps(sorted({*_noted(state), *runs})).encode())


def close_noted_runs(state: Path) -> int:
    """Close the noted runs, and return their number. Raises OSError or StateError."""
    runs = _noted(state)
    close_runs(state, runs)
    forget_noted_runs(state)
    return len(runs)


def forget_noted_runs(state: Path) -> None:
    """Leave the noted runs as they are. Raises OSError."""
    _file(state).unlink(missing_ok=True)


def close_runs(state: Path, runs: Iterable[str]) -> None:
    """Refuse these runs from now on, unless they have ended. Raises OSError."""
    for run in runs:
        guard = ReplayGuard(state.expanduser() / run)
        with suppress(StateError):  # the site refuses a run whose file is damaged anyway
            if not guard.ended:
                guard.close_restored()


def _noted(state: Path) -> list[str]:
    file = _file(state)
    try:
        return [str(run) for run in json.loads(file.read_bytes())] if file.exists() else []
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(
            f"{file}: expected a list of runs, found none that can be read ({error}); purge every run of this folder "
            "(fedveil site purge), and remove the file"
        ) from None


def _file(state: Path) -> Path:
    return state.expanduser() / LEDGER / _FILE
