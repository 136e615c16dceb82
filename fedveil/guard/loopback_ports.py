"""Restrict Flower's HTTP ports on this machine to one user: `flower-superlink` and `flower-supernode` with a check.

Flower has no users on its control port, and its runtime ports require a secret only when a process requests a task.
Any user on a machine can reach a loopback port. So before Flower reads a connection's first request, this
module asks the kernel which user owns the other end.

| the other end | result |
|---|---|
| belongs to this process's user or to root | Flower answers |
| belongs to another user | 403, and the request is not read |
| is at another address, is already closed, or has no owner known to the kernel | 403, and the request is not read |
| belonged to this user or root on an earlier request over the same connection | Flower answers |

A 200 MB message takes hundreds of requests, and the kernel's table has a line for every connection on the machine.
Reading it for each request took a sixth of the CPU time of a SuperLink or SuperNode with large messages. So a
connection is identified by the object that uvicorn creates once for its address. Another connection has a different
object, even from the same port, and no other object can have the same identity while the first is stored here.

Only Linux provides this (/proc/net/tcp); elsewhere these programs do not replace Flower's own.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
from collections import OrderedDict
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.supercore import log

from fedveil.guard import duplicate_pushes, superlink, supernode
from fedveil.guard.operator_access import App, Scope

_TABLE = Path("/proc/net/tcp")
_MALLOPT = {-3: 32 << 20, -1: 16 << 20, -8: 2}  # M_MMAP_THRESHOLD, at most 32 MiB; M_TRIM_THRESHOLD; M_ARENA_MAX
_MOST_KNOWN = 4096  # beyond this, the kernel is queried again
_ESTABLISHED = "01"  # a closed socket no longer has a user, and the table shows 0 for it
_PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
}


def connection_owner(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user who owns the client's end of a local connection; None if the kernel does not know."""
    try:
        local, remote = _entry(client), _entry(server)
    except OSError:  # not an IPv4 address
        return None
    for line in _TABLE.read_text().splitlines()[1:]:
        words = line.split()
        if words[1:4] == [local, remote, _ESTABLISHED]:
            return int(words[7])
    return None


def close_to_other_users(app: App) -> App:
    """Wrap `app`, an ASGI application, to serve only connections from this process's user and root."""
    known: OrderedDict[int, Any] = OrderedDict()  # the address objects of admitted connections, by identity

    async def asked(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        client, server = scope.get("client"), scope.get("server")
        if client is not None and known.get(id(client)) is client:
            await app(scope, receive, send)
            return
        user = connection_owner((client[0], client[1]), (server[0], server[1])) if client and server else None
        if user is not None and user in (0, os.geteuid()):
            known[id(client)] = client
            while len(known) > _MOST_KNOWN:
                known.popitem(last=False)
            await app(scope, receive, send)
            return
        log(WARNING, "refused a connection from user %s: this port serves only user %s", user, os.geteuid())
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"this port serves only one user of this machine\n"})

    return asked


def keep_blocks() -> bool:
    """Let this process, which only forwards messages, reuse the memory of a slice for the next one.

    Otherwise glibc, which must return slice-sized blocks immediately (fedveil/console/flower/processes.py), makes
    the kernel zero 1.25 MB for each slice: a third of both programs' CPU time with large messages. With two arenas,
    their peak memory is unchanged; between rounds they retain about half a message. Return whether glibc accepted the
    setting; another libc is left unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(parameter, value) for parameter, value in _MALLOPT.items()]
    return all(taken)


def main(program: str) -> None:
    """Run Flower's `program`. A SuperLink takes two more arguments than Flower's own (fedveil/guard/superlink.py)."""
    keep_blocks()
    fronts = superlink.prepare_arguments() if program == "flower-superlink" else None
    if program == "flower-supernode":
        supernode.patch_supernode()
    if fronts is not None:
        fronts.serve(also=close_to_other_users)
    else:
        superlink.serve_through(close_to_other_users)
    if program == "flower-superlink":
        superlink.patch_superlink()
    else:
        duplicate_pushes.patch_duplicate_pushes()
    module, function = _PROGRAMS[program]
    getattr(importlib.import_module(module), function)()


def _entry(address: tuple[str, int]) -> str:
    """Format an address as in the kernel's table: "0100007F:1F40" for 127.0.0.1:8000 on most machines."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
