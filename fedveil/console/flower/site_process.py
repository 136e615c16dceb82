"""Start a site's own processes next to Flower's SuperNode: the guarded entry point and a warm worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
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
from fedveil.guard.task_programs import CLIENT_APP, REFUSED_PROGRAMS, SERVER_APP

SUPEREXEC = "superexec"
_OWN_PORTS = ("flower-superlink", "flower-supernode")
# For a server's SuperExec and apps, which find the same packages as Flower's own programs.
_SCRIPT_OF_SERVER = """#!{python}
import os
import sys

sys.path.append({root!r})

from fedveil import proxies
from fedveil.{module} import main

proxies.exempt_loopback(os.environ, sys.argv)
main({argument})
"""
_REFUSAL = """#!/bin/sh
echo "{program}: this installation runs only {permitted}; FedVeil's guard does not check other programs" >&2
exit 2
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

from fedveil import proxies
from fedveil.{module} import main

proxies.exempt_loopback(os.environ, sys.argv)
main({argument})
"""


def write_guard(folder: Path, require_policy: bool = True) -> Path:
    """Write the site's `flwr-clientapp`, which comes before Flower's own on the PATH (fedveil/guard/clientapp.py).

    Also write a `flower-superexec` that starts no other program; on Linux, it starts this one without a new Python
    process (fedveil/guard/process_zygote.py). Flower's other task programs are replaced by refusals. All of these
    run this installation and ignore PYTHON* variables, because a forgotten or foreign PYTHONPATH would replace
    the guard with other code.
    """
    if sys.platform == "linux":
        write_program(folder / "flower-superexec", "guard.process_zygote", f"require_policy={require_policy}")
    else:
        write_program(folder / "flower-superexec", "guard.superexec", repr(CLIENT_APP))
    write_refusals(folder, (*REFUSED_PROGRAMS, SERVER_APP), CLIENT_APP)
    return write_program(folder / CLIENT_APP, "guard.clientapp", f"require_policy={require_policy}")


def write_programs(folder: Path, own_ports: bool) -> Path:
    """Write all programs for an image or a host, for a server or a site; return the guard's path."""
    write_program(folder / "flower-supernode", "guard.supernode", "")
    guard = write_guard(folder)
    if own_ports:
        write_own_ports(folder)
    else:
        write_superlink(folder)
    if sys.platform == "linux":
        write_program(folder / "flower-superexec", "guard.process_zygote", "is_image=True")
    else:
        write_program(folder / "flower-superexec", "guard.superexec", "None")
    return guard


def write_superlink(folder: Path) -> None:
    """Write a `flower-superlink` that enforces site expiry dates and operator roles (fedveil/guard/superlink.py).

    Also write `flower-superexec` and `flwr-serverapp`, which survive unexpected answers from the SuperLink.
    """
    write_program(folder / "flower-superlink", "guard.superlink", "")
    write_program(folder / "flower-superexec", "guard.superexec", repr(SERVER_APP), _SCRIPT_OF_SERVER)
    write_program(folder / SERVER_APP, "guard.serverapp", "", _SCRIPT_OF_SERVER)
    write_refusals(folder, REFUSED_PROGRAMS, f"{SERVER_APP} and {CLIENT_APP}")


def write_own_ports(folder: Path) -> None:
    """Write a `flower-superlink` and a `flower-supernode` that serve only this user (fedveil/guard/loopback_ports.py).

    This works only on Linux, with a SuperExec on the same machine; containers use their own network instead.
    Elsewhere `flower-superlink` has only the other checks.
    """
    write_superlink(folder)
    for program in _OWN_PORTS if sys.platform == "linux" else ():
        write_program(folder / program, "guard.loopback_ports", repr(program))


def write_program(script: Path, module: str, argument: str, form: str = _SCRIPT) -> Path:
    """Write a program that calls `main(argument)` of `module`, such as "guard.supernode"; return its path.

    The write is atomic: a just-started process may read its program while the next one is being written, and
    Python takes an empty file for a program that does nothing and exits with code 0.
    """
    about = {"python": sys.executable, "root": str(paths.import_root()), "cache": sys.pycache_prefix}
    return _write_script(script, form.format(**about, module=module, argument=argument))


def write_refusals(folder: Path, programs: Iterable[str], permitted: str) -> None:
    """Write programs that exit with code 2 and a reason, and come before Flower's own on the PATH."""
    for program in programs:
        _write_script(folder / program, _REFUSAL.format(program=program, permitted=permitted))


def _write_script(script: Path, text: str) -> Path:
    script.parent.mkdir(parents=True, exist_ok=True)
    partial = script.with_name(f".{script.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
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
    env = {**env, "PATH": os.pathsep.join([str(folder), env["PATH"]])}
    if own_waits or sys.platform != "linux":  # the PATH may have a server's SuperExec, which starts no ClientApp
        write_program(folder / "flower-superexec", "guard.superexec", repr(CLIENT_APP), _SCRIPT_OF_SERVER)
        return {**env, poll_backoff.VARIABLE: "3"}
    write_program(folder / "flower-superexec", "guard.process_zygote", "guarded=False")
    return env


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
    """Start a SuperLink or SuperNode and its separate SuperExec; return the SuperExec's process ID.

    Flower asks for the `secret` only if it did not start the SuperExec itself. Apps run in the folder `cwd`.
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
    """Start only the SuperExec for the running SuperLink or SuperNode `name`; return its process ID."""
    processes.start(SUPEREXEC, superexec_command(port, secret, processes.pid(name), ca), env, of=name, cwd=cwd)
    return processes.pid(f"{name} {SUPEREXEC}")


def start_spare(site: SiteConfig, owner: int, env: Mapping[str, str]) -> WorkerRecord:
    """Start a worker for this installation's app before any run; it ends with the process `owner`.

    The first run with the same app version uses it. Raises LaunchError if there is no process `owner`.
    """
    folder = WorkerRegistry(site.state_dir, site.site)
    try:
        whose = OwnerProcess.from_pid(owner)
    except psutil.NoSuchProcess:
        raise LaunchError(f"owner: expected a running process, found none with PID {owner}") from None
    with folder.locked():
        return folder.start(site, whose, "", env=env)
