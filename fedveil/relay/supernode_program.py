"""Flower's SuperNode as the process of either end."""

from __future__ import annotations

import sys

from fedveil.guard import loopback_ports, supernode


def as_this_user() -> None:
    """Make its own port serve only this user, where the kernel tells whose a connection is."""
    if sys.platform == "linux":
        loopback_ports.main("flower-supernode")
    else:
        supernode.main()
