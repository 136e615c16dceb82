"""Run a site's round in its worker: find or start the worker, send it the message, return the upload.

A worker that dies during a round (SIGKILL, out of memory) is replaced once, and the round is repeated from the same
private state, which the instruction names (fedveil/client_app/state/client_state.py). The cause of its end is
determined from its exit signal, if this process started it, and from its memory record; the site's log and its list of
rounds report it.

| a worker ... | result |
|---|---|
| ends before it listens | a second worker is started |
| ends during the round, or while it replies | a second worker is started and gets the message again |
| ends a second time | WorkerDiedError with the cause |
| reports that the round failed | ClientRoundError with the error's type; the round is not repeated |
| returns no upload in time (stopped, hung, too slow) | it is killed, then RoundOverdueError; the round is not
  repeated |
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from logging import getLogger
from pathlib import Path
from typing import IO

from fedveil import paths
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.worker.connection import ConnectionLostError, RoundOverdueError
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.errors import StateError, WorkerError
from fedveil.wire.chunking import SLICE_BYTES

_TRIES = 2
_IN_MEMORY_BYTES = 8 * SLICE_BYTES  # a longer message waits on disk while the worker trains

log = getLogger("fedveil.link")


def run_round_in_worker(
    message: Iterable[bytes], assignment: ClientAssignment, owner: OwnerProcess, root: Path | None = None
) -> list[bytes]:
    """Run this site's round in its worker. Return the upload in slices.

    Raises:
        ClientRoundError: the round failed; RoundOverdueError: it exceeded the instruction's time.
        WorkerDiedError: the worker ended twice.
        WorkerError: it did not start in time, or did not end when it had to.
        ConfigError: this site's worker belongs to another running SuperNode.
    """
    end = time.monotonic() + assignment.order.seconds
    registry = WorkerRegistry(assignment.site.state_dir, assignment.name)
    paths.private_folder(registry.path)
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, "w+b", dir=str(registry.path)) as spool:
        try:
            spool.writelines(message)
        except OSError as error:
            raise StateError(f"{registry.path}: cannot store the message: {error}; free some disk space") from error
        for left in reversed(range(_TRIES)):
            try:
                upload = _run_once(registry, spool, assignment, owner, root, end)
                break
            except WorkerError as error:
                log.warning("%s", error)
                registry.failed(assignment.described(), str(error))
                if not left:
                    raise
    return upload


def _run_once(
    registry: WorkerRegistry,
    spool: IO[bytes],
    assignment: ClientAssignment,
    owner: OwnerProcess,
    root: Path | None,
    end: float,
) -> list[bytes]:
    """Run the round in one worker. Raises WorkerError if the worker is gone, ClientRoundError like the caller."""
    connection = registry.find_or_start(assignment, owner, root)
    try:
        return connection.run_round(spool, assignment, end)
    except RoundOverdueError as error:
        registry.kill(connection.worker)
        registry.failed(assignment.described(), str(error))
        raise
    except ConnectionLostError as error:
        raise registry.explain_loss(connection, str(error)) from None
