"""Fix whether the private runs of a site protect rows or units (`dp.unit-column`). One site never does both.

    <state-dir>/.ledger/unit     {"checksum": ..., "fedveil-unit": 1, "unit": "row" or "unit"}

A charge for a row bounds nothing for a unit with several rows, so a ledger with both kinds would have no meaning for a
unit. The first private run of the state folder decides. A state folder that has charges and no such file has those
of rows: earlier versions had no units.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from fedveil import paths
from fedveil.errors import BudgetError, StateError
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

_VERSION = 1
_FILE = "unit"
_WORDS = {"row": "one row", "unit": "a unit (dp.unit-column)"}


def require_one_unit(state_dir: Path, by_unit: bool) -> None:
    """Note what this private run protects.

    Raises:
        BudgetError: earlier private runs of this state folder protected the other.
        StateError: the file cannot be read or written.
    """
    asked = "unit" if by_unit else "row"
    folder = paths.private_folder(state_dir.expanduser() / ".ledger")
    file = folder / _FILE
    with (folder / f"{_FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if file.exists():
            kept = _read(file)
        else:
            kept = "row" if any(folder.glob("*.json")) else asked
            try:
                write_atomic(file, write_checksummed({"fedveil-unit": _VERSION, "unit": kept}))
            except OSError as error:
                raise StateError(f"{file}: cannot be written: {error}; free space") from error
    if kept != asked:
        raise BudgetError(
            f"dp.unit-column: expected a run that protects {_WORDS[kept]}, like the earlier private runs of this state "
            f"folder, found one that protects {_WORDS[asked]}, whose epsilon the ledger could not count together with "
            "theirs; agree on it with the site"
        )


def _read(file: Path) -> str:
    try:
        content = read_checksummed(file.read_bytes())
        if content["fedveil-unit"] != _VERSION or content["unit"] not in _WORDS:
            raise ValueError("another version or unit")
        return str(content["unit"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{file}: expected the unit of this site's private runs, version {_VERSION}, found none that can be read "
            f"({type(error).__name__}); restore it from a backup"
        ) from None
