"""Whether a site runs already, from its state folder: a file that `fedveil site start` holds as long as it lives.

    <state folder>/NAME.running   held (flock); {"pid", "token"}: of who holds it, and of what that one started

The kernel lets go of it when the holder ends, however that came. What the holder started may live on then, and serve:
the token that its processes inherit tells which they are.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil import places
from fedveil.console.flower.processes import Processes, carrying
from fedveil.errors import ConfigError

_MOST_BYTES = 4096


def state_folder(state: Path) -> None:
    """Makes the state folder, which only this user can read then. Raises ConfigError."""
    try:
        places.private_folder(state).chmod(0o700)  # also one that was there before
    except OSError as error:
        raise _unusable(state, error) from None


@contextmanager
def alone(state: Path, name: str, processes: Processes) -> Iterator[None]:
    """Site `name` of this state folder is this process's as long as the block lasts. Raises ConfigError."""
    state_folder(state)
    try:
        file = (state / f"{name}.running").open("a+b")
    except OSError as error:
        raise _unusable(state, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _noted(file.name).get("pid")
            pid = pid if type(pid) is int else "?"  # somebody will type what is said here
            raise ConfigError(
                f"site {name}: expected it to run once from {state}, found it running already: fedveil site start is "
                f"process {pid}; nothing was started. End that one first (kill {pid}), or leave it"
            ) from None
        if left := [str(process.pid) for process in carrying(str(_noted(file.name).get("token", "")))]:
            raise ConfigError(
                f"site {name}: expected nothing of an earlier start to run, found processes {', '.join(left)}, which "
                f"a killed fedveil site start of {state} has left and which still serve; end them first: "
                f"kill {' '.join(left)}"
            )
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "token": processes.token}).encode())
        file.flush()
        yield


def _noted(file: str) -> dict[str, object]:
    try:
        with Path(file).open("rb") as noted:
            found = json.loads(noted.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unusable(state: Path, error: OSError) -> ConfigError:
    why = (error.strerror or "it cannot be used").lower()
    return ConfigError(
        f"--state-dir: expected a folder that this user can make and write to, found {state}: {why}; name another"
    )
