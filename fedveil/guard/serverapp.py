"""`flwr-serverapp` for a server: Flower's program with two changes.

Its heartbeats continue after any answer (heartbeat.py). It installs only bundles that a person on the machine has
permitted, if there is a list of them (permitted_bundles.py).

Flower's heartbeats end after the first unexpected answer, and a minute later the SuperLink marks the run as failed.
"""

from __future__ import annotations

import sys

from fedveil.errors import ConfigError
from fedveil.guard import clientapp, heartbeat, permitted_bundles
from fedveil.guard.flower import replaced
from fedveil.guard.plain_log import write_plain_log

RUNTIME = "flwr.superlink.runtime.run_serverapp"


def main() -> None:
    """Run the process. It takes the arguments of Flower's own `flwr-serverapp`."""
    try:
        replaced.require_attributes("ServerApp process")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    write_plain_log()
    heartbeat.patch_task_heartbeat(RUNTIME)
    permitted_bundles.patch_install(RUNTIME)
    clientapp.unload_modules()  # the bundle contains its own
    from flwr.superlink.cli import flwr_serverapp

    flwr_serverapp()
