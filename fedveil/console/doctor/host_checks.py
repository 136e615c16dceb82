"""The `fedveil doctor` checks on the machine itself: the SuperLink program, other users, CPUs."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from fedveil.console.doctor.checks import CheckResult

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_NO_LOGIN = ("nologin", "false", "sync")
_FIRST_PERSON = 1000 if sys.platform == "linux" else 500  # lower IDs belong to the system
_CPUS = "2"  # default of FEDVEIL_CPUS in the compose files


def check_superlink() -> CheckResult:
    """Check that the running or installed `flower-superlink` activates a node only with that node's key."""
    import psutil

    running = [
        Path(f"/proc/{process.pid}/root{word}") if Path(f"/proc/{process.pid}/root").exists() else Path(word)
        for process in psutil.process_iter(["cmdline"])
        for word in (process.info["cmdline"] or [])[:3]
        if word.startswith("/") and Path(word).name == "flower-superlink"
    ]
    superlink_path = shutil.which("flower-superlink")
    programs = running or ([Path(superlink_path)] if superlink_path else [])
    for file in programs:
        if not any(
            name in file.read_bytes()[:4096] for name in (b"fedveil.guard.superlink", b"fedveil.guard.loopback_ports")
        ):
            return CheckResult(
                "superlink",
                "warn",
                f"{file} is Flower's own, with which anyone who knows a site's public key can keep that site offline; "
                "start the one in the image, or the one written by fedveil site guard --own-ports",
            )
    if not programs:
        return CheckResult("superlink", "ok", "no flower-superlink here; run this check where the server runs")
    return CheckResult("superlink", "ok", f"{programs[0]} activates a site only with that site's own key")


def check_other_users() -> CheckResult:
    """Check that a site without containers closes its ports to other users (fedveil/guard/loopback_ports.py)."""
    import pwd

    name = "other users"
    if any(Path(mark).exists() for mark in _CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in os.environ:
        return CheckResult(name, "ok", "in a container, whose network no other user shares")
    if _kernel_names_owners():
        return CheckResult(
            name, "ok", "the kernel reports the owner of each connection, so the site's ports serve only its own user"
        )
    people = [
        entry.pw_name
        for entry in pwd.getpwall()
        if entry.pw_uid >= _FIRST_PERSON and entry.pw_uid != os.geteuid() and Path(entry.pw_shell).name not in _NO_LOGIN
    ]
    if people:
        return CheckResult(
            name,
            "warn",
            f"{len(people)} other users can log in ({', '.join(people[:3])}), and the kernel does not report the "
            "owner of a connection; use a container or a dedicated machine",
        )
    return CheckResult(name, "ok", "no other user can log in here, according to this machine's user list")


def check_cpu_limit() -> CheckResult:
    """Check that the compose files' CPU limit does not exceed this machine's CPUs; container engines refuse that."""
    asked, there = os.environ.get("FEDVEIL_CPUS") or _CPUS, os.cpu_count() or 1
    if float(asked) > there:
        return CheckResult(
            "cpus",
            "warn",
            f"the compose files request {asked}, but this machine has {there}: put FEDVEIL_CPUS={there} in .env",
        )
    return CheckResult("cpus", "ok", f"{there}; the compose files request {asked}")


def _kernel_names_owners() -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as link,
        ):
            port = f":{link.getsockname()[1]:04X}"
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return False
    return any(row[1].endswith(port) and row[7] == str(os.geteuid()) for row in rows)
