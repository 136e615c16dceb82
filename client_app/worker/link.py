"""The client process's link to the worker: it finds or starts it, sends it the message and receives the upload.

A worker that dies in a turn (SIGKILL, out of memory) is replaced once, and the turn is repeated from the same private
state, which the order names (fedveil/client_app/site/private.py). What ended it is found out from its exit signal, if
it was started here, and from what it noted of its memory; the site's log and its record of turns say it.

| a worker ... | what happens |
|---|---|
| ends before it listens | a second one is started |
| ends in the turn, or while it replies | a second one is started and gets the message again |
| ends a second time | DiedError with what ended it |
| answers that the turn failed | TurnError with the kind of the error; the turn is not repeated |
| has no upload in the order's time (stopped, hung, too slow) | it is killed, and TurnError; the turn is not repeated |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from logging import getLogger
from pathlib import Path
from typing import IO

import grpc

from fedveil import places
from fedveil.client_app.site.assignment import Assignment
from fedveil.client_app.worker.cards import Card, DiedError, Folder, app_digest
from fedveil.client_app.worker.owner import Owner
from fedveil.client_app.worker.service import CHUNK_BYTES, NAME
from fedveil.client_app.worker.sockets import address, listens
from fedveil.errors import ConfigError, FedVeilError, StateError, WorkerError
from fedveil.models import tiny
from fedveil.records import process
from fedveil.wire.slices import SLICE_BYTES, sliced

_TRIES = 2
_IN_MEMORY_BYTES = 8 * SLICE_BYTES  # a longer message waits on disk while the worker trains
_STOP_SECONDS = 10.0
_DYING_SECONDS = 2.0
_OPTIONS = (("grpc.max_receive_message_length", 4 * CHUNK_BYTES), ("grpc.enable_http_proxy", 0))

log = getLogger("fedveil.link")


class TurnError(FedVeilError):
    """A turn failed in the worker. `kind` is the name of the error there, `trace` the file that has its traceback."""

    def __init__(self, kind: str, text: str, trace: Path | None = None) -> None:
        super().__init__(text)
        self.kind, self.trace = kind, trace


def take_part(message: Iterable[bytes], assignment: Assignment, owner: Owner, root: Path | None = None) -> list[bytes]:
    """Runs this site's turn in its worker. Returns the upload in slices.

    Raises:
        TurnError: the turn failed, or was not over in the order's time.
        DiedError: the worker ended twice.
        WorkerError: it did not start in time, or not end when it had to.
        ConfigError: this site's worker belongs to another SuperNode that runs.
    """
    end = time.monotonic() + assignment.order.seconds
    folder = Folder(assignment.site.state_dir, assignment.name)
    key = run_key(assignment, root)
    places.private_folder(folder.path)
    with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES, "w+b", dir=str(folder.path)) as spool:
        try:
            spool.writelines(message)
        except OSError as error:
            raise StateError(f"{folder.path}: expected to keep the message, found {error}; free space") from error
        for left in reversed(range(_TRIES)):
            try:
                card = find(folder, assignment, key, owner, root)
                upload = _handed_over(spool, folder, card, assignment, end)
                break
            except WorkerError as error:
                log.warning("%s", error)
                folder.failed(assignment.described(), str(error))
                if not left:
                    raise
    return upload


def run_key(assignment: Assignment, root: Path | None = None) -> str:
    """16 hex digits of all that a worker is made for: app, run, method, task, training, base model, data, devices."""
    config, site = assignment.config, assignment.site
    bundled = tiny.folder(config.task.name) if config.task.model == "tiny" else None
    model = bundled or Path(config.task.model).expanduser()
    files = sorted(model.iterdir()) if model.is_dir() else []
    base = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    made_for = [
        app_digest(root), assignment.order.run, assignment.order.method, assignment.order.fields,
        config.task.model_dump(), config.train.model_dump(), config.run.seed, config.run.deterministic, base,
        assignment.data, site.device, site.processes, site.shard_base,
        site.partition_id, site.num_partitions,
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(made_for).encode(), digest_size=8).hexdigest()


def find(folder: Folder, assignment: Assignment, key: str, owner: Owner, root: Path | None = None) -> Card:
    """The worker for this run: the run's own, or else a spare, or else a new one."""
    with folder.locked():
        cards = folder.living()
        for card in [card for card in cards if not card.owner.is_(owner)]:
            _end(folder, card, owner)
            cards.remove(card)
        for card in cards:
            if card.key == key:
                return card
        app = app_digest(root)
        for card in cards:
            if not card.key and card.app == app:
                return folder.adopt(card, key)
        if assignment.site.worker_memory_mb:
            for card in cards:
                _end(folder, card, owner)
        return folder.start(assignment.site, owner, key, root)


