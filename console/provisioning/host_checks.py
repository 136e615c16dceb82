"""What `fedveil doctor` looks at on the machine itself: the SuperLink's program, other users, CPUs."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from fedveil.console.provisioning.checks import Check

_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")
_NO_LOGIN = ("nologin", "false", "sync")
_FIRST_PERSON = 1000 if sys.platform == "linux" else 500  # below are the system's own
_CPUS = "2"  # FEDVEIL_CPUS of the compose files


def superlink() -> Check:
    """Whether the `flower-superlink` that runs here, or else would be started, activates a node by its key alone."""
    import psutil

    running = [
        Path(f"/proc/{process.pid}/root{word}") if Path(f"/proc/{process.pid}/root").exists() else Path(word)
        for process in psutil.process_iter(["cmdline"])
        for word in (process.info["cmdline"] or [])[:3]
        if word.startswith("/") and Path(word).name == "flower-superlink"
    ]
    found = shutil.which("flower-superlink")
    programs = running or ([Path(found)] if found else [])
    for file in programs:
        if not any(
            name in file.read_bytes()[:4096] for name in (b"fedveil.guard.superlink", b"fedveil.guard.loopback")
        ):
            return Check(
                "superlink",
                "warn",
                f"{file} is Flower's own: whoever knows a site's public key can keep that site off; "
                "start the image's, or the one of fedveil site guard --own-ports",
            )
    if not programs:
        return Check("superlink", "ok", "no flower-superlink is here; ask where the server runs")
    return Check("superlink", "ok", f"{programs[0]} activates a site by its own key alone")


def other_users() -> Check:
    """Whether a site without containers keeps the other users of this machine out of its ports (guard/loopback.py)."""
    import pwd

    name = "other users"
    if any(Path(mark).exists() for mark in _CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in os.environ:
        return Check(name, "ok", "in a container: nobody else is in its network")
    if _kernel_names_owners():
        return Check(name, "ok", "the kernel says whose a connection is: the site's ports serve its own user alone")
    people = [
        entry.pw_name
        for entry in pwd.getpwall()
        if entry.pw_uid >= _FIRST_PERSON and entry.pw_uid != os.geteuid() and Path(entry.pw_shell).name not in _NO_LOGIN
    ]
    if people:
        return Check(
            name,
            "warn",
            f"{len(people)} others may log in ({', '.join(people[:3])}), and the kernel does not say whose a "
            "connection is: use a container, or a machine of the site's own",
        )
    return Check(name, "ok", "no other user may log in here, as far as this machine's list says")


def cpus() -> Check:
    """Whether a container engine would take the bound of the compose files: it refuses more CPUs than there are."""
    asked, there = os.environ.get("FEDVEIL_CPUS") or _CPUS, os.cpu_count() or 1
    if float(asked) > there:
        return Check(
            "cpus",
            "warn",
            f"compose files ask for {asked}, this machine has {there}: put FEDVEIL_CPUS={there} into .env",
        )
    return Check("cpus", "ok", f"{there}; compose files ask for {asked}")


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
