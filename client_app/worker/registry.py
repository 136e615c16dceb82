"""The workers of a site, as files in its state folder. `WorkerRegistry.find_or_start` assigns a worker to a run.

    <state-dir>/workers/<site>/<id>.sock     the worker's gRPC socket, mode 0600, in folders of mode 0700
                               <id>.json     its record: its owner and its run
                               <id>.noted    its memory use, recorded while it runs, to explain its end
                               lock          held by a process that is finding or starting a worker
                               worker.log    the log of all workers
                               turns.jsonl   one line per client round, with the reason if it failed

A worker belongs to one SuperNode process, its owner, and ends when the owner ends. It refuses messages from other
SuperNodes. A worker without a run (`key` is empty) is a spare: it was started before the first message, or it has
finished its run's last round and freed the model and examples, but not the libraries. The next run of the same app
version uses it.

| state | result |
|---|---|
| a record whose socket has no listening process (killed, machine restarted) | removed |
| a worker whose SuperNode is gone | asked to end; it would also end on its own within a second |
| a worker of another running SuperNode | ConfigError: two SuperNodes share one state-dir and site |
| an idle worker of another run, with a memory limit | asked to end first |
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from fedveil import paths
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.state.client_state import safe_file_name
from fedveil.client_app.worker.connection import Connection, WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.unix_sockets import is_listening
from fedveil.errors import WorkerError
from fedveil.models import bundled as tiny
from fedveil.records import process_exit
from fedveil.sanitize import sanitize

_START_SECONDS = 60.0
_KEPT_SECONDS = 3600.0
_DYING_SECONDS = 2.0
_REASON_CHARACTERS = 1000

log = logging.getLogger("fedveil.worker")


class WorkerDiedError(WorkerError):
    """A worker ended without an error message. `cause` is the part that the server may learn."""

    def __init__(self, cause: process_exit.ExitCause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class WorkerRegistry:
    """The workers of one site."""

    def __init__(self, state_dir: Path, site: str) -> None:
        self.path = state_dir.expanduser().absolute() / "workers" / safe_file_name("site", site)

    @property
    def log(self) -> Path:
        """Return the workers' log."""
        return self.path / "worker.log"

    @property
    def turns(self) -> Path:
        """Return the file with one JSON line per client round, completed or failed."""
        return self.path / "turns.jsonl"

    def failed(self, what: Mapping[str, Any], reason: str) -> None:
        """Record a failed client round. The log also has the reason, so a full disk does not hide it."""
        line = {"time": time.time(), **what, "failed": sanitize(reason, _REASON_CHARACTERS)}
        try:
            with self.turns.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("%s: cannot append a line: %s; free some disk space", self.turns, error)

    def socket(self, worker: str) -> Path:
        """Return a worker's socket path."""
        return self.path / f"{worker}.sock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which only one process can have."""
        paths.private_folder(self.path)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)  # releases the lock

    def living(self) -> list[WorkerRecord]:
        """Return every listening worker, oldest first. Call it under the lock: it removes the files of dead workers."""
        records = []
        for file in self.path.glob("*.json"):
            try:
                card = json.loads(file.read_text(encoding="utf-8"))
                records.append(WorkerRecord(**{**card, "owner": OwnerProcess(**card["owner"])}))
            except FileNotFoundError:
                continue  # the worker ended in the meantime; it can do so without the lock
            except (ValueError, TypeError, KeyError, RecursionError):
                self.forget(file.stem)
        for card in list(records):
            if not is_listening(self.socket(card.id)):
                self._unlist(card.id)  # the last note stays until the cause of the worker's end is queried
                records.remove(card)
        known = {card.id for card in records}
        for file in self.path.glob("*.noted"):  # from workers that died between rounds
            if file.stem in known:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                if time.time() - file.stat().st_mtime > _KEPT_SECONDS:
                    file.unlink()
        return sorted(records, key=lambda card: card.since)

    def write(self, card: WorkerRecord) -> None:
        """Write a worker's record atomically."""
        self._put(f"{card.id}.json", asdict(card))

    def note(self, worker: str, about: Mapping[str, Any]) -> None:
        """Record a worker's memory report, in the format of `fedveil.records.process_exit.note_memory`."""
        self._put(f"{worker}.noted", about)

    def noted(self, worker: str) -> dict[str, Any]:
        """Return and remove a worker's last note; {} if there is none, because it ended normally or immediately."""
        file = self.path / f"{worker}.noted"
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        finally:
            file.unlink(missing_ok=True)
        return about if isinstance(about, dict) else {}

    def _put(self, name: str, content: Mapping[str, Any]) -> None:
        partial = self.path / f".{name}.part"
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(content))
        partial.replace(self.path / name)

    def forget(self, worker: str) -> None:
        """Remove a worker's files."""
        self._unlist(worker)
        for name in (f"{worker}.noted", f".{worker}.noted.part"):
            (self.path / name).unlink(missing_ok=True)

    def _unlist(self, worker: str) -> None:
        for file in (self.path / f"{worker}.json", self.socket(worker)):
            file.unlink(missing_ok=True)

    def kill(self, card: WorkerRecord) -> None:
        """Kill a worker that does not answer, and remove its files."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(card.pid)
            if card.id in process.cmdline():  # another process may have this id by now
                process.kill()
        self.forget(card.id)

    def adopt(self, card: WorkerRecord, key: str) -> WorkerRecord:
        """Assign a worker to the run `key`, or make it a spare with ""."""
        card = replace(card, key=key)
        self.write(card)
        return card

    def connect(self, worker: WorkerRecord) -> Connection:
        """Return a connection to a worker; it is opened by its calls."""
        return Connection(worker, self.socket(worker.id), self.log)

    def find_or_start(self, assignment: ClientAssignment, owner: OwnerProcess, root: Path | None = None) -> Connection:
        """Return a connection to a worker for a run: the run's own, otherwise a spare, otherwise a new one.

        Raises:
            ConfigError: this site's worker belongs to another running SuperNode.
            WorkerError: a worker that must end is busy or does not end, or the new one does not start.
        """
        key = run_key(assignment, root)
        with self.locked():
            workers = self.living()
            for worker in [worker for worker in workers if not worker.owner.is_(owner)]:
                self.connect(worker).stop(owner)
                workers.remove(worker)
            for worker in workers:
                if worker.key == key:
                    return self.connect(worker)
            app = app_digest(root)
            for worker in workers:
                if not worker.key and worker.app == app:
                    return self.connect(self.adopt(worker, key))
            if assignment.site.worker_memory_mb:
                for worker in workers:
                    self.connect(worker).stop(owner)
            return self.connect(self.start(assignment.site, owner, key, root))

    def explain_loss(self, connection: Connection, when: str) -> WorkerError:
        """Return why a worker whose connection broke has no upload: the cause of its end if it has ended."""
        worker = connection.worker
        expected, where = f"worker {worker.pid}: it sent no upload, and is", f"its log is {self.log}"
        # A killed process closes its sockets one by one, and the listening socket may be the last.
        if not connection.wait_until_gone(_DYING_SECONDS):
            return WorkerError(f"{expected} still running {when}; {where}")
        code, about = _exit_code(worker.pid), self.noted(worker.id)
        if code in (None, -signal.SIGKILL):
            cause = process_exit.exit_cause(about)
            words = process_exit.describe_ending(about, process_exit.LOWER_AT_SITE)
        else:
            cause, words = process_exit.ExitCause.OTHER, "it was not killed for lack of memory"
        ended = "" if code is None else f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}: "
        return WorkerDiedError(cause, f"{expected} gone {when}: {ended}{words}; {where}")

    def start(
        self,
        site: SiteConfig,
        whose: OwnerProcess,
        key: str,
        root: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> WorkerRecord:
        """Start a worker for the app in folder `root`. Return once it listens; a spare then imports its libraries.

        Raises:
            WorkerDiedError: the worker ended.
            WorkerError: it does not listen in time.
        """
        worker, before = secrets.token_hex(4), process_exit.note_memory()
        command = [
            sys.executable,
            "-P",
            "-m",
            "fedveil.client_app.worker.worker_main",
            "--folder",
            str(self.path),
            "--id",
            worker,
        ]
        command += ["--owner", str(whose), "--idle-seconds", str(site.worker_idle_seconds)]
        command += ["--memory-mb", str(site.worker_memory_mb), *([] if key else ["--preload"])]
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as output:
            env = {**(os.environ if env is None else env), "PYTHONPATH": str(root or paths.import_root())}
            # Flower's processes set a lower value, which would slow down training. Without any value, freed weights and
            # gradients stay in the heap and fragment it.
            env["MALLOC_MMAP_THRESHOLD_"] = str(4 << 20)
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env
            )
        card = WorkerRecord(worker, started.pid, whose, app_digest(root), key, time.time())
        deadline = time.monotonic() + _START_SECONDS
        while not is_listening(self.socket(worker)):
            if (code := started.poll()) is not None:
                self.forget(worker)
                cause, lower = process_exit.child_exit_cause(code, before)
                raise WorkerDiedError(
                    cause, f"worker: it ended with exit code {code}{lower} before it was ready; see {self.log}"
                )
            if time.monotonic() > deadline:
                started.kill()
                self.forget(worker)
                raise WorkerError(f"worker: it was not listening after {_START_SECONDS:g} s; see {self.log}")
            time.sleep(0.02)
        self.write(card)
        return card


def app_digest(root: Path | None = None) -> str:
    """Return a digest of the code that a worker would run, 16 hex digits; equal in a checkout, a bundle and a wheel."""
    h = hashlib.blake2b(digest_size=8)
    for name, file in paths.app_sources(root).items():
        content = file.read_bytes()
        h.update(f"{name} {len(content)}\n".encode() + content)
    return h.hexdigest()


def run_key(assignment: ClientAssignment, root: Path | None = None) -> str:
    """Return a digest of a worker's inputs, 16 hex digits: app, run, method, task, training, model, data, devices."""
    config, site = assignment.config, assignment.site
    bundled = tiny.bundled_folder(config.task.name) if config.task.model == "tiny" else None
    model = bundled or Path(config.task.model).expanduser()
    files = sorted(model.iterdir()) if model.is_dir() else []
    base = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    made_for = [
        app_digest(root), assignment.order.run, assignment.order.method, assignment.order.fields,
        config.task.model_dump(), config.train.model_dump(), config.run.seed, config.run.deterministic, base,
        assignment.data, site.device, site.processes, site.shard_base,
        site.partition_id, site.num_partitions, sorted(site.columns.items()),
    ]  # fmt: skip
    return hashlib.blake2b(json.dumps(made_for).encode(), digest_size=8).hexdigest()


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a process that is ending, or minus its signal; None if it is not our child process."""
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
