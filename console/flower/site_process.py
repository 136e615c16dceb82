"""What runs at a site beside Flower's SuperNode: the site's own entry point, which decides, and a warm worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from fedveil import places
from fedveil.client_app.site.node_config import Site
from fedveil.client_app.worker.cards import Card, Folder
from fedveil.client_app.worker.owner import Owner
from fedveil.console.flower.processes import LaunchError, Processes
from fedveil.console.flower.programs import superexec
from fedveil.guard import pace
from fedveil.guard.relay.ends import Settings

CLIENT_APP = "flwr-clientapp"
_OWN_PORTS = ("flower-superlink", "flower-supernode")
_SCRIPT = """#!{python} -I
import os
import sys

sys.path.append({root!r})
sys.pycache_prefix = {cache!r}
for name in [name for name in os.environ if name.startswith("PYTHON")]:
    del os.environ[name]
if sys.pycache_prefix:
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix  # for the worker

from fedveil.guard.{module} import main

main({argument})
"""


def write_guard(folder: Path, require_policy: bool = True) -> Path:
    """Writes the site's `flwr-clientapp`, which goes before Flower's own on the PATH (guard/clientapp.py).

    On Linux also a `flower-superexec` that starts it without a new Python (guard/resident.py). They run this
    installation, and take no PYTHON* variable from their environment: another user's PYTHONPATH, or a forgotten one,
    would put other code in the place of the guard.
    """
    if sys.platform == "linux":
        _write(folder / "flower-superexec", "resident", f"require_policy={require_policy}")
    return _write(folder / CLIENT_APP, "clientapp", f"require_policy={require_policy}")


def write_programs(folder: Path, own_ports: bool) -> Path:
    """Writes all of an image's or a host's programs; returns the guard's."""
    write_superlink(folder)
    _write(folder / "flower-supernode", "supernode", "")
    if own_ports:
        write_own_ports(folder)
    return write_guard(folder)


def write_superlink(folder: Path) -> None:
    """Writes a `flower-superlink` that knows the sites' last days and its operators (guard/superlink.py)."""
    _write(folder / "flower-superlink", "superlink", "")


def write_own_ports(folder: Path) -> None:
    """Writes `flower-superlink` and `flower-supernode` that serve this user alone (guard/loopback.py).

    Only for Linux, and for a SuperExec on the same machine: in containers a network of their own takes their place.
    Elsewhere `flower-superlink` has the other checks alone.
    """
    write_superlink(folder)
    for program in _OWN_PORTS if sys.platform == "linux" else ():
        _write(folder / program, "loopback", repr(program))


def _write(script: Path, module: str, argument: str) -> Path:
    """In one piece: a process that was just started reads its program when another one is about to be started, and
    Python takes a file that is empty at that moment for a program that does nothing, and ends with exit code 0.
    """
    about = {"python": sys.executable, "root": str(places.root()), "cache": sys.pycache_prefix}
    text = _SCRIPT.format(**about, module=module, argument=argument)
    script.parent.mkdir(parents=True, exist_ok=True)
    partial = script.with_name(f".{script.name}.{os.getpid()}.part")
    partial.write_text(text)
    partial.chmod(0o755)
    partial.replace(script)
    return script


def guarded(env: Mapping[str, str], folder: Path, require_policy: bool = True) -> dict[str, str]:
    """`env` for a SuperNode or SuperExec whose client processes pass the site's entry point, written to `folder`."""
    script = write_guard(folder, require_policy)
    return {**env, "PATH": os.pathsep.join([str(script.parent), env["PATH"]])}


def unguarded(env: Mapping[str, str], folder: Path, own_waits: bool = False) -> dict[str, str]:
    """`env` for a SuperNode or SuperExec on this machine whose client processes nothing checks.

    `own_waits`: with Flower's own programs and its own waits (guard/pace.py).
    """
    if own_waits or sys.platform != "linux":
        return {**env, pace.VARIABLE: "3"}
    _write(folder / "flower-superexec", "resident", "guarded=False")
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def alone(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`env` for a SuperLink or SuperNode whose HTTP port serves this user alone; its program is written to `folder`."""
    write_own_ports(folder)
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def relayed(env: Mapping[str, str], folder: Path, end: str, settings: Settings) -> dict[str, str]:
    """`env` for a SuperNode that is one end of a relay (guard/relay): "server" or "site". `folder`: of its program."""
    _write(folder / "flower-supernode", f"relay.{end}", repr(settings.to_text()))
    return {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}


def start_isolated(
    processes: Processes,
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
    processes.start("superexec", superexec(port, secret, processes.pid(name), ca), env, of=name, cwd=cwd)
    return processes.pid(f"{name} superexec")


def start_spare(site: Site, owner: int, env: Mapping[str, str]) -> Card:
    """A worker without a run, of this installation's own app, that ends with the process `owner`.

    The first run of the same app version takes it. Raises LaunchError where there is no such process.
    """
    folder = Folder(site.state_dir, site.site)
    try:
        whose = Owner.of(owner)
    except psutil.NoSuchProcess:
        raise LaunchError(f"owner: expected a running process, found none with number {owner}") from None
    with folder.locked():
        return folder.start(site, whose, "", env=env)
