"""`flower-superlink` with the federation's own checks: who the sites are and until when, and who may operate it.

    flower-superlink --fedveil-registry FOLDER --fedveil-log FILE ...and Flower's own arguments

    --fleet-api-address HOST:PORT    where sites are served; from Flower 1.41 on this one listens (fleet_http.py)

FOLDER has members.json and operators.json (guard/registry.py), FILE is the log of the control port
(guard/control_log.py). Flower's own program knows neither argument, so a command that was written for this one does not
run without the checks. Without them this one does not start either; only `--simulation`, which has no sites, and
`--help` do without.
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
from fedveil.guard import flower, repeats
from fedveil.guard.control_log import ControlLog
from fedveil.guard.flower import unfinished, unreceived
from fedveil.guard.members import Members
from fedveil.guard.operators import App, Operators

_WITHOUT = {"--simulation", "--help", "-h", "--version", "-V"}
# The control calls over gRPC, and from 1.41 on the fleet's, each on a port that asks nobody of ours.
_OTHER_WAYS_IN = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")
_FLEET = "0.0.0.0:9092"  # Flower's own, where the option is missing


@dataclass(frozen=True)
class Fronts:
    """What stands before Flower's ports.

    Attributes:
        control: before what operators and Flower's own processes ask.
        sites: before what sites ask, where Flower has one port for all.
        fleet: HOST and port of the sites, where this process has to listen there.
    """

    control: Callable[[App], App]
    sites: Callable[[App], App] | None = None
    fleet: tuple[str, int] | None = None

    def serve(self, also: Callable[[App], App] = lambda app: app) -> None:
        """From now on the servers of this process are behind these; `also` stands before the control port's."""
        if self.sites is None or self.fleet is None:
            serve_through(lambda app: also(self.control(app)))
            return
        from fedveil.guard.flower import fleet_http

        port, sites = self.fleet[1], self.sites
        # Else a line for each question of each site: some ten million a day from a hundred of them.
        serve_through(lambda app: fleet_http.by_port(port, sites(app), also(self.control(app))), access_log=False)
        fleet_http.listen_also(*self.fleet)


def main() -> None:
    """The process."""
    fronts = prepare()
    if fronts is not None:
        fronts.serve()
    mend()
    from flwr.superlink.cli import flower_superlink  # a second of imports, which the scripts' tests do without

    flower_superlink()


def mend() -> None:
    """From now on the state of this process does what Flower's does not (docs/decisions/0008)."""
    repeats.of_flower()
    unfinished.of_flower()
    unreceived.of_flower()


def prepare() -> Fronts | None:
    """Takes its own two arguments out of `sys.argv` and puts the checks in place.

    Returns what goes in front of Flower's ports, None where there is nothing to protect. Ends the process with exit
    code 2 where the registry or the log cannot be used, or Flower is one that the guard does not know.
    """
    if _WITHOUT & set(sys.argv[1:]):
        return None
    try:
        line = flower.here()
        registry, log, fleet, sys.argv[1:] = _arguments(sys.argv[1:], line)
        control = ControlLog(log)
        members, operators = Members(registry, control), Operators(registry, control)
    except FedVeilError as error:
        _refuse(error)
    for name in _OTHER_WAYS_IN:
        os.environ.pop(name, None)
    if line.speaks == "HTTP":
        from fedveil.guard.flower import fleet_http

        return Fronts(operators.before, lambda app: fleet_http.before(app, members.refusal), fleet)
    from fedveil.guard.flower import fleet_grpc

    fleet_grpc.install(members.refusal)
    return Fronts(operators.before)


def serve_through(wrap: Callable[[App], App], **options: object) -> None:
    """From now on every server of uvicorn serves its application through `wrap`, with `options` before its own."""
    original = uvicorn.Config.__init__

    def configured(self: uvicorn.Config, app: App, *args: object, **kwargs: object) -> None:
        original(self, wrap(app), *args, **{**kwargs, **options})  # type: ignore[arg-type]
        # Or whoever is on this machine says in a header whose connection it is: guard/loopback.py goes by that.
        self.proxy_headers = False

    uvicorn.Config.__init__ = configured  # type: ignore[method-assign,assignment]


def _refuse(error: FedVeilError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
    sys.exit(2)


def _arguments(given: Sequence[str], line: flower.Line) -> tuple[Path, Path, tuple[str, int], list[str]]:
    """The registry, the log, where sites are served, and Flower's own arguments. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fedveil-registry", type=Path)
    parser.add_argument("--fedveil-log", type=Path)
    parser.add_argument("--fleet-api-type", default="grpc-rere")
    parser.add_argument("--fleet-api-address", default=_FLEET)
    found, rest = parser.parse_known_args(given)
    if found.fedveil_registry is None or found.fedveil_log is None:
        raise ConfigError(
            "flower-superlink: expected --fedveil-registry FOLDER and --fedveil-log FILE, found "
            f"{'neither' if found.fedveil_registry is found.fedveil_log else 'one of them'}; docs/deploy.md says more"
        )
    if found.fleet_api_type != "grpc-rere":
        raise ConfigError(
            f"--fleet-api-type: expected grpc-rere, found {found.fleet_api_type}: it asks for no key; leave it out"
        )
    fleet = _address(found.fleet_api_address)
    if line.speaks == "gRPC":
        rest += ["--fleet-api-type", "grpc-rere", "--fleet-api-address", found.fleet_api_address]
    elif str(fleet[1]) == _control_port(rest):
        raise ConfigError(
            f"--fleet-api-address: expected another port than the control port's, found {fleet[1]} for both; operators "
            "and sites are told apart by it"
        )
    return found.fedveil_registry, found.fedveil_log, fleet, rest


def _address(text: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(f"--fleet-api-address: expected HOST:PORT, found {text[:80]!r}; write it as 0.0.0.0:9092")
    return host.strip("[]"), int(port)


def _control_port(words: Sequence[str]) -> str:
    """As Flower takes it from its arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--port", default="8000")
    return str(parser.parse_known_args(words)[0].port)
