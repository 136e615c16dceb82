"""The workers of a site, as files in its state folder.

    <state-dir>/workers/<site>/<id>.sock     the worker's gRPC socket, mode 0600, in folders of mode 0700
                               <id>.json     its card: its owner, and the run it is for
                               <id>.noted    its memory, as it notes it while it lives, for who asks what ended it
                               lock          held by a process that looks for a worker or starts one
                               worker.log    the log of all workers
                               turns.jsonl   one line a turn, and one a turn that failed, with the reason

A worker belongs to one SuperNode process, its owner, and ends with it. It refuses messages of another SuperNode. A
worker without a run (`key` is empty) is a spare: it was started before the first message, or it has finished the last
round of its run, freed model and rows and kept the libraries. The next run of the same app version takes it.

| found | what happens |
|---|---|
| a card whose socket no process listens on (killed, machine restarted) | removed |
| a worker whose SuperNode is gone | told to end; it would also do so by itself within a second |
| a worker of another SuperNode that runs | ConfigError: two SuperNodes under one state-dir and site |
| an idle worker of another run, under a memory bound | told to end first |
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from fedveil import places
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.site.private import safe
from fedveil.client_app.worker.owner import Owner
from fedveil.client_app.worker.sockets import listens
from fedveil.errors import WorkerError
from fedveil.foreign import shown
from fedveil.records import process

_START_SECONDS = 60.0
_KEPT_SECONDS = 3600.0
_REASON_CHARACTERS = 1000

log = logging.getLogger("fedveil.worker")


@dataclass(frozen=True)
class Card:
    """A worker: its id, process id, owner, digest of its app, key of its run ("" = a spare), start (epoch seconds)."""

    id: str
    pid: int
    owner: Owner
    app: str
    key: str
    since: float


class DiedError(WorkerError):
    """A worker ended without a word. `cause` is what the server may know of it."""

    def __init__(self, cause: process.Cause, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class Folder:
    """The workers of one site."""

    def __init__(self, state_dir: Path, site: str) -> None:
        self.path = state_dir.expanduser().absolute() / "workers" / safe("site", site)

    @property
    def log(self) -> Path:
        """The workers' log."""
        return self.path / "worker.log"

    @property
    def turns(self) -> Path:
        """JSON lines, one for each turn, whole or failed."""
        return self.path / "turns.jsonl"

    def failed(self, what: Mapping[str, Any], reason: str) -> None:
        """Appends that a turn has failed. The reason is in the log too, so a full disk does not hide it."""
        line = {"time": time.time(), **what, "failed": shown(reason, _REASON_CHARACTERS)}
        try:
            with self.turns.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("%s: expected to append a line, found %s; free space", self.turns, error)

    def socket(self, worker: str) -> Path:
        """The socket of a worker."""
        return self.path / f"{worker}.sock"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock, which only one process can have."""
        places.private_folder(self.path)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)  # releases the lock

    def living(self) -> list[Card]:
        """Every worker that listens, oldest first. Call it under the lock, for it removes files of dead workers."""
        found = []
        for file in self.path.glob("*.json"):
            try:
                card = json.loads(file.read_text())
                found.append(Card(**{**card, "owner": Owner(**card["owner"])}))
            except (ValueError, TypeError, KeyError):
                self.forget(file.stem)
        for card in list(found):
            if not listens(self.socket(card.id)):
                self._unlist(card.id)  # what it had noted stays until somebody has asked what ended it
                found.remove(card)
        for file in self.path.glob("*.noted"):  # of workers that died between two turns, so nobody asks
            if file.stem not in {card.id for card in found} and time.time() - file.stat().st_mtime > _KEPT_SECONDS:
                file.unlink(missing_ok=True)
        return sorted(found, key=lambda card: card.since)

    def write(self, card: Card) -> None:
        """Writes a worker's card, whole or not at all."""
        self._put(f"{card.id}.json", asdict(card))

    def note(self, worker: str, about: Mapping[str, Any]) -> None:
        """Writes what a worker says of its memory, in the form of `fedveil.records.process.noted`."""
        self._put(f"{worker}.noted", about)

    def noted(self, worker: str) -> dict[str, Any]:
        """What it wrote last, which is removed; {} where there is none: it has ended in order, or at once."""
        file = self.path / f"{worker}.noted"
        try:
            about = json.loads(file.read_text())
        except (OSError, ValueError):
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
        """Removes a worker's files."""
        self._unlist(worker)
        for name in (f"{worker}.noted", f".{worker}.noted.part"):
            (self.path / name).unlink(missing_ok=True)

    def _unlist(self, worker: str) -> None:
        for file in (self.path / f"{worker}.json", self.socket(worker)):
            file.unlink(missing_ok=True)

    def kill(self, card: Card) -> None:
        """Kills a worker that does not answer, and removes its files."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(card.pid)
            if card.id in found.cmdline():  # another process may have the number by now
                found.kill()
        self.forget(card.id)

    def adopt(self, card: Card, key: str) -> Card:
        """Gives a worker to the run `key`, or makes it a spare with ""."""
        card = replace(card, key=key)
        self.write(card)
        return card

    def start(
        self, site: Site, whose: Owner, key: str, root: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Card:
        """Starts a worker on the app in folder `root`. Returns once it listens; a spare then imports its libraries.

        Raises:
            DiedError: the worker ended.
            WorkerError: it does not listen in time.
        """
        worker, before = secrets.token_hex(4), process.noted()
        command = [
            sys.executable,
            "-P",
            "-m",
            "fedveil.client_app.worker.process",
            "--folder",
            str(self.path),
            "--id",
            worker,
        ]
        command += ["--owner", str(whose), "--idle-seconds", str(site.worker_idle_seconds)]
        command += ["--memory-mb", str(site.worker_memory_mb), *([] if key else ["--preload"])]
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as output:
            env = {**(os.environ if env is None else env), "PYTHONPATH": str(root or places.root())}
            # Flower's processes have a lower one, which would slow training. With none, freed weights and gradients
            # stay in the heap, in holes.
            env["MALLOC_MMAP_THRESHOLD_"] = str(4 << 20)
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env
            )
        card = Card(worker, started.pid, whose, app_digest(root), key, time.time())
        deadline = time.monotonic() + _START_SECONDS
        while not listens(self.socket(worker)):
            if (code := started.poll()) is not None:
                self.forget(worker)
                cause, lower = process.of_child(code, before)
                found = f"found that it ended with exit code {code}{lower}"
                raise DiedError(cause, f"worker: expected it to start, {found}; see {self.log}")
            if time.monotonic() > deadline:
                started.kill()
                self.forget(worker)
                raise WorkerError(
                    f"worker: expected it to start within {_START_SECONDS:g} s, found none that listens; see {self.log}"
                )
            time.sleep(0.02)
        self.write(card)
        return card


def app_digest(root: Path | None = None) -> str:
    """16 hex digits of the code that a worker would run; equal in a checkout, a bundle and a wheel."""
    h = hashlib.blake2b(digest_size=8)
    for name, file in places.app_sources(root).items():
        content = file.read_bytes()
        h.update(f"{name} {len(content)}\n".encode() + content)
    return h.hexdigest()
