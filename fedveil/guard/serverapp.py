"""`flwr-serverapp` of a server: Flower's own with two changes.

Its heartbeats go on after any answer (heartbeat.py). It installs only bundles that a person on the machine has
permitted, if there is a list of them (permitted_bundles.py).

Flower's end at the first answer that they do not expect, and a minute later the SuperLink calls the run failed.
"""

from __future__ import annotations

import sys

from fedveil.errors import ConfigError
from fedveil.guard import clientapp, heartbeat, permitted_bundles
from fedveil.guard.flower import replaced

RUNTIME = "flwr.superlink.runtime.run_serverapp"


def main() -> None:
    """The process. Its arguments are those of Flower's own `flwr-serverapp`."""
    try:
        replaced.require_attributes("ServerApp process")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    heartbeat.patch_task_heartbeat(RUNTIME)
    permitted_bundles.patch_install(RUNTIME)
    clientapp.unload_modules()  # the bundle brings its own
    from flwr.superlink.cli import flwr_serverapp

    flwr_serverapp()
