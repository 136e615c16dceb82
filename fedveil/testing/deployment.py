"""A federation over gRPC on this machine: what starts and stops its processes, and the ports that are free.

Not covered by compatibility.
"""

from __future__ import annotations

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite, RunOutcome
from fedveil.console.flower.machine import count_cores, free_ports
from fedveil.console.flower.processes import ProcessGroup

__all__ = [
    "LocalDeployment",
    "LocalSite",
    "ProcessGroup",
    "RunOutcome",
    "count_cores",
    "free_ports",
]
