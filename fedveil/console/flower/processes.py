"""Manage one federation's processes: start them, read their logs, and leave none behind.

Flower puts some of its children in separate sessions, and a child whose parent died belongs to init. So a process
is identified by an inherited environment variable that contains this federation's random token.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedveil import proxies
from fedveil.errors import FedVeilError

MARK = "FEDVEIL_PROCESS_OWNER"
_LARGEST_LOG = 32 << 20  # bytes
CALL_TIMED_OUT = "no answer within"  # how the error of a command that `ProcessGroup.call` ended begins


class LaunchError(FedVeilError):
    """Raised when a process cannot be started, or ends unexpectedly."""


class ProcessGroup:
    """Starts processes with a common mark, each in its own process group, and stops all processes with that mark.

    Attributes:
        logs: the folder for one log file per process.
        token: the beginning of the mark.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.token = secrets.token_hex(8)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._seen: set[int] = set()
        self._found: dict[tuple[str, str], psutil.Process | None] = {}  # last result of `runs`, by program and name
        _adopt_orphans()

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str], of: str = "", cwd: Path | None = None
    ) -> None:
        """Start `command` as process `name` in the folder `cwd`; stdout and stderr go to the log of that name.

        With `of`, it becomes part of that process: it is called "OF NAME", ends with it, and shares its log.
        """
        self._reap()  # an earlier process with that name
        with self.log(of or name).open("ab") as log:
            self._children[f"{of} {name}".strip()] = subprocess.Popen(
                [_program(command[0], env), *command[1:]],
                env=self.marked(of or name, env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
            )

    def marked(self, name: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return `env` with a mark that makes a process stop together with `name`, regardless of its parent."""
        return {**env, MARK: f"{self.token}:{name}"}

    def pid(self, name: str) -> int:
        """Return the process ID of `name`."""
        return self._children[name].pid

    def ended(self, name: str) -> int | None:
        """Return the exit code of `name`, or of one of its parts, once one has ended; None while all are running."""
        codes = [child.poll() for child in self._parts(name).values()]
        return next((code for code in codes if code is not None), None)

    def ended_part(self, name: str) -> str:
        """Return the part of `name` that has exited, as "NAME" or "NAME PART"; "" while all are running."""
        return next((key for key, child in self._parts(name).items() if child.poll() is not None), "")

    def call(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        timeout: float = 120.0,
        cwd: Path | None = None,
    ) -> str:
        """Run `command` until it ends and return its stdout. Raises LaunchError with its last lines if it fails."""
        child = subprocess.Popen(
            [_program(command[0], env), *command[1:]],
            env=self.marked(name, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd=cwd,
        )
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            raise LaunchError(f"{' '.join(command[:3])}: {CALL_TIMED_OUT} {timeout:.0f} s") from None
        except KeyboardInterrupt:
            child.kill()  # it has its own session, so Ctrl-C does not reach it
            raise
        if child.returncode:
            raise LaunchError(f"{' '.join(command[:3])} failed: {_last_lines((out + err).decode(errors='replace'), 6)}")
        return out.decode()

    def log(self, name: str) -> Path:
        """Return the log file of `name`."""
        return self.logs / f"{name}.log"

    def trim_log(self, name: str) -> bool:
        """Move a log above 32 MiB to NAME.log.1, replacing an earlier one, and return whether it was moved.

        The process keeps the file open for appending, so it is copied and emptied: a line that is written at that very
        moment may be lost.
        """
        log = self.log(name)
        try:
            size, older = log.stat().st_size, log.with_name(f"{log.name}.1")
            if size <= _LARGEST_LOG or shutil.disk_usage(log.parent).free < size:
                return False
            shutil.copyfile(log, older)
            with log.open("ab") as file:
                file.truncate(0)
                file.write(f"earlier lines: {older}\n".encode())
        except OSError:  # no log, or one that was moved away; the next call looks again
            return False
        return True

    def tail(self, name: str, lines: int = 8) -> str:
        """Return the last lines of `name`'s log, joined into one line."""
        with suppress(OSError):
            return _last_lines(self.log(name).read_text(errors="replace"), lines)
        return "(no log)"

    def kill(self, name: str, grace: float = 0.0) -> None:
        """Kill `name` and everything it started; with `grace`, send SIGTERM that many seconds before SIGKILL."""
        _end(lambda: self._marked(name), grace)
        self._bury(*self._parts(name).values())

    def runs(self, program: str, name: str) -> bool:
        """Return whether `name` has a running process with this program."""
        known = self._found.get((program, name))
        # Callers that wait for it to end ask twice a second, and listing all processes takes a tenth of a second.
        if known is not None and known.is_running() and _runs(known):
            return True
        of_it = (process for process in self._marked(name) if _name(process).startswith(program[:15]))
        self._found[program, name] = running_process = next(of_it, None)
        return running_process is not None

    def alive(self, name: str | None = None) -> list[psutil.Process]:
        """Return all running processes with the mark; with `name`, only that process and those it started."""
        return self._marked(name)

    def stop(self, grace: float = 3.0) -> None:
        """Send SIGTERM, and after `grace` seconds SIGKILL, until nothing is left. Ctrl-C is ignored meanwhile."""
        with _undisturbed():
            _end(self._marked, grace)
            self._bury(*self._children.values())

    def _parts(self, name: str) -> dict[str, subprocess.Popen[bytes]]:
        return {key: child for key, child in self._children.items() if key == name or key.startswith(f"{name} ")}

    def _marked(self, name: str | None = None) -> list[psutil.Process]:
        # Only running children count, because the ID of an ended process may have been reused.
        own = {child.pid for key, child in self._children.items() if name in (None, key) and child.poll() is None}
        mark = f"{self.token}:{name or ''}"
        processes: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                value = process.environ().get(MARK, "")
                if process.pid in own or (value == mark if name else value.startswith(mark)):
                    processes[process.pid] = process
                    processes.update({child.pid: child for child in process.children(recursive=True)})
        self._seen.update(processes)
        return [process for process in processes.values() if _runs(process)]

    def _bury(self, *children: subprocess.Popen[bytes]) -> None:
        """Reap ended processes. This may take a moment, because a dead process's threads end one by one."""
        deadline = time.monotonic() + 5.0
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
        while self._reap() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._seen.clear()

    def _reap(self) -> int:
        """Reap adopted orphans, which would otherwise stay in the process table; return how many remain."""
        own, left = {child.pid for child in self._children.values() if child.poll() is None}, 0
        for process in psutil.Process().children():
            with suppress(psutil.Error, OSError):
                ours = process.pid in self._seen or process.name().startswith(("flower-", "flwr"))
                if ours and process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                    left += os.waitpid(process.pid, os.WNOHANG)[0] == 0
        return left


def find_marked_processes(token: str) -> list[psutil.Process]:
    """Find processes that an earlier `ProcessGroup` with this token left running; [] if the token is ""."""
    processes = []
    for process in psutil.process_iter() if token else ():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK, "").startswith(f"{token}:") and _runs(process):
                processes.append(process)
    return processes


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.name())
    return ""


