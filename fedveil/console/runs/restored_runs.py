"""The runs of a restored state folder whose served rounds come from the backup, and may lack later rounds.

    <state-dir>/.ledger/restored-runs    {RUN/SITE: whether its secure.json was left out}, from a restore until
                                         `fedveil site ledger recover`

`recover` closes them, because a server could otherwise have rounds served again. If the site says that it did not run
since the backup (`--nothing-lost`), those without `secure.json` alone are closed: without it, the site could agree to
a second sum of its last round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from fedveil.client_app.state.client_state import LEDGER
from fedveil.client_app.state.replay_guard import ReplayGuard
from fedveil.errors import StateError
from fedveil.records.atomic_files import write_atomic

__all__ = ["close_noted_runs", "close_runs", "forget_noted_runs", "note_runs"]

_FILE = "restored-runs"


def note_runs(state: Path, runs: Mapping[str, bool]) -> None:
    """Note the runs, by RUN/SITE, in addition to those that are noted already. Raises OSError or StateError."""
    write_atomic(_file(state), json.dumps({**_noted(state), **runs}, sort_keys=True).encode())


def close_noted_runs(state: Path, is_complete: bool = False) -> int:
    """Close the noted runs, and return their number. Raises OSError or StateError.

    Args:
        is_complete: the site did not run since the backup, so only runs without their `secure.json` are closed.
    """
    runs = [run for run, is_secure in _noted(state).items() if is_secure or not is_complete]
    close_runs(state, runs)
    return len(runs)


def forget_noted_runs(state: Path) -> None:
    """Remove the note, once the ledger permits runs again. Raises OSError."""
    _file(state).unlink(missing_ok=True)


def close_runs(state: Path, runs: Iterable[str]) -> None:
    """Refuse these runs from now on, unless they have ended. Raises OSError."""
    for run in runs:
        guard = ReplayGuard(state.expanduser() / run)
        with suppress(StateError):  # the site refuses a run whose file is damaged anyway
            if not guard.ended:
                guard.close_restored()


def _noted(state: Path) -> dict[str, bool]:
    file = _file(state)
    try:
        content = json.loads(file.read_bytes()) if file.exists() else {}
        return {str(run): bool(is_secure) for run, is_secure in content.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{file}: expected a list of runs, found none that can be read ({error}); purge every run of this folder "
            "(fedveil site purge), and remove the file"
        ) from None


def _file(state: Path) -> Path:
    return state.expanduser() / LEDGER / _FILE
