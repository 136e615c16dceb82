"""The runs of a restored state folder whose served rounds may lack later ones.

    <state-dir>/.ledger/restored-runs    {RUN/SITE: whether it is closed even if nothing was lost}, from a restore
                                         until `fedveil site ledger recover`

`recover` closes them, because a server could otherwise have rounds served again. That includes runs whose last round
was served: a resume may extend a run. If the site says that it did not run since the backup (`--nothing-lost`), only
two kinds are closed: those without `secure.json`, because the site could agree to a second sum of its last round, and
those whose served rounds at the site differed from the backup's.
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
    noted = _noted(state)
    merged = {**noted, **{run: noted.get(run, False) or always for run, always in runs.items()}}
    write_atomic(_file(state), json.dumps(merged, sort_keys=True).encode())


def close_noted_runs(state: Path, is_complete: bool = False) -> int:
    """Close the noted runs, and return their number. Raises OSError or StateError.

    Args:
        is_complete: the site did not run since the backup, so only those are closed that are noted as such.
    """
    runs = [run for run, always in _noted(state).items() if always or not is_complete]
    close_runs(state, runs)
    return len(runs)


def forget_noted_runs(state: Path) -> None:
    """Remove the note, once the ledger permits runs again. Raises OSError."""
    _file(state).unlink(missing_ok=True)


def close_runs(state: Path, runs: Iterable[str]) -> None:
    """Refuse these runs from now on. Raises OSError."""
    for run in runs:
        with suppress(StateError):  # the site refuses a run whose file is damaged anyway
            ReplayGuard(state.expanduser() / run).close_restored()


def _noted(state: Path) -> dict[str, bool]:
    file = _file(state)
    try:
        content = json.loads(file.read_bytes()) if file.exists() else {}
        return {str(run): bool(always) for run, always in content.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(
            f"{file}: expected a list of runs, found none that can be read ({error}); purge every run of this folder "
            "(fedveil site purge), and remove the file"
        ) from None


def _file(state: Path) -> Path:
    return state.expanduser() / LEDGER / _FILE
