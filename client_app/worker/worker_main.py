"""A site's worker process, which trains and keeps the base model, examples and CUDA context between rounds.

Flower starts a new client process for every message, which only passes the message (worker_round.py) to this process
(service.py). The worker ends with its SuperNode, after its idle time, on request, or on SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.client_app.worker.service import WorkerService
from fedveil.client_app.worker.unix_sockets import socket_address
from fedveil.records import process_exit

_WATCH_SECONDS, _IDLE_SECONDS = 0.25, 1.0  # polling intervals: in a round, when memory grows, and between rounds
_TELLING = ("peak_mb", "limit_mb", "oom_kills")
_HEAVY = ("fedveil.client_app.client_round", "datasets", "peft", "transformers.models.auto.modeling_auto")

log = logging.getLogger("fedveil.worker")


def serve_worker(service: WorkerService, worker: str, idle_seconds: float) -> None:
    """Serve calls until the process must end, then remove its record and socket."""
    terminated = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: terminated.set())
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((service.handlers(),))
    with socket_address(service.folder.socket(worker)) as path:
        os.umask(0o177)  # so that the socket has mode 0600 from the start
        server.add_insecure_port(f"unix:{path}")
        os.umask(0o077)
        server.start()
        noted: dict[str, Any] = {}
        while not (why := _reason_to_end(service, idle_seconds, terminated)):
            noted = _note(service, worker, noted)
            terminated.wait(_WATCH_SECONDS if service.busy.locked() else _IDLE_SECONDS)
    log.info("ends: %s", why)
    service.folder.forget(worker)
    server.stop(grace=1.0).wait()


def _note(service: WorkerService, worker: str, last: dict[str, Any]) -> dict[str, Any]:
    """Record this process's memory if it or the kernel's count has grown, because SIGKILL leaves no time to do so."""
    now = process_exit.note_memory()
    if [now[key] for key in _TELLING] != [last.get(key) for key in _TELLING]:
        try:
            service.folder.note(worker, now)
        except OSError as error:  # a round may not need the disk, and the older note is nearly the same
            log.warning("%s: cannot record this worker's memory: %s; free some disk space", service.folder.path, error)
    return now


def _reason_to_end(service: WorkerService, idle_seconds: float, terminated: threading.Event) -> str:
    """Return why the process must end now; "" if it does not have to."""
    if terminated.is_set():
        return "signal"
    if not service.owner.runs():
        return f"its SuperNode, process {service.owner.pid}, has ended"
    if service.busy.locked():
        return ""
    if service.ending.is_set():
        return "on request, or after an error"
    if time.monotonic() - service.last_used > idle_seconds:
        return f"idle for {idle_seconds:g} s"
    return ""


def preload_modules(loaded: threading.Event) -> None:
    """Import the modules that the first round needs, and set `loaded`."""
    try:
        for module in _HEAVY:
            with contextlib.suppress(ImportError):  # the round that needs the module reports the error
                importlib.import_module(module)
    finally:
        loaded.set()


def main() -> None:
    """Run the process. Only registry.py starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--owner", type=OwnerProcess.parse, required=True)
    parser.add_argument("--idle-seconds", type=float, required=True)
    parser.add_argument("--memory-mb", type=int, required=True)
    parser.add_argument("--preload", action="store_true")
    arguments = parser.parse_args()
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    folder = WorkerRegistry(arguments.folder.parents[1], arguments.folder.name)
    service = WorkerService(folder, arguments.owner, arguments.memory_mb)
    if arguments.preload:
        service.loaded.clear()
        threading.Thread(target=preload_modules, args=(service.loaded,), daemon=True).start()
    serve_worker(service, arguments.id, arguments.idle_seconds)
    os._exit(0)  # no client is waiting for a round that is still running, so it must not keep the process alive


if __name__ == "__main__":
    main()
