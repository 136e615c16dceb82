"""Run a federation over gRPC on this machine: start and stop its processes, and find free ports.

Not covered by the compatibility promise.
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
