"""`fedveil submit`: runs an app on a federation, and stays until its end.

Where no app is named, this installation's own is sent. A relative run.dir is below the folder in which the server runs
apps: FOLDER, where fedveil server start was used. The exit code says what became of the run, as that of
`fedveil watch` does: 0 completed, 1 failed, 3 stopped, 4 still going after --timeout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.config import parse
from fedveil.console.flower.command_line import Flower
from fedveil.console.run_config import overrides
from fedveil.console.runs.following import Followed
from fedveil.console.terminal import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "app", type=Path, nargs="?", default=None, help="folder of the app; default: this installation's own"
    )
    parser.add_argument("--federation", type=Path, required=True, metavar="FOLDER", help="what fedveil provision made")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run config; repeatable")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the same from a TOML file; --set goes before it")
    parser.add_argument(
        "--timeout", type=float, default=0.0, metavar="SECONDS", help="how long to wait; default: until it has ended"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code says what became of the run."""
    settings = overrides(args.config, args.set)
    config = parse(settings).run
    flower = Flower(args.federation.absolute() / "server" / "flower")
    number = flower.submit(args.app, settings)
    print(f"run {number}: submitted", flush=True)
    folder = Path(config.dir).expanduser() / (config.name or f"run-{number}")
    # fedveil server start runs apps in the federation's folder, a container in / as this command's.
    return Followed(terminal(), number, [folder, args.federation / folder], flower).to_its_end(args.timeout)
