"""`flower-superexec` for a site: forks client processes from a zygote with Flower already loaded.

Flower starts a Python process for each message, and importing Flower takes one core a second. With the
zygote (called the "resident" here):

    flower-superexec -- forks before it has read anything ---> the resident: no bundled code ever runs in it
      SuperExec: a task --- its arguments over a socket -----> resident forks --> client process: the guard, the bundle

A client process is therefore a copy of the zygote, with Flower and the guard loaded. It makes its decisions as
described in clientapp.py, and exits after its message. Nothing that a bundle does in it affects the next
client process.

| case | result |
|---|---|
| the SuperExec's secret | it is read after the fork: neither the resident nor a client process has it in memory |
| bundled code opens the resident's memory (ptrace, /proc) | the kernel refuses, except for root |
| bundled code looks for the resident's socket | it is closed in the copy |
| two copies draw "random" numbers | Python's and NumPy's generators are reseeded; keys come from the operating system |
| the resident is killed, or silent for 2 min | it is ended and logged, and Flower starts each client process |
| the SuperExec ends | the resident's socket closes, so it ends too; client processes watch the SuperExec as usual |
| a task that is not for a ClientApp | it is not requested; if one arrives, it is not started |
| an image's SuperExec, on a server | it starts only ServerApps, as Flower would |
| a Flower version that guard/flower/ does not support | the process ends with the reason |
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from logging import ERROR, INFO, WARNING
from typing import Any

from fedveil.guard import clientapp, heartbeat, poll_backoff, superexec
from fedveil.guard.flower import task_claims
from fedveil.guard.task_programs import CLIENT_APP

_MOST_BYTES = 1 << 16  # maximum size of a client process's arguments
_MOST_ANSWER = 20  # maximum bytes of an answer: the digits of a process id
_ANSWER_SECONDS = 120.0
_NAME, _DUMPABLE = 15, 4  # Linux's PR_SET_NAME and PR_SET_DUMPABLE
# Third-party modules that Flower and a bundle import in a client process. This installation's own modules are not
# included, because the bundle contains its own.
_LOADED = (
    "httpcore",
    "grpc._channel",
    "xxhash",
    "numpy.random",
    "pydantic",
    "cryptography.hazmat.primitives.ciphers.aead",
    "psutil",
)


class ProcessZygote:
    """The SuperExec's end of the socket. `pid` is the process at the other end."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self._connection.settimeout(_ANSWER_SECONDS)
        self.lost = False

    def start(self, arguments: Sequence[str]) -> int:
        """Start a client process with these arguments and return its process id; 0 once the zygote is gone."""
        if self.lost:
            return 0
        try:
            self._connection.send(json.dumps(list(arguments)).encode())
            if (answer := self._connection.recv(_MOST_ANSWER)).isdigit():
                return int(answer)
        except OSError:
            pass  # logged below: after any error, the SuperExec stops using this zygote
        self._end()
        return 0

    def _end(self) -> None:
        from flwr.supercore import log

        self.lost = True
        self._connection.close()
        try:
            os.kill(self._pid, signal.SIGKILL)  # otherwise a late answer would start the same task twice
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        log(WARNING, "the process that forks client processes has ended; from now on, each starts without a fork")


def main(guarded: bool = True, require_policy: bool = True, is_image: bool = False) -> None:
    """Run the process. It takes the arguments of Flower's own `flower-superexec`.

    Args:
        guarded: False runs without the guard.
        require_policy: whether a site without a policy refuses everything.
        is_image: whether the program may also run on a server; its environment then says where it runs.
    """
    clientapp.require_flower()
    task_type = superexec.task_type_of_environment() if is_image else CLIENT_APP
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        here.close()
        _reside(there, guarded, require_policy)  # returns only in client processes
        from flwr.supernode.cli import flwr_clientapp

        flwr_clientapp()
        return
    there.close()
    superexec.patch_superexec(task_type)
    _launch_from(ProcessZygote(here, pid), poll_backoff.patch_superexec_polling(), task_type)
    if is_image:
        from flwr.supercore import log

        log(INFO, "this SuperExec starts only %s; on a server, FEDVEIL_INSTRUCTION_KEY must be set", task_type)
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


def _launch_from(resident: ProcessZygote, waits: poll_backoff.PollBackoff, permitted: str = CLIENT_APP) -> None:
    """Make Flower's executor start only the `permitted` program, and a `flwr-clientapp` by asking the zygote."""
    module = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")

    def start(arguments: Sequence[str], **options: Any) -> None:
        waits.again()
        if arguments[0] != permitted:
            from flwr.supercore import log

            log(ERROR, "%s: this SuperExec starts only %s; the task is not started", arguments[0], permitted)
            return
        is_forked = arguments[0] == CLIENT_APP and not options
        task_claims.start_claimed(arguments, resident.start if is_forked else None, **options)

    module.subprocess = types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]


def _reside(requests: socket.socket, guarded: bool, require_policy: bool) -> None:
    """Fork a copy for each request. Return in the copy; the process itself ends when the socket does."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the copies
    _set(_NAME, b"flwr-clientapps")
    _set(_DUMPABLE, 0)
    loaded = False
    while request := requests.recv(_MOST_BYTES):
        if not loaded:  # on the first request, because a server's SuperExec never gets one
            _load(guarded, require_policy)
            loaded = True
        if (pid := os.fork()) == 0:
            requests.close()
            _become_client(json.loads(request))
            return
        requests.send(b"%d" % pid)
    os._exit(0)


def _load(guarded: bool, require_policy: bool) -> None:
    if guarded:
        clientapp.install_guard(require_policy)
    else:
        heartbeat.patch_task_heartbeat(clientapp.RUNTIME)
    for name in ("flwr.supernode.cli", *_LOADED):
        importlib.import_module(name)
    if threading.active_count() != 1:
        sys.exit(f"{CLIENT_APP}: no other threads may run before a fork, but {threading.active_count() - 1} do")
    gc.collect()
    gc.freeze()  # memory that a copy never touches stays shared


def _become_client(arguments: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _set(_NAME, CLIENT_APP.encode())
    _set(_DUMPABLE, 1)
    sys.argv = [CLIENT_APP, *arguments]
    sys.modules["numpy"].random.seed()  # the fork reseeds Python's own


def _set(option: int, value: bytes | int) -> None:
    """Call Linux's prctl for this process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
