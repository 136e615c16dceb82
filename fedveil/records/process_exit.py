"""The reason why a ServerApp or a site's worker ended without an error message.

    <run folder>/lock   held (flock) as long as the process lives; {"inode": of this file, "pid", "host", "since", ...}

A process cannot catch SIGKILL. So it records its memory use while it runs, and readers infer the rest. If no process
holds the lock, the process is dead. The kernel's count of out-of-memory kills, if readable, shows whether memory
was the cause.

`group_by_reason` explains to people why sites are missing: it lists sites with the same reason together.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedveil.errors import OutOfMemoryError, StateError

LOCK = "lock"
# Set by the heartbeats of a task's process: the boot clock's seconds at the last answer (fedveil/guard/heartbeat.py).
LAST_ANSWER = "FEDVEIL_LAST_ANSWER"
LOST_SECONDS = 60.0  # Flower ends a task when its heartbeats have been missing for this long
TOLD_TO_END = "interrupted: its ServerApp was told to end"  # beginning of a run's reason after `flwr stop` or a signal
LOST_CONTACT = "contact lost: "  # beginning of a run's reason after its ServerApp was cut off or frozen
TEMPORARY = (
    "FEDVEIL_TEMPORARY"  # in the environment of a ServerApp whose federation ends with the process that started it
)
_CGROUPS = Path("/sys/fs/cgroup")
LOWER = "give the server more memory, or lower evaluate.eval-examples, or use a smaller or a quantized base"
LOWER_AT_SITE = (
    "give the site more memory, or lower train.batch-size, or set train.quantized-base or "
    'train.optimizer = "adamw-8bit"'
)
FULL_BYTES = 64 << 20  # free bytes below which a disk counts as full: SQLite and logs need that much room
_MUCH = 0.8  # fraction of the memory limit above which memory is the likely cause
_TRIES, _BETWEEN = 20, 0.1  # a reader that checks the lock holds it for a moment


class ExitCause(StrEnum):
    """The cause that ended a process, in words without numbers, so that they may be shared."""

    MEMORY = "out of memory"
    PERHAPS_MEMORY = "probably out of memory"
    MACHINE = "its machine was restarted"
    OTHER = "killed or crashed"


def lock_folder(folder: Path) -> int:
    """Hold the folder's lock until this process ends or closes the file. Return the file's descriptor.

    Raises:
        StateError: another process holds the lock; the message says which.
    """
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for left in reversed(range(_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not left:
                holder = path.read_bytes()
                os.close(descriptor)
                raise StateError(
                    f"run folder {folder}: another ServerApp uses it: {_named(holder)}; wait until that run has ended, "
                    "or stop it (flwr stop)"
                ) from None
            time.sleep(_BETWEEN)
    about = {"pid": os.getpid(), "host": platform.node(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"inode": os.fstat(descriptor).st_ino, **about}).encode(), 0)
    return descriptor


@contextlib.contextmanager
def hold_unused(folder: Path, *, creates: bool = True) -> Iterator[bool]:
    """Yield True if no process uses a run folder; then none can begin to use it inside the `with` block.

    A folder without a lock file, such as one restored from a backup, gets one; but not with `creates=False`, with which
    a process may begin to use it. Raises OSError.
    """
    try:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if creates else 0)
        descriptor = os.open(folder / LOCK, flags, 0o600)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)  # releases the lock


def is_dead(folder: Path) -> bool:
    """Return whether the folder's last writer is known to have ended; False if the folder is a copy."""
    try:
        with (folder / LOCK).open("rb") as file:
            if json.loads(file.read()).get("inode") != os.fstat(file.fileno()).st_ino:
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except (OSError, ValueError, AttributeError):  # locked or unreadable
        return False


def _named(holder: bytes) -> str:
    try:
        about = json.loads(holder)
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not identified itself yet"