def _adopt_orphans() -> None:
    """Make orphaned processes children of this process on Linux, so that it can reap them."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _end(find: Callable[[], list[psutil.Process]], grace: float) -> None:
    """End the processes that `find` returns; call `find` again after each kill, as they may have started others."""
    processes = find()
    if grace:
        _signal(processes, signal.SIGTERM)
        _wait(processes, grace)
    for _ in range(50):
        processes = find()
        if not processes:
            return
        _signal(processes, signal.SIGKILL)
        _wait(processes, 2.0)


def _wait(processes: Sequence[psutil.Process], timeout: float) -> None:
    """Wait until all processes have ended. psutil's own wait would take our children's exit codes away from Popen."""
    deadline = time.monotonic() + timeout
    while any(_runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and the end of the terminal inside the `with` block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _program(name: str, env: Mapping[str, str]) -> str:
    path = shutil.which(name, path=env.get("PATH"))
    if path is None:
        raise LaunchError(f"{name}: command not found next to {Path(sys.executable).name}; run: make install")
    return path


def _last_lines(text: str, lines: int) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    nonempty_lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " | ".join(nonempty_lines[-lines:]) or "(no output)"


def flower_environment(flower_home: Path) -> dict[str, str]:
    """Return the environment for Flower's processes and their children."""
    programs = str(Path(sys.executable).parent)
    env = {
        # Several processes share the cores; threads that spin while waiting would cost ten times as much as the work.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Return large blocks to the system when they are freed. Flower pulls and pushes in threads, whose arenas would
        # otherwise hold a message's memory several times over. The worker, which trains, does not use this setting.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        **{key: value for key, value in os.environ.items() if not key.startswith("FLWR_")},
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    proxies.exempt_loopback(env)
    return env


def named_error(log: str) -> str:
    """Return the last line that names an exception, or ""."""
    pattern = re.compile(r"^\s*([A-Za-z_][\w.]*(?:Error|Exception|Refused)\b.*)$", re.MULTILINE)
    error_lines: list[str] = pattern.findall(log)
    return error_lines[-1].strip() if error_lines else ""
