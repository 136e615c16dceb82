"""The gRPC service of a site's worker, on its Unix socket. connection.py and `fedveil site status` call it.

    /fedveil.Worker/Take     stream of bytes -> stream of bytes; each is a JSON header followed by the message in chunks
    /fedveil.Worker/Status   nothing -> JSON: memory content and progress of a client round
    /fedveil.Worker/Stop     nothing -> nothing: ends the worker, unless a client round is running

A caller of Take or Stop names its SuperNode; the worker refuses calls from any SuperNode except its owner.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import psutil

from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.worker.connection import CHUNK_BYTES, NAME
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.errors import FedVeilError, OutOfMemoryError, RankError, WorkerError
from fedveil.records import process_exit
from fedveil.sanitize import sanitize
from fedveil.wire.chunking import drain_parts, fill_slices, slice_message

if TYPE_CHECKING:
    from fedveil.client_app.client_session import ClientSession
    from fedveil.contract.codec import Buffer
    from fedveil.contract.task import TrainingProgress

_REASON_CHARACTERS = 1000
_CLIENT_GONE = "client round: its client process exited before the round ended; the result is discarded"

log = logging.getLogger("fedveil.worker")
_LONGEST_NOTE = 400  # characters


@dataclass
class WorkerService:
    """The calls of one worker.

    Attributes:
        folder: registry folder of its site's workers.
        owner: the SuperNode that owns it.
        memory_mb: limit on its resident memory; 0 = none.
        ending: set when the process must end after the current client round.
        busy: held during a client round.
        loaded: cleared while this process imports the modules that a round needs. If two threads import transformers
            at once, one may get a module without its classes, so a round waits.
        last_used: time.monotonic when the last client round ended or the process started.
    """

    folder: WorkerRegistry
    owner: OwnerProcess
    memory_mb: int
    ending: threading.Event = field(default_factory=threading.Event)
    busy: threading.Lock = field(default_factory=threading.Lock)
    loaded: threading.Event = field(default_factory=threading.Event)
    last_used: float = field(default_factory=time.monotonic)
    _status: dict[str, Any] = field(default_factory=lambda: {"state": "spare"})
    _key: str = ""
    _imported: bool = False
    _session: ClientSession | None = None

    def __post_init__(self) -> None:
        self.loaded.set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers for a gRPC server."""
        methods = {
            "Take": grpc.stream_stream_rpc_method_handler(self.take),
            "Status": grpc.unary_unary_rpc_method_handler(self.show),
            "Stop": grpc.unary_unary_rpc_method_handler(self.stop),
        }
        return grpc.method_handlers_generic_handler(NAME, methods)

    def take(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Run one client round. On an error, abort with its type and text as JSON; the log has the traceback."""
        if not self.owner.is_(_caller(context)):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(self.owner.pid))
        with self.busy:
            try:
                answer, parts = self._turn(requests, context)
                yield json.dumps(answer).encode()
                yield from slice_message(drain_parts(parts), CHUNK_BYTES)
            except Exception as error:
                log.exception("the client round failed")
                if isinstance(error, RankError) or not isinstance(error, FedVeilError):
                    self.ending.set()  # the state of the libraries and the device is unknown
                kind, text = self._failed(error)
                context.abort(grpc.StatusCode.ABORTED, json.dumps({"kind": kind, "text": text}))
            finally:
                self.last_used = time.monotonic()
                self._status = {**self._status, "state": "idle"}
                if self._status.get("round", 0) + 1 == self._status.get("rounds"):
                    self._become_spare()

    def _failed(self, error: Exception) -> tuple[str, str]:
        """Return an error's type and text for the client process, and record them in the site's list of rounds."""
        kind, text = type(error).__name__, str(error)[:_REASON_CHARACTERS]
        if process_exit.is_out_of_memory(error):
            kind, text = OutOfMemoryError.__name__, f"{text}; {process_exit.LOWER_AT_SITE}"
        if isinstance(error, grpc.RpcError):  # while the message was transferred; it has no text
            kind, text = WorkerError.__name__, _CLIENT_GONE
        turn = {} if self._status["state"] in ("idle", "spare") else self._status  # the round had not started
        keys: tuple[str, ...] = ("run", "round", "rounds", "method", "task", "model")
        where = {key: turn[key] for key in keys if key in turn}
        self.folder.failed({"pid": os.getpid(), **where}, f"{kind}: {text}")
        return kind, text

    def _turn(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> tuple[dict[str, Any], list[Buffer]]:
        started, head = time.monotonic(), json.loads(next(requests))
        self.loaded.wait()
        from fedveil.client_app.client_session import ClientSession
        from fedveil.wire import mmap_tensors

        self._imported = True
        self._belong(head["key"])
        assignment = ClientAssignment.from_json(head["assignment"])
        what = assignment.described()
        self._status = {"state": "loading", **what}
        self._session = self._session or ClientSession()
        receive = lambda: fill_slices(mmap_tensors.allocate(self.folder.path, head["bytes"]), requests)  # noqa: E731
        turn = self._session.run_round(receive, assignment, self._watch(what, context))
        self._require_memory()
        answer = {
            "bytes": sum(len(part) for part in turn.parts),
            "load_seconds": round(turn.load_seconds, 4),
            "seconds": round(time.monotonic() - started, 3),
            "device": _device()["device"],
            **(asdict(turn.counts) if turn.counts else {}),
        }
        notes = {"reading": [sanitize(note, _LONGEST_NOTE) for note in turn.notes]} if turn.notes else {}
        line = {"time": time.time(), "pid": os.getpid(), **what, **answer, **notes, "memory_mb": memory_mb()}
        with self.folder.turns.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        log.info("round %s of %s: %s", what["round"] + 1, what["run"], answer)
        self._status = {**self._status, "state": "replying", "last": answer}
        return answer, turn.parts

    def _watch(self, what: dict[str, Any], context: grpc.ServicerContext) -> Callable[[TrainingProgress], None]:
        def watch(step: TrainingProgress) -> None:
            if not context.is_active():
                raise WorkerError(_CLIENT_GONE)
            self._require_memory()
            rate = round(step.tokens / step.seconds) if step.seconds else 0
            left = round(step.seconds / step.step * (step.steps - step.step), 1) if step.step else 0.0
            now = {"step": step.step, "steps": step.steps, "loss": step.loss, "tokens_per_second": rate}
            now["seconds_left"] = left
            self._status = {"state": "training", **what, **now}

        return watch

    def show(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Return the memory contents and a client round's progress, to any process that can open the socket."""
        device = _device() if self._imported else {}
        return json.dumps({**self._status, "memory_mb": memory_mb(), **device}).encode()

    def stop(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """End the worker. Refuses other SuperNodes while the worker's owner runs, and any caller during a round."""
        if self.owner.runs():
            if not self.owner.is_(_caller(context)):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, str(self.owner.pid))
            if self.busy.locked():
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a client round is in progress")
        self.ending.set()
        return b""

    def _become_spare(self) -> None:
        """Free the run's model and examples after its last round; the libraries stay for the next run."""
        last = {"last": self._status["last"]} if "last" in self._status else {}
        if self._session:
            self._session.close()
        self._session, self._key, self._status = None, "", {"state": "spare", **last}
        gc.collect()
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        with self.folder.locked():
            for card in self.folder.living():
                if card.pid == os.getpid():
                    self.folder.adopt(card, "")

    def _belong(self, key: str) -> None:
        """Bind the worker to one run. Raises WorkerError for a client round in a different run."""
        if self._key not in ("", key):
            raise WorkerError(f"worker: this worker belongs to run {self._key}, not {key}; start another worker")
        self._key = key

    def _require_memory(self) -> None:
        if self.memory_mb and (used_mb := memory_mb()) > self.memory_mb:
            self.ending.set()
            raise OutOfMemoryError(
                f"worker-memory-mb: the worker uses {used_mb} MB, above its limit of {self.memory_mb}; raise the limit "
                "in the node config"
            )


def _caller(context: grpc.ServicerContext) -> OwnerProcess:
    return OwnerProcess.parse(str(dict(context.invocation_metadata()).get("owner", "0:0")))


def memory_mb() -> int:
    """Return the resident memory of this process and the processes that train with it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    total = 0
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
            total += one.memory_info().rss
    return int(total // 1_000_000)


def _device() -> dict[str, Any]:
    """Return the device, and with CUDA the memory reserved on it. Call it only after torch has been imported."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return {"device": "cpu"}
    return {"device": torch.cuda.get_device_name(), "device_memory_mb": int(torch.cuda.memory_reserved() // 1_000_000)}
