"""Bind each Flower run to one run of this site, so that a server cannot serve many runs' worth of one.

    <state-dir>/.flower-runs/<Flower run>    the name of the run that its first instruction named

The name of a run comes with every message, and what a site counts (rounds served, scores given) is counted by that
name. A resumed run has another Flower run and the same name, so several Flower runs may be bound to one name.

| an instruction of a Flower run names ... | result |
|---|---|
| a run, and it is the first one | bound |
| the same run | passes |
| another run | PolicyError |
"""

from __future__ import annotations

from pathlib import Path

from fedveil.errors import PolicyError, StateError
from fedveil.records.atomic_files import write_atomic

FOLDER = ".flower-runs"
_MOST_BYTES = 64


def check_flower_run(state_dir: Path, flower_run: int, run: str) -> None:
    """Raise PolicyError where the Flower run is bound to another run, StateError where its file cannot be read."""
    file = _file_of(state_dir, flower_run)
    try:
        with file.open("rb") as data:
            bound = data.read(_MOST_BYTES + 1).decode()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise StateError(f"{file}: expected the name of a run, found {type(error).__name__}; remove it") from None
    if bound != run:
        raise PolicyError(
            f"run: expected {bound!r}, which this Flower run began with at this site, found {run!r}; submit a new run"
        )


def bind_flower_run(state_dir: Path, flower_run: int, run: str) -> None:
    """Bind a Flower run to a run's name. Raises as `check_flower_run`, or StateError where it cannot be written."""
    check_flower_run(state_dir, flower_run, run)
    file = _file_of(state_dir, flower_run)
    if file.exists():
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(file, [run.encode()])
    except OSError as error:
        raise StateError(f"{file}: expected to write it, found {error}; free space") from error


def _file_of(state_dir: Path, flower_run: int) -> Path:
    return state_dir.expanduser() / FOLDER / str(flower_run)
