"""Flower's command line against a running server: nodes, and what has become of a run. Each call costs a CPU-second."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.console.flower.bundle import copied
from fedveil.console.flower.local_federation import CONNECTION
from fedveil.console.flower.machine import Value, toml
from fedveil.console.flower.processes import LaunchError, Processes, environment

_GONE = "unregistered"


class Flower:
    """`flwr` with the connection of a FLWR_HOME; by default the one that `fedveil provision` writes."""

    def __init__(self, home: Path, connection: str = CONNECTION) -> None:
        if not (home / "config.toml").is_file():
            raise LaunchError(f"FLWR_HOME: expected config.toml in {home}, found none; name the folder that has it")
        self._home, self._connection = home, connection
        self._processes = Processes(home)

    def nodes(self) -> dict[str, str]:
        """ "online", "offline" or "registered" by node id: Flower does not tell the names here."""
        listed = self._call("supernode", "ls", self._connection)["nodes"]
        return {str(n["node-id"]): str(n["status"]) for n in listed if n["status"] != _GONE}

    def register(self, public: str, name: str) -> str:
        """Lets a public key in; returns its node id. Raises LaunchError with Flower's reason."""
        with tempfile.NamedTemporaryFile("w", suffix=".pub") as file:
            file.write(public + "\n")
            file.flush()
            return str(self._call("supernode", "register", file.name, self._connection, "--name", name)["node-id"])

    def unregister(self, node_id: str) -> None:
        """Shuts a node out, also one that is online."""
        self._call("supernode", "unregister", node_id, self._connection)

    def submit(self, app: Path | None, settings: Mapping[str, Value]) -> str:
        """Submits the app in a folder, or this installation's own, with these of its run config; returns Flower's number of the run."""
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(toml(settings))
            file.flush()
            with copied(app) as copy:
                return str(self._call("run", str(copy), self._connection, "-c", file.name)["run-id"])

    def run_status(self, run: str) -> str:
        """Such as "running" or "finished:failed". Raises LaunchError where there is no such run."""
        runs = self._call("ls", self._connection, "--run-id", run)["runs"]
        if not runs:
            raise LaunchError(f"run: expected one that the SuperLink knows, found {run}; flwr ls lists them")
        return str(runs[0]["status"])

    def _call(self, *arguments: str) -> dict[str, Any]:
        command = ["flwr", *arguments, "--format", "json"]
        text = self._processes.call("flwr", command, environment(self._home))
        try:
            answer = json.loads(text[text.index("{") :])
        except ValueError:
            raise LaunchError(f"flwr {arguments[0]}: expected JSON, found {text.strip()[:300]!r}") from None
        if not answer.get("success"):
            raise LaunchError(f"flwr {arguments[0]} failed: {answer.get('error-message', answer)}")
        return dict(answer)
