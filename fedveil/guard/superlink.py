"""`flower-superlink` with the federation's own checks of site keys, their expiry dates, and operators.

    flower-superlink --fedveil-registry FOLDER --fedveil-log FILE ...and Flower's own arguments

    --fleet-api-address HOST:PORT    address for sites; since Flower 1.41, this process listens there (fleet_http.py)
    --enable-supernode-auth          Flower's own; required here
    --without-fleet-checks           sites may send everything that Flower accepts: to measure other Flower apps

FOLDER contains members.json and operators.json (fedveil/guard/registry_files.py). FILE is the log of the control port
(fedveil/guard/control_log.py); the folder `spool` next to it holds incomplete replies (fedveil/guard/fleet/spool.py).
Flower's own program accepts neither argument, so a command for this program cannot run without the checks. This
program does not start without them either, except with `--simulation`, which has no sites, and `--help`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import uvicorn

from fedveil.errors import ConfigError, FedVeilError
from fedveil.guard import duplicate_pushes, flower, steady_clock
from fedveil.guard.control_log import ControlLog
from fedveil.guard.flower import database_locks, incomplete_replies, redelivery, replaced
from fedveil.guard.minute_log import limit_refusal_lines
from fedveil.guard.operator_access import App, OperatorAccessChecker
from fedveil.guard.plain_log import write_plain_log
from fedveil.guard.site_registry import SiteKeyChecker

_WITHOUT = {"--simulation", "--help", "-h", "--version", "-V"}
# Ports that FedVeil does not check: for control calls over gRPC and, since 1.41, for the fleet.
_OTHER_WAYS_IN = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
_LATE_CALL_SECONDS = 5.0  # interval between checks for calls that withhold their body
_FLEET = "0.0.0.0:9092"  # Flower's default for a missing option


@dataclass(frozen=True)
class PortProxies:
    """Proxies in front of Flower's ports.

    Attributes:
        control: handles requests from operators and from Flower's own processes.
        sites: handles requests from sites, for Flower releases with a single port.
        fleet: host and port for the sites, if this process must listen there.
    """

    control: Callable[[App], App]
    sites: Callable[[App], App] | None = None
    fleet: tuple[str, int] | None = None
    install_checks: Callable[[], None] = lambda: None

    def serve(self, also: Callable[[App], App] = lambda app: app) -> None:
        """Put this process's servers behind the proxies; `also` is in front of the control port's proxy."""
        try:
            self.install_checks()
        except FedVeilError as error:
            _refuse(error)
        if self.sites is None or self.fleet is None:
            serve_through(lambda app: also(self.control(app)))
            return
        from fedveil.guard.flower import fleet_http

        port, sites = self.fleet[1], self.sites
        # Otherwise there is a line for each request from each site: about ten million a day from a hundred sites.
        serve_through(lambda app: fleet_http.route_by_port(port, sites(app), also(self.control(app))), access_log=False)
        fleet_http.add_listener(*self.fleet)


def main() -> None:
    """Run the process."""
    fronts = prepare_arguments()
    if fronts is not None:
        fronts.serve()
    patch_superlink()
    from flwr.superlink.cli import flower_superlink  # importing it takes a second, which the scripts' tests avoid

    flower_superlink()


def patch_superlink() -> None:
    """Patch this process's state to add features that Flower lacks (docs/decisions/0008), and limit its log.

    Exits with the reason if Flower lacks an attribute to be replaced.
    """
    try:
        replaced.require_attributes("SuperLink")
    except ConfigError as error:
        _refuse(error)
    duplicate_pushes.patch_duplicate_pushes()
    if flower.installed_release().speaks == "gRPC":
        steady_clock.patch_lease_clock()
    database_locks.patch_busy_timeout()
    incomplete_replies.patch_incomplete_replies()
    redelivery.patch_redelivery()
    limit_refusal_lines()
    write_plain_log()


def prepare_arguments() -> PortProxies | None:
    """Remove the program's own two arguments from `sys.argv` and install the checks.

    Returns the proxies for Flower's ports; None if there is nothing to protect. Exits with code 2 if the registry or
    the log is unusable, or if the guard does not support this Flower version.
    """
    if _WITHOUT & set(sys.argv[1:]):
        return None
    try:
        line = flower.installed_release()
        given, sys.argv[1:] = _arguments(sys.argv[1:], line)
        control = ControlLog(given.log)
        members, operators = SiteKeyChecker(given.registry, control), OperatorAccessChecker(given.registry, control)
        if not given.with_fleet_checks:
            control.write("unchecked", {"reason": "--without-fleet-checks"})
    except FedVeilError as error:
        _refuse(error)
    for name in _OTHER_WAYS_IN:
        os.environ.pop(name, None)

    def install_checks() -> None:
        if given.with_fleet_checks:
            _install_fleet_port(line, members, control)

    from fedveil.guard.fleet.sweep import PeriodicSweep
    from fedveil.guard.open_calls import OpenCalls

    calls = OpenCalls()
    if line.speaks == "HTTP":
        from fedveil.guard.flower import fleet_http

        return PortProxies(
            operators.before,
            lambda app: fleet_http.sites_only(app, members.refusal, members.is_known, calls),
            given.fleet,
            install_checks,
        )
    from fedveil.guard.flower import fleet_calls, fleet_grpc

    fleet_grpc.install_checks(members.refusal)

    def install_all() -> None:
        install_checks()
        fleet_calls.patch_grpc_server(fleet_calls.FleetCallInterceptor(members.refusal, members.is_known, calls))
        PeriodicSweep(calls.end_late, _LATE_CALL_SECONDS).start()

    return PortProxies(operators.before, install_checks=install_all)


def _install_fleet_port(line: flower.FlowerRelease, members: SiteKeyChecker, control: ControlLog) -> None:
    from fedveil.guard.fleet.port import FleetPort, install_fleet_port  # imported only here: it loads Flower's server
    from fedveil.guard.fleet.refusal_log import FleetRefusalLog
    from fedveil.guard.fleet.spool import ReplySpool

    spool = ReplySpool(control.file.parent / "spool")
    install_fleet_port(line, FleetPort(FleetRefusalLog(control), members.site_of, spool))


def serve_through(wrap: Callable[[App], App], **options: object) -> None:
    """Make every uvicorn server serve its application through `wrap`; `options` override its own."""
    original = uvicorn.Config.__init__

    def configured(self: uvicorn.Config, app: App, *args: object, **kwargs: object) -> None:
        original(self, wrap(app), *args, **{**kwargs, **options})  # type: ignore[arg-type]
        # Otherwise any local user could use a header to pose as another connection's owner, which
        # fedveil/guard/loopback_ports.py relies on.
        self.proxy_headers = False

    uvicorn.Config.__init__ = configured  # type: ignore[method-assign,assignment]


def _refuse(error: FedVeilError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    sys.exit(2)


@dataclass(frozen=True)
class _GuardArguments:
    """This program's arguments in addition to Flower's."""

    registry: Path
    log: Path
    fleet: tuple[str, int]
    with_fleet_checks: bool


def _arguments(given: Sequence[str], line: flower.FlowerRelease) -> tuple[_GuardArguments, list[str]]:
    """Return the guard's arguments, and Flower's own. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fedveil-registry", type=Path)
    parser.add_argument("--fedveil-log", type=Path)
    parser.add_argument("--without-fleet-checks", action="store_true")
    parser.add_argument("--fleet-api-type", default="grpc-rere")
    parser.add_argument("--fleet-api-address", default=_FLEET)
    args, rest = parser.parse_known_args(given)
    if args.fedveil_registry is None or args.fedveil_log is None:
        raise ConfigError(
            "flower-superlink: --fedveil-registry FOLDER and --fedveil-log FILE are needed, but "
            f"{'both are' if args.fedveil_registry is args.fedveil_log else 'one is'} missing; see "
            "docs/deploy/operate.md"
        )
    if args.fleet_api_type != "grpc-rere":
        raise ConfigError(
            f"--fleet-api-type: it must be grpc-rere, because {args.fleet_api_type} needs no key; leave it out"
        )
    if "--enable-supernode-auth" not in rest:
        raise ConfigError(
            "flower-superlink: --enable-supernode-auth is missing; without it, sites can impersonate others"
        )
    fleet = _address(args.fleet_api_address)
    if line.speaks == "gRPC":
        rest += ["--fleet-api-type", "grpc-rere", "--fleet-api-address", args.fleet_api_address]
    elif str(fleet[1]) == _control_port(rest):
        raise ConfigError(
            f"--fleet-api-address: port {fleet[1]} is also the control port; choose another, because the port "
            "distinguishes operators from sites"
        )
    checked = not args.without_fleet_checks
    return _GuardArguments(args.fedveil_registry, args.fedveil_log, fleet, checked), rest


def _address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT or [HOST]:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(f"--fleet-api-address: {text[:80]!r} is not HOST:PORT; write it as 0.0.0.0:9092")
    return host.strip("[]"), int(port)


def _control_port(words: Sequence[str]) -> str:
    """Return the control port from Flower's arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--port", default="8000")
    return str(parser.parse_known_args(words)[0].port)
