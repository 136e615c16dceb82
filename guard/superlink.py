"""`flower-superlink` with the federation's own checks: who the sites are and until when, and who may operate it.

    flower-superlink --fedveil-registry FOLDER --fedveil-log FILE ...and Flower's own arguments

FOLDER has members.json and operators.json (guard/registry.py), FILE is the log of the control port
(guard/control_log.py). Flower's own program knows neither argument, so a command that was written for this one does not
run without the checks. Without them this one does not start either; only `--simulation`, which has no sites, and
`--help` do without.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from fedveil.errors import ConfigError, FedVeilError
from fedveil.guard import fleet
from fedveil.guard.control_log import ControlLog
from fedveil.guard.members import Members
from fedveil.guard.operators import App, Operators

_WITHOUT = {"--simulation", "--help", "-h", "--version", "-V"}
_OTHER_WAY_IN = "FLWR_INTERNAL_GRPC_CONTROL_API"  # the control calls over gRPC, on a port that asks nobody


def main() -> None:
    """The process."""
    wrapped = prepare()
    if wrapped is not None:
        serve_through(wrapped)
    from flwr.superlink.cli import flower_superlink  # a second of imports, which the scripts' tests do without

    flower_superlink()


def prepare() -> Callable[[App], App] | None:
    """Takes its own two arguments out of `sys.argv` and puts the checks in place.

    Returns what goes in front of Flower's HTTP port, None where there is nothing to protect. Ends the process with
    exit code 2 where the registry or the log cannot be used.
    """
    if _WITHOUT & set(sys.argv[1:]):
        return None
    try:
        registry, log, sys.argv[1:] = _arguments(sys.argv[1:])
        control = ControlLog(log)
        members, operators = Members(registry, control), Operators(registry, control)
    except FedVeilError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    os.environ.pop(_OTHER_WAY_IN, None)
    fleet.install(members.refusal)
    return operators.before


def serve_through(wrap: Callable[[App], App]) -> None:
    """From now on every server of uvicorn serves its application through `wrap`."""
    original = uvicorn.Config.__init__

    def configured(self: uvicorn.Config, app: App, *args: object, **kwargs: object) -> None:
        original(self, wrap(app), *args, **kwargs)  # type: ignore[arg-type]

    uvicorn.Config.__init__ = configured  # type: ignore[method-assign,assignment]


def _arguments(given: Sequence[str]) -> tuple[Path, Path, list[str]]:
    """The registry, the log, and Flower's own arguments. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fedveil-registry", type=Path)
    parser.add_argument("--fedveil-log", type=Path)
    parser.add_argument("--fleet-api-type", default="grpc-rere")
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
    return found.fedveil_registry, found.fedveil_log, [*rest, "--fleet-api-type", "grpc-rere"]
