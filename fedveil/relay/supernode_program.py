"""Flower's SuperNode as the process of either end."""

from __future__ import annotations

import sys

from fedveil.guard import loopback_ports, supernode


def as_this_user() -> None:
    """Its own port serves this user alone, where the kernel says who asks."""
    if sys.platform == "linux":
        loopback_ports.main("flower-supernode")
    else:
        supernode.main()
