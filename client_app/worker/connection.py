"""The client process's connection to one worker: send a round's message and receive the upload.

The registry (registry.py) finds or starts the worker; the connection uses only the worker's socket.

| a worker ... | raises |
|---|---|
| reports that the round failed | ClientRoundError with the type of the worker's error |
| returns no upload within the instruction's time (stopped, hung, too slow) | RoundOverdueError |
| ends, or breaks the connection | ConnectionLostError |
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import IO

import grpc

from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.unix_sockets import is_listening, socket_address
from fedveil.errors import ConfigError, FedVeilError, WorkerError
from fedveil.wire.chunking import slice_message

NAME = "fedveil.Worker"  # name of the gRPC service (service.py)
CHUNK_BYTES = 1 << 20
_STOP_SECONDS = 10.0
_OPTIONS = (("grpc.max_receive_message_length", 4 * CHUNK_BYTES), ("grpc.enable_http_proxy", 0))

log = getLogger("fedveil.link")


class ClientRoundError(FedVeilError):
    """A round failed in the worker. `kind` is the error's type name, `trace` the file with its traceback."""

    def __init__(self, kind: str, text: str, trace: Path | None = None) -> None:
        super().__init__(text)
        self.kind, self.trace = kind, trace


class RoundOverdueError(ClientRoundError):
    """A round exceeded the instruction's time; its worker may still be running it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WorkerError.__name__, deadline_reason(seconds))


class ConnectionLostError(FedVeilError):
    """The connection to a worker broke. The text says when."""


@dataclass(frozen=True)
class WorkerRecord:
    """A worker: its id, process id, owner, app digest, run key ("" = a spare), and start time (epoch seconds)."""

    id: str
    pid: int
    owner: OwnerProcess
    app: str
    key: str
    since: float


@dataclass(frozen=True)
class Connection:
    """A connection to one worker.

    Attributes:
        worker: the connected worker.
        socket: the socket on which the worker listens.
        log: the file with its errors' tracebacks.
    """

    worker: WorkerRecord
    socket: Path
    log: Path

    @contextlib.contextmanager
    def open_channel(self) -> Iterator[grpc.Channel]:
        """Open a gRPC channel to the worker."""
        with (
            socket_address(self.socket) as path,
            grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel,
        ):
            yield channel

    def run_round(self, spool: IO[bytes], assignment: ClientAssignment, end: float) -> list[bytes]:
        """Run a round in the worker, at most until `end` (time.monotonic). Return the upload in slices.

        Raises:
            ClientRoundError: the round failed; RoundOverdueError: it did not finish in time.
            ConnectionLostError: the worker is gone, or breaks the connection.
        """
        started, owner = time.monotonic(), (("owner", str(self.worker.owner)),)
        try:
            with self.open_channel() as channel:
                take = channel.stream_stream(f"/{NAME}/Take")
                left = max(end - started, 0.0)
                answers = take(_request(spool, self.worker, assignment), metadata=owner, timeout=left)
                head = json.loads(next(answers))
                upload = list(slice_message(answers))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.ABORTED:
                raise ClientRoundError(**json.loads(error.details()), trace=self.log) from None
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise RoundOverdueError(assignment.order.seconds) from None
            when = f"after {time.monotonic() - started:.1f} s ({error.code().name})"
            raise ConnectionLostError(when) from None
        log.info("worker %s: %s", self.worker.pid, head)
        return upload

    def stop(self, owner: OwnerProcess) -> None:
        """Ask the worker to end, and wait until it has ended.

        Raises:
            ConfigError: another SuperNode still needs it.
            WorkerError: it is running a client round, or does not end in time.
        """
        pid = self.worker.pid
        try:
            with self.open_channel() as channel:
                channel.unary_unary(f"/{NAME}/Stop")(b"", metadata=(("owner", str(owner)),))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                raise ConfigError(
                    f"state-dir: two SuperNodes use it for site {self.socket.parent.name}, this one and process "
                    f"{self.worker.owner.pid}; stop the other one, or give this one another state-dir"
                ) from None
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise WorkerError(
                    f"worker-memory-mb: the worker of another run (process {pid}) is in a client round, so its memory "
                    "cannot be freed; wait for that run, or remove the limit"
                ) from None
            log.info("worker %s was asked to stop: %s", pid, error.code().name)
        if not self.wait_until_gone(_STOP_SECONDS):
            raise WorkerError(f"worker {pid}: it did not end within {_STOP_SECONDS:g} s; kill it")

    def wait_until_gone(self, seconds: float) -> bool:
        """Return whether the worker stops listening within `seconds`."""
        deadline = time.monotonic() + seconds
        while is_listening(self.socket):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def deadline_reason(seconds: float) -> str:
    """Return the reason for ending a client round at its deadline."""
    return (
        f"client round: it took more than {seconds:g} s and was ended, because the server has stopped waiting for the "
        "upload; raise cohort.deadline-seconds, or train less"
    )


def _request(spool: IO[bytes], worker: WorkerRecord, assignment: ClientAssignment) -> Iterator[bytes]:
    size = spool.seek(0, 2)
    spool.seek(0)
    yield json.dumps({"assignment": assignment.to_json(), "key": worker.key, "bytes": size}).encode()
    while chunk := spool.read(CHUNK_BYTES):
        yield chunk
