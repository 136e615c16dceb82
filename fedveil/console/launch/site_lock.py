"""Detect whether a site is already running, by a lock file that `fedveil site start` holds while it runs.

    <state folder>/NAME.running   locked (flock); {"pid", "token"}: the holder's PID, and the token of its processes

The kernel releases the lock when the holder ends for any reason. Processes that the holder started may
survive and keep serving. They have inherited the token, which identifies them.

    <state folder>/restore.lock   locked (flock) by a restore alone, or by the folder's running sites together
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil import paths
from fedveil.console.flower.processes import ProcessGroup, find_marked_processes
from fedveil.errors import ConfigError

RESTORE_LOCK = "restore.lock"
_MOST_BYTES = 4096


def state_folder(state: Path) -> None:
    """Create the state folder, readable only by this user. Raises ConfigError if that is impossible."""
    try:
        paths.private_folder(state).chmod(0o700)  # also for an existing folder
    except OSError as error:
        raise _unusable(state, error) from None


@contextmanager
def hold_site_lock(state: Path, name: str, processes: ProcessGroup) -> Iterator[None]:
    """Hold the lock of site `name` in this state folder for the `with` block. Raises ConfigError if it is taken."""
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
            pid = pid if type(pid) is int else "?"  # users run the command in this message
            raise ConfigError(
                f"site {name}: already running from {state}: fedveil site start is process {pid}, and only one may "
                f"run; nothing was started. Stop that process first (kill {pid}), or keep it running"
            ) from None
        if left := [str(process.pid) for process in find_marked_processes(str(_noted(file.name).get("token", "")))]:
            raise ConfigError(
                f"site {name}: expected no processes of an earlier start, found {', '.join(left)}, left running by "
                f"a killed fedveil site start with {state}; stop them first: kill {' '.join(left)}"
            )
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "token": processes.token}).encode())
        file.flush()
        yield


@contextmanager
def hold_folder(state: Path, *, to_restore: bool) -> Iterator[None]:
    """Hold a state folder for a restore alone, or together with its other sites.

    Raises ConfigError if a restore, or for a restore a site, holds it, or if the lock cannot be opened.
    """
    state_folder(state)
    try:
        descriptor = os.open(state / RESTORE_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(state, error) from None
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if to_restore else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            found = "a running site, or another restore" if to_restore else "a restore in progress"
            raise ConfigError(
                f"--state-dir: expected no other program that uses {state}, found {found}; wait until it has ended, "
                "or stop it"
            ) from None
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _noted(file: str) -> dict[str, object]:
    try:
        with Path(file).open("rb") as noted:
            content = json.loads(noted.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _unusable(state: Path, error: OSError) -> ConfigError:
    why = (error.strerror or "it cannot be used").lower()
    return ConfigError(
        f"--state-dir: expected a folder that this user can create and write to, found {state}: {why}; name another"
    )
