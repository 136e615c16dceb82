"""The server of a federation without containers: SuperLink and SuperExec, from what `fedveil provision` made."""

from __future__ import annotations

import errno
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedveil import places
from fedveil.console.flower.machine import listens
from fedveil.console.flower.processes import Processes, environment
from fedveil.console.flower.programs import superlink
from fedveil.console.flower.site_process import alone, start_isolated
from fedveil.console.provisioning import checks
from fedveil.console.provisioning.federation import Members, registry
from fedveil.errors import ConfigError
from fedveil.foreign import shown

NAME = "superlink"
_FILES = ("ca.crt", "server.pem", "server.key", "superexec-secret")
_READY_SECONDS = 60.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Server:
    """A server about to be started.

    Attributes:
        folder: what `fedveil provision` made; apps run there, so that a relative run.dir lies in it.
        name: the federation's.
        fleet: HOST:PORT at which it listens for sites.
        control_port: on the loopback.
        state: folder of the database, the control port's log, and the programs' logs.
    """

    folder: Path
    name: str
    fleet: str
    control_port: int
    state: Path


def settled(folder: Path, listen: str | None = None, state: Path | None = None) -> Server:
    """The federation's values with the options before them, checked; nothing is started.

    Raises:
        ConfigError: a file of the folder is missing or over, or a port is in use; it names the file or the port.
    """
    federation = Members(folder).federation
    for name in _FILES:
        if not (folder / "server" / name).is_file():
            raise ConfigError(
                f"{folder / 'server'}: expected {name}, found none; bring it back, or fedveil members renew-server"
            )
    key = folder / "server" / "server.key"
    if (mode := stat.S_IMODE(key.stat().st_mode)) & 0o077:
        raise ConfigError(f"{key}: expected to be readable by its owner only, found mode {mode:o}; chmod 600 {key}")
    for name in ("ca.crt", "server.pem"):
        file = folder / "server" / name
        found = checks.guarded(name, lambda file=file: checks.certificate(file))  # type: ignore[misc]
        if found.verdict == "fail":
            raise ConfigError(f"{file}: expected a certificate that is valid now, found another: {found.text}")
    fleet = listen or f"0.0.0.0:{federation.fleet_port}"
    try:
        host, port = checks.address(fleet)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}; write it as 0.0.0.0:9092") from None
    require_free("fleet-port", host, port)
    require_free("control-port", "127.0.0.1", federation.control_port)
    where = (state or folder / "server").expanduser().absolute()
    return Server(folder.absolute(), federation.name, fleet, federation.control_port, where)


def require_free(what: str, host: str, port: int) -> None:
    """Raises ConfigError where nobody can listen at that address, with the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a server left a moment ago is no listener
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            said = f"it in use: {_listening(port)}" if used else f"it cannot be used ({error})"
            raise ConfigError(
                f"{what}: expected a free port at {host}:{port}, found {said}; if it is an earlier start of this "
                "federation's server, end it, else provision one with another port"
            ) from None


def _listening(port: int) -> str:
    """Who listens at a port, as far as this user may know: also what a killed fedveil server start has left."""
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return f"process {found.pid} ({shown(psutil.Process(found.pid).name(), 40)}) listens (kill {found.pid})"
    return "another server runs here, or another program"


def run(server: Server) -> int:
    """Starts both programs and stays until one of them ends; that raises ConfigError with the end of its log."""
    own = server.folder / "server"
    places.private_folder(server.state / "logs")
    processes = Processes(server.state / "logs")
    env = alone(environment(places.private_folder(server.state / "apps")), server.state / "bin")
    command = superlink(
        own, registry(server.folder), server.state, server.control_port, server.fleet, True, own / "superexec-secret"
    )
    print("Starting Flower's server; some seconds", file=sys.stderr, flush=True)
    try:
        start_isolated(
            processes, NAME, command, env, server.control_port, own / "superexec-secret", own / "ca.crt", server.folder
        )
        _until(lambda: listens(server.control_port), processes)
        print(f"server of {server.name}: sites at {server.fleet}, log {processes.log(NAME)}")
        print(f"a relative run.dir of a run is below {server.folder}; Ctrl-C stops both programs")
        print(f"next: fedveil submit --federation {server.folder} --set method.name=fedrand", flush=True)
        while processes.ended(NAME) is None:
            time.sleep(_POLL_SECONDS)
        raise _ended(processes)
    finally:
        processes.stop()


def _until(ready: Callable[[], bool], processes: Processes) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not ready():
        if processes.ended(NAME) is not None:
            raise _ended(processes)
        if time.monotonic() > deadline:
            raise ConfigError(f"server: not ready within {_READY_SECONDS:.0f} s; its log ends: {processes.tail(NAME)}")
        time.sleep(_POLL_SECONDS)


def _ended(processes: Processes) -> ConfigError:
    code = processes.ended(NAME)
    return ConfigError(f"server: its SuperLink or SuperExec ended with exit code {code}: {processes.tail(NAME)}")
