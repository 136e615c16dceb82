"""Run the app on Flower's simulation engine: many sites in a few processes on this machine, without a network.

This needs the extra "simulation". It stops everything it starts, including Flower's SuperLink, which would keep
running.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedveil.console.flower.app_bundle import copy_app
from fedveil.console.flower.machine import Value, format_toml, free_ports
from fedveil.console.flower.processes import LaunchError, ProcessGroup, flower_environment


class LocalSimulation:
    """A Flower SuperLink for simulations; none of its processes outlive the `with` block.

    Attributes:
        processes: all processes it has started.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                'simulation: expected the extra "simulation" (ray), found none; run: '
                "pip install --require-hashes --no-deps -r lock/simulation.txt"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="fedveil-"))
        self.processes = ProcessGroup(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, nodes: int, settings: Mapping[str, Value], timeout: float) -> dict[str, Any]:
        """Run this installation's app on `nodes` nodes until it ends; each node trains on one core.

        Returns the run's status.json, or {} if the run wrote none.

        Raises:
            LaunchError: `flwr run` failed or timed out.
        """
        file, (control, api) = self._folder / "run.toml", free_ports(2)
        file.write_text(format_toml(settings), encoding="utf-8")
        env = flower_environment(self._folder / "flower") | {
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(api),
            "HF_HUB_OFFLINE": "1",
        }
        federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
        with copy_app(None) as app:
            command = ["flwr", "run", str(app), "--stream", "-c", str(file), "--federation-config", federation]
            self.processes.call("simulation", command, env, timeout)
        with suppress(OSError):
            status = Path(str(settings["run.dir"])) / str(settings["run.name"]) / "status.json"
            return dict(json.loads(status.read_text()))
        return {}
