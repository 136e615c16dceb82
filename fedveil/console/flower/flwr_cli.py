"""Flower's CLI against a running server: nodes and runs. Each call costs a CPU second, so call it sparingly."""

from __future__ import annotations

import json
import shlex
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil.console.flower.app_bundle import copy_app
from fedveil.console.flower.machine import Value, format_toml
from fedveil.console.flower.processes import CALL_TIMED_OUT, LaunchError, ProcessGroup, flower_environment

CONNECTION = "fedveil"
_IN_FEDERATION = ("server", "flower")  # the FLWR_HOME in a folder made by fedveil provision
_GONE = "unregistered"
_SILENT = "Connection to the SuperLink is unavailable"  # Flower's message; its text box may break it anywhere


class ServerUnreachableError(LaunchError):
    """Raised when nothing answers at the control port."""


def write_connection(home: Path, address: str, ca: Path) -> None:
    """Write config.toml to a FLWR_HOME: the SuperLink's control port, HOST:PORT, and the CA to trust there."""
    about = format_toml({"address": address, "root-certificates": str(ca)})
    (home / "config.toml").write_text(f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{about}')


def _follow_move(home: Path) -> None:
    """Rewrite the connection in a federation's folder if the folder was moved, because Flower needs an absolute path.

    Raises LaunchError if config.toml cannot be read or written.
    """
    file, own = home / "config.toml", home.parent / "ca.crt"
    if home.parts[-2:] != _IN_FEDERATION or not own.is_file():
        return
    try:
        about = tomllib.loads(file.read_text())["superlink"][CONNECTION]
        if Path(about["root-certificates"]) != own:
            write_connection(home, about["address"], own)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LaunchError(
            f"{file}: expected a connection to this folder's server, found one that cannot be read or written "
            f"({type(error).__name__}: {error}); give this user access to it, or restore it"
        ) from None


def _homeless(home: Path) -> LaunchError:
    """Return the error for a FLWR_HOME without config.toml. Users set it with --federation FOLDER."""
    here = home.absolute()
    if here.parts[-2:] != _IN_FEDERATION:
        return LaunchError(f"FLWR_HOME: expected config.toml in {home}, found none; name the folder that contains it")
    return LaunchError(
        f"{here.parents[1]}: expected a folder made by fedveil provision, found no {'/'.join(_IN_FEDERATION)}/"
        "config.toml in it; name that folder"
    )


class FlowerCli:
    """Runs `flwr` with a connection from a FLWR_HOME.

    Args:
        home: the FLWR_HOME, whose config.toml has the connection.
        connection: the connection's name; default: the one that `write_connection` wrote.
        processes: the group that starts `flwr`; default: a new one for this object only.
        env: the environment for `flwr`; default: `flower_environment(home)`.
    """

    def __init__(
        self,
        home: Path,
        connection: str = CONNECTION,
        processes: ProcessGroup | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not (home / "config.toml").is_file():
            raise _homeless(home)
        self.home, self._connection = home.absolute(), connection
        _follow_move(self.home)
        self._processes, self._env = processes or ProcessGroup(home), env or flower_environment(self.home)

    def nodes(self) -> dict[str, str]:
        """Return "online", "offline" or "registered" by node ID; Flower does not return names here."""
        listed = self._call("supernode", "ls", self._connection)["nodes"]
        return {str(n["node-id"]): str(n["status"]) for n in listed if n["status"] != _GONE}

    def register(self, public: str, name: str) -> str:
        """Register a public key and return its node ID. Raises LaunchError with Flower's reason."""
        with tempfile.NamedTemporaryFile("w", suffix=".pub") as file:
            file.write(public + "\n")
            file.flush()
            return str(self._call("supernode", "register", file.name, self._connection, "--name", name)["node-id"])

    def unregister(self, node_id: str) -> None:
        """Unregister a node, even one that is online."""
        self._call("supernode", "unregister", node_id, self._connection)

    def submit(self, app: Path | None, settings: Mapping[str, Value]) -> str:
        """Submit the app in folder `app` with run config `settings`; return Flower's run ID.

        None means this installation's own app.
        """
        with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
            file.write(format_toml(settings))
            file.flush()
            with copy_app(app) as copy:
                return str(self._call("run", str(copy.absolute()), self._connection, "-c", file.name)["run-id"])

    def run_status(self, run: str) -> str:
        """Return the run's status, such as "running" or "finished:failed". Raises LaunchError if the run is unknown."""
        runs = self._call("ls", self._connection, "--run-id", run)["runs"]
        if not runs:
            raise LaunchError(f"run: expected a run that the SuperLink knows, found {run}; flwr ls lists them")
        return str(runs[0]["status"])

    def unfinished_runs(self) -> dict[str, str]:
        """Return the status, such as "pending" or "running", of each unfinished run, by Flower's run ID."""
        listed = self._call("ls", self._connection)["runs"]
        return {
            str(run["run-id"]): str(run["status"]) for run in listed if not str(run["status"]).startswith("finished")
        }

    def stop(self, run: str) -> None:
        """Stop a run."""
        self._call("stop", run, self._connection)

    def by_hand(self, command: str, *arguments: str) -> str:
        """Return a `flwr` command that a user can type in any folder."""
        named = [] if self._connection == CONNECTION else [self._connection]  # `write_connection` made it the default
        return f"FLWR_HOME={shlex.quote(str(self.home))} {shlex.join(['flwr', command, *arguments, *named])}"

    def options(self) -> str:
        """Return the options that make `fedveil watch` query the same server."""
        named = [] if self._connection == CONNECTION else ["--connection", self._connection]
        return shlex.join(["--flower-home", str(self.home), *named])

    def log(self, run: str) -> str:
        """Return the output of the run's ServerApp."""
        return self._flwr("log", run, self._connection, "--show")

    def _call(self, *arguments: str) -> dict[str, Any]:
        text = self._flwr(*arguments, "--format", "json")
        try:
            answer = json.loads(text[text.index("{") :])
        except (ValueError, RecursionError):
            raise LaunchError(f"flwr {arguments[0]}: expected JSON, found {text.strip()[:300]!r}") from None
        if not answer.get("success"):
            raise self._failure(arguments[0], f"flwr {arguments[0]} failed: {answer.get('error-message', answer)}")
        return dict(answer)

    def _flwr(self, *arguments: str) -> str:
        try:
            # Run in its own folder: if ./CONNECTION has a pyproject.toml, Flower takes the name for that app's path.
            return self._processes.call("flwr", ["flwr", *arguments], self._env, cwd=self.home)
        except LaunchError as error:
            raise self._failure(arguments[0], str(error)) from None

    def _failure(self, command: str, reason: str) -> LaunchError:
        """Return Flower's error, with advice if the server did not answer."""
        if command == "run" and CALL_TIMED_OUT in reason:
            return LaunchError(
                f"{reason}; the server may have started the run: see {self.by_hand('ls')} before you submit it again"
            )
        if "".join(_SILENT.split()) not in "".join(reason.split()):
            return LaunchError(reason)
        home = self.home.absolute()
        folder = shlex.quote(str(home.parents[1])) if home.parts[-2:] == _IN_FEDERATION else "FOLDER"
        return ServerUnreachableError(
            f"flwr {command}: no answer from the server's control port (its address is in {self.home}/config.toml); "
            f"start the server with fedveil server start {folder}, or open your tunnel to it"
        )