def _end(folder: Folder, card: Card, owner: Owner) -> None:
    """Asks a worker to end, and waits until it does. Raises ConfigError if another SuperNode still needs it."""
    try:
        with channel(folder, card) as link:
            link.unary_unary(f"/{NAME}/Stop")(b"", metadata=(("owner", str(owner)),))
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.PERMISSION_DENIED:
            raise ConfigError(
                f"state-dir: expected one SuperNode for site {folder.path.name} here, found process {card.owner.pid} "
                f"too; stop it, or give this one another state-dir"
            ) from None
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            raise WorkerError(
                f"worker-memory-mb: expected the worker of another run (process {card.pid}) to be idle, found it in a "
                "turn; wait for that run, or set no bound"
            ) from None
        log.info("worker %s, asked to end: %s", card.pid, error.code().name)
    if not _gone(folder, card, _STOP_SECONDS):
        raise WorkerError(f"worker {card.pid}: expected it to end within {_STOP_SECONDS:g} s; kill it")


def _gone(folder: Folder, card: Card, seconds: float) -> bool:
    """Whether a worker stops listening within that time."""
    deadline = time.monotonic() + seconds
    while listens(folder.socket(card.id)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def channel(folder: Folder, card: Card) -> Iterator[grpc.Channel]:
    """A gRPC channel to a worker."""
    with address(folder.socket(card.id)) as path, grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as link:
        yield link


def late(seconds: float) -> str:
    """Why a turn was ended."""
    return (
        f"turn: expected an upload within {seconds:g} s, found none; the turn was ended, for the server does not wait "
        "longer: raise cohort.deadline-seconds, or train less"
    )


def _handed_over(spool: IO[bytes], folder: Folder, card: Card, assignment: Assignment, end: float) -> list[bytes]:
    """Runs the turn in that worker. Raises WorkerError if the worker is gone, TurnError as `take_part`."""
    started = time.monotonic()
    try:
        with channel(folder, card) as link:
            take = link.stream_stream(f"/{NAME}/Take")
            left = max(end - started, 0.0)
            answers = take(_request(spool, card, assignment), metadata=(("owner", str(card.owner)),), timeout=left)
            head = json.loads(next(answers))
            upload = list(sliced(answers))
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.ABORTED:
            raise TurnError(**json.loads(error.details()), trace=folder.log) from None
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            folder.kill(card)
            folder.failed(assignment.described(), late(assignment.order.seconds))
            raise TurnError(WorkerError.__name__, late(assignment.order.seconds)) from None
        raise _lost(folder, card, f"after {time.monotonic() - started:.1f} s ({error.code().name})") from None
    log.info("worker %s: %s", card.pid, head)
    return upload


def _lost(folder: Folder, card: Card, when: str) -> WorkerError:
    """Why there is no upload of a worker whose connection broke."""
    found, where = f"worker {card.pid}: expected an upload, found it", f"its log is {folder.log}"
    # A killed process closes its sockets one by one, and the one that it listens on may be the last.
    if not _gone(folder, card, _DYING_SECONDS):
        return WorkerError(f"{found} still there {when}; {where}")
    code, about = _exit_code(card.pid), folder.noted(card.id)
    if code in (None, -signal.SIGKILL):
        cause, words = process.cause(about), process.ending(about, process.LOWER_AT_SITE)
    else:
        cause, words = process.Cause.OTHER, "it was not killed for want of memory"
    ended = "" if code is None else f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}: "
    return DiedError(cause, f"{found} gone {when}: {ended}{words}; {where}")


def _exit_code(pid: int) -> int | None:
    """The exit code of a process that ends, or minus its signal; None where another process is its parent."""
    deadline = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < deadline:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _request(spool: IO[bytes], card: Card, assignment: Assignment) -> Iterator[bytes]:
    size = spool.seek(0, 2)
    spool.seek(0)
    yield json.dumps({"assignment": assignment.to_json(), "key": card.key, "bytes": size}).encode()
    while chunk := spool.read(CHUNK_BYTES):
        yield chunk
