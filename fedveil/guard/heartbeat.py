"""Send heartbeats that continue after any answer.

Flower's sender continues after two kinds of error and ends its thread after any other. The process keeps running, but
a minute later it is permanently offline.

| a heartbeat | Flower's behavior | here |
|---|---|---|
| no answer, UNAVAILABLE, 502, 503, 504 | retries after at most 20 s | the same |
| any other error, `success` false, the end of a run | the thread ends | retries, with one log line per minute |
| UNAUTHENTICATED, 401 | the process ends | the same |
| a SuperNode's heartbeat is answered | nothing is recorded | the time is the mtime of FEDVEIL_HEARTBEAT_FILE, if set:
  the source of "online" |
| a task's heartbeat is answered | nothing is recorded | the time is in FEDVEIL_LAST_ANSWER: a run that ends reports
  whether contact was lost |
| `stop` after the thread has ended | RuntimeError | returns |
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from logging import ERROR, WARNING
from pathlib import Path

from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender
from flwr.supercore.run import RunNotRunningException

from fedveil.guard.last_heartbeat import VARIABLE
from fedveil.guard.minute_log import MinuteLog
from fedveil.records import process_exit
from fedveil.sanitize import sanitize

_SENDER = "HeartbeatSender"
_LONGEST = 300

_log = MinuteLog()


class PersistentHeartbeatSender(HeartbeatSender):
    """Flower's sender, changed to retry after every error."""

    def stop(self) -> None:
        """Stop the sender; does nothing if its thread has ended."""
        if self._thread.is_alive():
            super().stop()

    def _heartbeat(self) -> None:
        if self._stop_event.is_set():
            return
        try:
            answered = self.heartbeat_fn()
        except (Exception, RunNotRunningException) as error:  # the second is not an Exception
            words = f"a heartbeat failed and will be retried: {type(error).__name__}: {sanitize(error, _LONGEST)}"
            _log.write(WARNING, words, key=type(error).__name__)
            raise HeartbeatFailure from None
        if not answered:
            raise HeartbeatFailure
        self._note_answer()

    def _note_answer(self) -> None:
        """Record that a heartbeat was answered; does nothing for a task."""


class TaskHeartbeatSender(PersistentHeartbeatSender):
    """The sender of a ServerApp or ClientApp process, which records when a heartbeat was answered.

    It stores the time in the environment, because the bundle has its own copy of every module.
    """

    def _note_answer(self) -> None:
        os.environ[process_exit.LAST_ANSWER] = f"{process_exit.boot_seconds():.1f}"


class NodeHeartbeatSender(PersistentHeartbeatSender):
    """A SuperNode's sender, which records when a heartbeat was answered."""

    def __init__(self, heartbeat_fn: Callable[[], bool]) -> None:
        super().__init__(heartbeat_fn)
        self._file = os.environ.get(VARIABLE, "")

    def _note_answer(self) -> None:
        if not self._file:
            return
        try:
            Path(self._file).touch(mode=0o600)
        except OSError as error:  # the site's log reports it; the server still gets the heartbeats
            _log.write(ERROR, f"{self._file}: cannot record the time of a heartbeat: {error.strerror}")


def patch_node_heartbeat(module: str) -> None:
    """Make a SuperNode in this process use this sender. `module` is Flower's module for its connection."""
    setattr(importlib.import_module(module), _SENDER, NodeHeartbeatSender)


def patch_task_heartbeat(module: str) -> None:
    """Make this ServerApp or ClientApp process use this sender. `module` is the Flower module that runs it."""
    setattr(importlib.import_module(module), _SENDER, TaskHeartbeatSender)
