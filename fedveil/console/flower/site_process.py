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
# Of a server's SuperExec and apps: they find what Flower's own would find.
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
    """Writes the site's `flwr-clientapp`, which goes before Flower's own on the PATH (fedveil/guard/clientapp.py).

    On Linux also a `flower-superexec` that starts it without a new Python (fedveil/guard/process_zygote.py). They run
    this installation, and take no PYTHON* variable from their environment: another user's PYTHONPATH, or a forgotten
    one, would put other code in the place of the guard.
    """
    if sys.platform == "linux":
        write_program(folder / "flower-superexec", "guard.process_zygote", f"require_policy={require_policy}")
    return write_program(folder / CLIENT_APP, "guard.clientapp", f"require_policy={require_policy}")


def write_programs(folder: Path, own_ports: bool) -> Path:
    """Writes all of an image's or a host's programs; returns the guard's."""
    write_superlink(folder)
    write_program(folder / "flower-supernode", "guard.supernode", "")
    if own_ports:
        write_own_ports(folder)
    return write_guard(folder)


def write_superlink(folder: Path) -> None:
    """Writes a `flower-superlink` that knows the sites' last days and its operators (fedveil/guard/superlink.py).

    Beside it `flower-superexec` and `flwr-serverapp`, which outlive what the SuperLink answers.
    """
    write_program(folder / "flower-superlink", "guard.superlink", "")
    write_program(folder / "flower-superexec", "guard.superexec", "", _SCRIPT_OF_SERVER)
    write_program(folder / SERVER_APP, "guard.serverapp", "", _SCRIPT_OF_SERVER)


def write_own_ports(folder: Path) -> None:
    """Writes `flower-superlink` and `flower-supernode` that serve this user alone (fedveil/guard/loopback_ports.py).

    Only for Linux, and for a SuperExec on the same machine: in containers a network of their own takes their place.
    Elsewhere `flower-superlink` has the other checks alone.
    """
    write_superlink(folder)
    for program in _OWN_PORTS if sys.platform == "linux" else ():
        write_program(folder / program, "guard.loopback_ports", repr(program))


def write_program(script: Path, module: str, argument: str, form: str = _SCRIPT) -> Path:
    """Write a program of this installation that calls `main(argument)` of a module: "guard.supernode". Return it.

    In one piece: a process that was just started reads its program when another one is about to be started, and
    Python takes a file that is empty at that moment for a program that does nothing, and ends with exit code 0.
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
    """`env` for a SuperNode or SuperExec whose client processes pass the site's entry point, written to `folder`."""
    script = write_guard(folder, require_policy)
    return {**env, "PATH": os.pathsep.join([str(script.parent), env["PATH"]])}


def unguarded_environment(env: Mapping[str, str], folder: Path, own_waits: bool = False) -> dict[str, str]:
    """`env` for a SuperNode or SuperExec on this machine whose client processes nothing checks.

    `own_waits`: with Flower's own programs and its own waits (fedveil/guard/poll_backoff.py).
    """
    if own_waits or sys.platform != "linux":
        return {**env, poll_backoff.VARIABLE: "3"}
    write_program(folder / "flower-superexec", "guard.process_zygote", "guarded=False")
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def single_user_environment(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`env` for a SuperLink or SuperNode whose HTTP port serves this user alone; its program is written to `folder`."""
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
    """Starts a SuperLink or SuperNode and, apart from it, its SuperExec; returns the number of the SuperExec's process.

    Flower asks a SuperExec for its `secret` only where it has not started it itself. Apps run in the folder `cwd`.
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
    """Starts the SuperExec alone, of a SuperLink or SuperNode `name` that runs; returns its process's number."""
    processes.start(SUPEREXEC, superexec_command(port, secret, processes.pid(name), ca), env, of=name, cwd=cwd)
    return processes.pid(f"{name} {SUPEREXEC}")


def start_spare(site: SiteConfig, owner: int, env: Mapping[str, str]) -> WorkerRecord:
    """A worker without a run, of this installation's own app, that ends with the process `owner`.

    The first run of the same app version takes it. Raises LaunchError where there is no such process.
    """
    folder = WorkerRegistry(site.state_dir, site.site)
    try:
        whose = OwnerProcess.from_pid(owner)
    except psutil.NoSuchProcess:
        raise LaunchError(f"owner: expected a running process, found none with PID {owner}") from None
    with folder.locked():
        return folder.start(site, whose, "", env=env)