def note_memory() -> dict[str, Any]:
    """Return this process's memory in MB, its limit, and the location of the kernel's count of memory kills."""
    about: dict[str, Any] = {"pid": os.getpid(), "host": platform.node(), "boot": _boot()}
    status = _read(Path("/proc/self/status"))
    for name, key in (("memory_mb", "VmRSS"), ("peak_mb", "VmHWM")):
        about[name] = _kilobytes(status, key) // 1000
    group = _group()
    limits = [_kilobytes(_read(Path("/proc/meminfo")), "MemTotal") // 1000]
    groups = [_read(group / name).strip() for name in ("memory.max", "memory.limit_in_bytes")]
    limits += [int(text) // 1_000_000 for text in groups if text.isdigit()]  # otherwise "max", or no limit
    return about | {"limit_mb": min(limits), "group": str(group), "oom_kills": _oom_kills(group)}


def exit_cause(about: Mapping[str, Any]) -> ExitCause:
    """Return the cause that ended the process that wrote `about`; values in it may be missing."""
    memory, limit, kills = (_number(about.get(key)) for key in ("peak_mb", "limit_mb", "oom_kills"))
    if about.get("boot") and about.get("boot") != _boot():
        return ExitCause.MACHINE
    now = _oom_kills(Path(str(about.get("group", "")))) if about.get("host") == platform.node() else -1
    if now > kills >= 0:
        return ExitCause.MEMORY
    return ExitCause.PERHAPS_MEMORY if limit > 0 and memory >= _MUCH * limit else ExitCause.OTHER


def boot_seconds() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps, if the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def describe_lost_contact(now: float | None = None) -> str:
    """Return a sentence on how long this process had lost contact with the SuperLink before it ended, or ""."""
    try:
        silent = (boot_seconds() if now is None else now) - float(os.environ[LAST_ANSWER])
    except (KeyError, ValueError):
        return ""
    if silent < LOST_SECONDS:
        return ""
    return (
        f"{LOST_CONTACT}the ServerApp had no answer from the SuperLink for {silent:,.0f} s, so Flower ended its run. A "
        "paused machine, heavy swapping or a SuperLink that was down are the usual causes. Uploads in transit are "
        "discarded, and sites keep the charge for the round that was in progress"
    )


def is_interruption(status: Mapping[str, Any]) -> bool:
    """Return whether a run ended for a reason that a resume may get past, by its status as `status_of` returns it.

    | status | a resume may help |
    |---|---|
    | died | yes, unless memory ran out, or probably did: it would run out again |
    | failed, because contact with the SuperLink was lost | yes |
    | failed for a reason of its own; stopped by a person; completed | no |
    """
    if status.get("state") == "died":
        about = status.get("process")
        cause = exit_cause(about if isinstance(about, dict) else {})
        return cause not in (ExitCause.MEMORY, ExitCause.PERHAPS_MEMORY)
    return status.get("state") == "failed" and str(status.get("reason") or "").startswith(LOST_CONTACT)


def describe_full_disk(*folders: Path) -> str:
    """Return which of these folders is on a full disk and how much is free, or "" if no full disk is found.

    A SuperLink returns status 500 when its disk is full, and only its own log says why.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
            if free < FULL_BYTES:
                return f"the disk of {folder} is full ({free / 1e6:,.0f} MB free): free some disk space"
    return ""


def child_exit_cause(code: int, before: Mapping[str, Any]) -> tuple[ExitCause, str]:
    """Return the cause that ended a child process with that code, and the setting to lower if memory was the cause.

    `before` is the result of `note_memory` from when the child was started. The child is in this process's
    cgroup, so a memory kill increases the cgroup's count.
    """
    cause = exit_cause({**before, "peak_mb": 0}) if code == -signal.SIGKILL else ExitCause.OTHER
    return cause, f", {cause}; {LOWER_AT_SITE}" if cause is ExitCause.MEMORY else ""


def describe_ending(about: Mapping[str, Any], lower: str = LOWER) -> str:
    """Return the cause with memory figures, for readers who may see them, and the setting to `lower`."""
    memory, limit = (_number(about.get(key)) for key in ("peak_mb", "limit_mb"))
    figures = f"{memory} of {limit} MB at its last report" if memory >= 0 else "not recorded"
    return {
        ExitCause.MEMORY: f"killed by the kernel because memory ran out: {figures}; {lower}",
        ExitCause.PERHAPS_MEMORY: f"killed, probably because memory ran out: {figures}; {lower}",
        ExitCause.MACHINE: f"the machine was restarted, or this is another one; its memory was {figures}",
        ExitCause.OTHER: f"killed, or it crashed, or its disk was full; its memory was {figures}",
    }[exit_cause(about)]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is Python's or torch's out-of-memory error; on the CPU, torch has no type for it."""
    kinds = (MemoryError.__name__, OutOfMemoryError.__name__)  # torch also has an error with this name
    return type(error).__name__ in kinds or "can't allocate memory" in str(error)


def resume_command(folder: Path) -> str:
    """Return a sentence on how to resume the run in a folder."""
    if os.environ.get(TEMPORARY):
        return "its federation was temporary: start the run again"
    config = shlex.quote(str(folder.absolute() / "resume.toml"))
    return f"resume it: fedveil submit --federation FOLDER --config {config}"


def _number(value: object) -> int:
    return value if isinstance(value, int) else -1


def _group() -> Path:
    """Return the folder of this process's memory cgroup (v2 or v1); in a container, the top visible one."""
    folders = [_CGROUPS / "memory", _CGROUPS]
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            folders.insert(0, (_CGROUPS / "memory" if controllers else _CGROUPS) / path.lstrip("/"))
    return next((folder for folder in folders if _oom_kills(folder) >= 0), _CGROUPS)


def _oom_kills(group: Path) -> int:
    """Return the kernel's count; -1 if it cannot be read."""
    for line in (_read(group / "memory.events") + _read(group / "memory.oom_control")).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return -1


def _boot() -> str:
    return _read(Path("/proc/sys/kernel/random/boot_id")).strip()


def _kilobytes(text: str, key: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


MOST = 5  # maximum number of sites per reason, and of reasons; the records have all of them


def group_by_reason(failed: Mapping[str, str], most: int = MOST) -> list[str]:
    """Return texts like ["east, north: why", "west: another", "and 2 more"] from each site's reason, in order."""
    sites: dict[str, list[str]] = {}
    for site, reason in failed.items():
        sites.setdefault(reason, []).append(site)
    lines = [f"{', '.join(_cut(names, most))}: {reason}" for reason, names in sites.items()]
    rest = sum(len(names) for names in list(sites.values())[most:])
    return [*lines[:most], *([f"and {rest} more"] if rest else [])]


def _cut(names: list[str], most: int) -> list[str]:
    return [*names[:most], f"and {len(names) - most} more"] if len(names) > most else names
