"""Start a site's own processes next to Flower's SuperNode: the entry point that decides, and a warm worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from fedveil import paths
from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.worker.connection import WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.console.flower.processes import LaunchError, ProcessGroup
from fedveil.console.flower.programs import superexec_command
from fedveil.guard import poll_backoff

CLIENT_APP, SERVER_APP = "flwr-clientapp", "flwr-serverapp"
SUPEREXEC = "superexec"
_OWN_PORTS = ("flower-superlink", "flower-supernode")
# For a server's SuperExec and apps: they find the same packages as Flower's own programs.
_SCRIPT_OF_SERVER = """#!{python}
import sys

sys.path.append({root!r})

from fedveil.{module} import main

main({argument})
"""
_SCRIPT = """#!{python} -I
import os
import sys

sys.path.append({root!r})
sys.pycache_prefix = {cache!r}
for name in [name for name in os.environ if name.startswith("PYTHON")]:
    del os.environ[name]
if sys.pycache_prefix:
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix  # for the worker

from fedveil.{module} import main

main({argument})
"""


def write_guard(folder: Path, require_policy: bool = True) -> Path:
    """Write the site's `flwr-clientapp`, which precedes Flower's own on the PATH (fedveil/guard/clientapp.py).

    On Linux, also a `flower-superexec` that starts it without a new Python (fedveil/guard/process_zygote.py). They
    run this installation and ignore PYTHON* variables, because a forgotten or another user's PYTHONPATH would replace
    the guard with other code.
    """
    if sys.platform == "linux":
        write_program(folder / "flower-superexec", "guard.process_zygote", f"require_policy={require_policy}")
    return write_program(folder / CLIENT_APP, "guard.clientapp", f"require_policy={require_policy}")


def write_programs(folder: Path, own_ports: bool) -> Path:
    """Write all programs of an image or a host; return the guard's."""
    write_superlink(folder)
    write_program(folder / "flower-supernode", "guard.supernode", "")
    if own_ports:
        write_own_ports(folder)
    return write_guard(folder)


def write_superlink(folder: Path) -> None:
    """Write a `flower-superlink` that enforces the sites' last days and the operators (fedveil/guard/superlink.py).

    Also write `flower-superexec` and `flwr-serverapp`, which survive unexpected answers from the SuperLink.
    """
    write_program(folder / "flower-superlink", "guard.superlink", "")
    write_program(folder / "flower-superexec", "guard.superexec", "", _SCRIPT_OF_SERVER)
    write_program(folder / SERVER_APP, "guard.serverapp", "", _SCRIPT_OF_SERVER)


def write_own_ports(folder: Path) -> None:
    """Write `flower-superlink` and `flower-supernode` that serve only this user (fedveil/guard/loopback_ports.py).

    Only on Linux, with a SuperExec on the same machine; containers use a network of their own instead.
    Elsewhere `flower-superlink` has only the other checks.
    """
    write_superlink(folder)
    for program in _OWN_PORTS if sys.platform == "linux" else ():
        write_program(folder / program, "guard.loopback_ports", repr(program))


def write_program(script: Path, module: str, argument: str, form: str = _SCRIPT) -> Path:
    """Write a program of this installation that calls `main(argument)` of a module: "guard.supernode". Return it.

    The write is atomic: a process that was just started may read its program while the next one is being written, and
    Python takes an empty file for a program that does nothing and exits with code 0.
    """
    about = {"python": sys.executable, "root": str(paths.import_root()), "cache": sys.pycache_prefix}
    text = form.format(**about, module=module, argument=argument)
    script.parent.mkdir(parents=True, exist_ok=True)
    partial = script.with_name(f".{script.name}.{os.getpid()}.part")
    partial.write_text(text)
    partial.chmod(0o755)
    partial.replace(script)
    return script


def guarded_environment(env: Mapping[str, str], folder: Path, require_policy: bool = True) -> dict[str, str]:
    """Return `env` for a SuperNode or SuperExec with guarded client processes; write the entry point to `folder`."""
    script = write_guard(folder, require_policy)
    return {**env, "PATH": os.pathsep.join([str(script.parent), env["PATH"]])}


def unguarded_environment(env: Mapping[str, str], folder: Path, own_waits: bool = False) -> dict[str, str]:
    """Return `env` for a SuperNode or SuperExec on this machine with unguarded client processes.

    `own_waits`: use Flower's own programs and polling intervals (fedveil/guard/poll_backoff.py).
    """
    if own_waits or sys.platform != "linux":
        return {**env, poll_backoff.VARIABLE: "3"}
    write_program(folder / "flower-superexec", "guard.process_zygote", "guarded=False")
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def single_user_environment(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `env` for a SuperLink or SuperNode whose port serves only this user; write its program to `folder`."""
    write_own_ports(folder)
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def start_isolated(
    processes: ProcessGroup,
    name: str,
    command: list[str],
    env: Mapping[str, str],
    port: int,
    secret: Path,
    ca: Path | None = None,
    cwd: Path | None = None,
) -> int:
    """Start a SuperLink or SuperNode and its separate SuperExec; return the SuperExec's process id.

    Flower asks a SuperExec for its `secret` only if it did not start it itself. Apps run in the folder `cwd`.
    """
    processes.start(name, command, env)
    return start_superexec(processes, name, env, port, secret, ca, cwd)


def start_superexec(
    processes: ProcessGroup,
    name: str,
    env: Mapping[str, str],
    port: int,
    secret: Path,
    ca: Path | None = None,
    cwd: Path | None = None,
) -> int:
    """Start only the SuperExec of the running SuperLink or SuperNode `name`; return its process id."""
    processes.start(SUPEREXEC, superexec_command(port, secret, processes.pid(name), ca), env, of=name, cwd=cwd)
    return processes.pid(f"{name} {SUPEREXEC}")


def start_spare(site: SiteConfig, owner: int, env: Mapping[str, str]) -> WorkerRecord:
    """Start a worker without a run, for this installation's app, that ends with the process `owner`.

    The first run of the same app version takes it. Raises LaunchError if there is no such process.
    """
    folder = WorkerRegistry(site.state_dir, site.site)
    try:
        whose = OwnerProcess.from_pid(owner)
    except psutil.NoSuchProcess:
        raise LaunchError(f"owner: expected a running process, found none with PID {owner}") from None
    with folder.locked():
        return folder.start(site, whose, "", env=env)
