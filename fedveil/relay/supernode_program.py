"""Run Flower's SuperNode as the process of either end of a relay."""

from __future__ import annotations

import sys

from fedveil.guard import loopback_ports, supernode


def as_this_user() -> None:
    """Make the process's own port serve only this user, if the kernel reports a connection's owner."""
    if sys.platform == "linux":
        loopback_ports.main("flower-supernode")
    else:
        supernode.main()
