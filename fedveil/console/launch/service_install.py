"""Describe a federation's server or a site as a systemd service, and print or write its unit file."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from fedveil import paths
from fedveil.console.doctor import checks
from fedveil.console.launch.service_unit import ServiceUnit, format_unit
from fedveil.console.provisioning import kit_reader
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.terminal import say
from fedveil.errors import ConfigError

__all__ = ["add_service_options", "describe_server", "describe_site", "install_unit"]

_PROGRAM = ("-P", "-m", "fedveil.console.main")
_SYSTEM = Path("/etc/systemd/system")
_HOME = "~"
_FIRST_PORT = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")  # for IPv6 too
_FIRST_PORT_BY_DEFAULT = 1024


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the server's and a site's command share."""
    parser.add_argument("--user", required=True, help="the system user for this service alone; it must own the folder")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the unit file into this folder; default: print it"
    )


def describe_server(folder: Path, user: str, listen: str | None = None, state: Path | None = None) -> ServiceUnit:
    """Return the service that runs `fedveil server start`. Raises ConfigError for a wrong folder, address or port."""
    federation, own = SiteRegistry(folder).federation, folder.absolute()
    command = [*_program(), "server", "start", str(own)]
    fleet_port = federation.fleet_port
    if listen is not None:
        try:
            _, fleet_port = checks.parse_address(listen)
        except ValueError as error:
            raise ConfigError(f"--listen: {error}; write it as 0.0.0.0:9092") from None
        command += ["--listen", listen]
    for what, port in (("--listen" if listen else "fleet-port", fleet_port), ("control-port", federation.control_port)):
        _require_unprivileged(what, port)
    writes = [own]
    if state is not None:
        command += ["--state-dir", str(state.absolute())]
        writes.append(state.absolute())
    return ServiceUnit(
        title=f"FedVeil server of {federation.name}",
        command=tuple(command),
        user=user,
        watched="both of its programs run and the server answers on this machine",
        writes=tuple(writes),
        keeps=(registry_folder(own), own / "kits"),
        hides=(own / "ca",),
        reads=_read_paths(writes),
    )


def describe_site(kit: Path, user: str) -> ServiceUnit:
    """Return the service that runs `fedveil site start` for an unpacked kit.

    Raises:
        ConfigError: the folder has no kit, or a path in its node-config.toml depends on a home folder.
    """
    about, node = kit_reader.read_kit(kit), kit_reader.node_config(kit)
    own = kit.absolute()
    if names := kit_reader.paths_in_home(kit):
        raise ConfigError(
            f"{own / kit_reader.NODE_CONFIG}: expected paths that do not depend on a user's home folder, because a "
            f"service has none, found {_HOME} in {', '.join(names)}; write the whole path"
        )
    if "state_dir" not in node.model_fields_set:
        raise ConfigError(
            f"{own / kit_reader.NODE_CONFIG}: expected state-dir, because the default is in a user's home folder, "
            'found none; add state-dir = "state"'
        )
    writes = [node.state_dir.absolute()]
    folders = [Path(each.data) for each in node.list_data().values() if each.data]
    if not node.shares_data:
        # A private run marks the data with its ledger's end, by a file beside the rows, against a restored old ledger.
        writes += [data.parent if data.is_file() else data for data in folders]
    files = [
        own,
        *(Path(file) for file in (node.policy, node.key_file, node.signing_key, node.instruction_keys) if file),
    ]
    return ServiceUnit(
        title=f"FedVeil site {about.site} of {about.federation}",
        command=(*_program(), "site", "start", "--kit", str(own)),
        user=user,
        watched="its SuperNode and SuperExec run, and the server hears the site or cannot be reached",
        writes=tuple(writes),
        reads=_read_paths([*writes, *files, *folders]),
        keeps_trying=True,
    )


def install_unit(unit: ServiceUnit, name: str, out: Path | None, folder: Path) -> int:
    """Print the unit file, or write it to `out` as NAME.service; print the next steps to stderr.

    `folder`: the federation's folder or the kit, which the user must own.

    Raises:
        ConfigError: the unit is not possible, `out` is not a folder, or the file exists.
    """
    text, file = format_unit(unit), f"{name}.service"
    if out is None:
        print(text, end="")
        source = f"/dev/stdin {_SYSTEM / file}, with this output"
    else:
        _write_new(out, file, text)
        say(f"{out / file}: written")
        source = shlex.join([str((out / file).absolute()), str(_SYSTEM / file)])
    missing = [shlex.quote(str(path)) for path in unit.writes if not path.exists()]
    steps = [
        f"sudo chown -R {unit.user}: {shlex.quote(str(folder.absolute()))}",
        *(f"sudo install -d -m 700 -o {unit.user} {path}" for path in missing),
        f"sudo install -m 644 {source}",
        "sudo systemctl daemon-reload",
        f"sudo systemctl enable --now {file}",
    ]
    print("next:", *steps, sep="\n  ", file=sys.stderr)
    say(
        f"run every later command for this folder as its user: sudo -u {unit.user} fedveil ...; a file that another "
        "user writes may lock the service out",
        file=sys.stderr,
    )
    return 0


def _require_unprivileged(what: str, port: int) -> None:
    """Raise ConfigError for a port that the kernel gives only to programs with a right that the service lacks."""
    try:
        first = int(_FIRST_PORT.read_text())
    except FileNotFoundError:  # another system, or a kernel without this setting
        first = _FIRST_PORT_BY_DEFAULT
    if port < first:
        raise ConfigError(
            f"{what}: expected a port from {first}, because the service has no right to open a lower one, found "
            f"{port}; choose another, or permit it to all programs: sysctl net.ipv4.ip_unprivileged_port_start={port}, "
            "and in /etc/sysctl.d for the next boot"
        )


def _program() -> tuple[str, ...]:
    return (str(Path(sys.executable).absolute()), *_PROGRAM)


def _read_paths(given: list[Path]) -> tuple[Path, ...]:
    """Return the paths, and the program's own, as they are written and as they are without links."""
    own = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable), paths.package_folder()]
    return tuple(dict.fromkeys(path for each in [*given, *own] for path in (each.absolute(), each.resolve())))


def _write_new(folder: Path, name: str, text: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"--out: expected a folder, found none at {folder}; create it, or name another")
    try:
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--out: expected no {name} in {folder}, found one; move it away first") from None
    (folder / name).chmod(0o644)  # public, whatever the umask is
