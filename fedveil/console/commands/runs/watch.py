"""`fedveil watch`: follows a run until it ends; the exit code tells how it ended.

`flwr run --stream` always returns 0; this command does not:

| exit code | outcome of the run |
|---|---|
| 0 | completed |
| 1 | failed, or its ServerApp ended silently |
| 2 | cannot be watched: wrong arguments, or the SuperLink does not answer |
| 3 | stopped |
| 4 | still running after --timeout |
| 130 | still running; Ctrl-C ended the watch |
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.console.flower.flwr_cli import CONNECTION, FlowerCli
from fedveil.console.runs.run_follower import RunFollower
from fedveil.console.runs.run_reader import status_of
from fedveil.console.terminal import make_console
from fedveil.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run_", metavar="RUN", help="a run folder, or the number that flwr run printed")
    parser.add_argument(
        "--federation", type=Path, metavar="FOLDER", help="the folder made by fedveil provision; also queries Flower"
    )
    parser.add_argument(
        "--flower-home", type=Path, metavar="FOLDER", help="alternatively, the FLWR_HOME with config.toml"
    )
    parser.add_argument(
        "--connection",
        default="",
        metavar="NAME",
        help="connection in config.toml; default: the one that fedveil provision wrote",
    )
    parser.add_argument(
        "--timeout", type=float, default=0.0, metavar="SECONDS", help="how long to wait; default: until the run ends"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the run until it ends."""
    folder = Path(args.run_)
    number = args.run_ if args.run_.isdecimal() and not folder.exists() else ""
    home = args.flower_home or (args.federation and args.federation.absolute() / "server" / "flower")
    flower = FlowerCli(home, args.connection or CONNECTION) if home else None
    if number and flower is None:
        raise ConfigError("RUN: a number needs --federation or --flower-home to query Flower, found neither; name one")
    places = [folder, *([args.federation / folder] if args.federation else [])]
    if not number and not any(place.is_dir() for place in places):
        raise ConfigError(
            f"RUN: expected a run folder or a number, found neither at {folder}; fedveil status lists runs"
        )
    run_folder = next((place for place in places if place.is_dir()), folder)
    if not number:
        status_of(run_folder)  # raises an error that names the folder if it holds no run
    below = [Path("runs"), *([args.federation / "runs"] if args.federation else [])]
    return RunFollower(make_console(), number, [] if number else [run_folder], flower, below=below).to_its_end(
        args.timeout
    )
