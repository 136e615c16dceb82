"""Small utilities: free ports and cores of this machine, and TOML text for Flower's own config files."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from fedveil.console.flower.processes import LaunchError

PORTS = range(20000, 32000)  # below the range that systems use for outgoing connections

Value = bool | int | float | str | Mapping[str, Any]


def format_toml(values: Mapping[str, Value]) -> str:
    """Return `values` as TOML text, one line per key."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in values.items())


def _toml_value(value: Value) -> str:
    if isinstance(value, Mapping):  # a table in a table, too
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def free_ports(count: int) -> list[int]:
    """Return `count` distinct free TCP ports on the loopback interface."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise LaunchError(f"ports: expected {count} free ports in {PORTS.start}-{PORTS.stop - 1}, found {len(ports)}")


def is_port_open(port: int) -> bool:
    """Return whether a process accepts connections on this loopback port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
        return True
    return False


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
