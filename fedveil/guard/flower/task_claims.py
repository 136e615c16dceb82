"""Keep a task claimed while its program starts.

A SuperExec claims a task and starts a program for it. If the program has not called within 30 s, Flower lets the
task be claimed again, and the SuperExec starts another program for it. On a computer that needs longer (a first import
from a network disk, too many processes), the programs pile up and slow each other down, and the task never starts: we
saw 26 programs for three sites. So this SuperExec sends heartbeats for a task while its program starts.

| the program | result |
|---|---|
| ends within `FIRST_SECONDS` | this SuperExec sends no heartbeats |
| needs longer | the task stays claimed for at most `LONGEST_SECONDS` |
| ends without a call | no more heartbeats: Flower lets the task be claimed again after at most a minute |
| hangs | no more heartbeats after `LONGEST_SECONDS` |
| has started and keeps running | a few heartbeats in addition to its own, which then stop; one that arrives while the
  program ends is refused, and Flower logs this |
| has a task that is no longer known | the first refused heartbeat is the last |
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import threading
import types
from collections.abc import Callable, Sequence
from logging import WARNING
from typing import Any

from fedveil.guard.minute_log import MinuteLog
from fedveil.sanitize import sanitize

FIRST_SECONDS = 20.0  # Flower waits 30 s for the first call, and 60 s after a heartbeat
EVERY_SECONDS = 45.0
LONGEST_SECONDS = 600.0

_log = MinuteLog()


class TaskClaim:
    """Heartbeats for one task, sent from a separate thread.

    Attributes:
        is_alive: whether the task's program is still running; until it is set, the program counts as running.
    """

    def __init__(
        self,
        send: Callable[[], bool],
        first: float = FIRST_SECONDS,
        every: float = EVERY_SECONDS,
        longest: float = LONGEST_SECONDS,
    ) -> None:
        self.is_alive: Callable[[], bool] = lambda: True
        self._send, self._pauses = send, [first, *[every] * int((longest - first) / every)]
        threading.Thread(target=self._keep, name="task claim", daemon=True).start()

    def _keep(self) -> None:
        pause = threading.Event()
        for seconds in self._pauses:
            pause.wait(seconds)
            if not self.is_alive() or not self._send():
                return


class TaskHeartbeat:
    """Sends one heartbeat per call, for the task whose program has these arguments."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._client: Any = None

    def __call__(self) -> bool:
        """Send a heartbeat. Return true if it was accepted, or if nothing answered."""
        httpx = importlib.import_module("httpx")
        messages = importlib.import_module("flwr.proto.runtime_pb2")
        try:
            if self._client is None:
                self._client = _client(self._arguments)
            return bool(self._client.SendTaskHeartbeat(messages.SendTaskHeartbeatRequest()).success)
        except httpx.TransportError:
            return True
        except Exception as error:  # the task has ended, or Flower has changed: then Flower's own lease decides
            words = f"a task's claim is no longer renewed: {type(error).__name__}: {sanitize(error, 300)}"
            if not isinstance(error, httpx.HTTPStatusError):
                _log.write(WARNING, words, key=type(error).__name__)
            return False


def _client(arguments: Sequence[str]) -> Any:
    """Return Flower's client with the credentials that a task's program gets as arguments. It never retries."""
    value = dict(itertools.pairwise(arguments))
    interceptors = importlib.import_module("flwr.supercore.interceptors")
    return importlib.import_module("flwr.supercore.runtime").RuntimeHttpClient.from_server_address(
        server_address=value["--runtime-api-address"],
        insecure="--insecure" in arguments,
        root_certificates=value.get("--root-certificates"),
        interceptors=[
            interceptors.RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            interceptors.RuntimeTokenHttpInterceptor(value["--token"]),
        ],
    )


def start_claimed(arguments: Sequence[str], fork: Callable[[Sequence[str]], int] | None = None, **options: Any) -> None:
    """Start a task's program, as Flower's SuperExec does, and keep the task claimed while it starts.

    Args:
        arguments: the program's name and its arguments.
        fork: starts the program by forking, if possible; returns its process id, or 0.
        options: options for `subprocess.Popen`.
    """
    claim = TaskClaim(TaskHeartbeat(arguments))
    if fork is not None and (pid := fork(arguments[1:])):
        claim.is_alive = lambda: _is_alive(pid)
    else:
        try:
            program = subprocess.Popen(arguments, **options)
        except OSError:
            claim.is_alive = lambda: False
            raise
        claim.is_alive = lambda: program.poll() is None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the second: another user's process has this id now
        return False
    return True


def patch_subprocesses() -> None:
    """Make Flower's SuperExec in this process start every program with `start_claimed`."""
    module = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    module.subprocess = types.SimpleNamespace(Popen=start_claimed, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
