"""Bind each Flower run to one run at this site, so that a server cannot use one Flower run as several runs.

    <state-dir>/.flower-runs/<Flower run>    {"checksum": ..., "run": the run's name in the first instruction}

Every message contains the run's name, and the site counts served rounds and reported scores by that name.
A resumed run has a new Flower run and the same name, so several Flower runs may be bound to one name.

| an instruction in a Flower run names ... | result |
|---|---|
| a run, in the first instruction | bound |
| the same run | passes |
| a different run | PolicyError |
"""

from __future__ import annotations

from pathlib import Path

from fedveil.errors import PolicyError, StateError
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

FOLDER = ".flower-runs"
_MOST_BYTES = 1024


def check_flower_run(state_dir: Path, flower_run: int, run: str) -> None:
    """Raise PolicyError if the Flower run is bound to a different run, StateError if its file is unreadable."""
    file = _file_of(state_dir, flower_run)
    try:
        with file.open("rb") as data:
            bound = str(read_checksummed(data.read(_MOST_BYTES + 1))["run"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError) as error:
        raise StateError(
            f"{file}: cannot read the name of the run with its checksum ({type(error).__name__}); restore it from a "
            "backup, or submit a new run"
        ) from None
    if bound != run:
        raise PolicyError(
            f"run: this Flower run began with {bound!r} at this site, but now names {run!r}; submit a new run"
        )


def bind_flower_run(state_dir: Path, flower_run: int, run: str) -> None:
    """Bind a Flower run to a run name. Raises like `check_flower_run`, or StateError if the file is not writable."""
    check_flower_run(state_dir, flower_run, run)
    file = _file_of(state_dir, flower_run)
    if file.exists():
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(file, write_checksummed({"run": run}))
    except OSError as error:
        raise StateError(f"{file}: cannot be written: {error}; free some disk space") from error


def _file_of(state_dir: Path, flower_run: int) -> Path:
    return state_dir.expanduser() / FOLDER / str(flower_run)
