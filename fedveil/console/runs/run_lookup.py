"""Find the run that a command's arguments name: by its folder, by its name in a federation, or by Flower's run ID."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil.console.flower.flwr_cli import CONNECTION, FlowerCli
from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize, suggest_name

_MARKS = ("status.json", "config.json")


@dataclass(frozen=True)
class NamedRun:
    """The run that a user named.

    Attributes:
        number: Flower's run ID, if the user gave it; otherwise "".
        folder: the run folder, if the user named it; otherwise None.
        flower: queries the server; None if the arguments name no server.
        below: folders of runs in which the folder of `number` may be.
    """

    number: str
    folder: Path | None
    flower: FlowerCli | None
    below: Sequence[Path]

    def find_folder(self) -> Path | None:
        """Return the run's folder, if it is on this machine."""
        if self.folder is not None:
            return self.folder
        files = (file for folder in self.below for file in sorted(folder.glob("*/flower-run")))
        return next((file.parent for file in files if flower_run(file.parent) == self.number), None)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN and the options that name the server."""
    parser.add_argument("run_", metavar="RUN", help="a run's folder or name, or the number that flwr run printed")
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


def find_run(args: argparse.Namespace) -> NamedRun:
    """Return the run that the arguments name.

    Raises:
        ConfigError: there is no such folder, or a number without a server.
        LaunchError: the folder of the server has no connection.
    """
    folder, federation = Path(args.run_), args.federation
    number = args.run_ if args.run_.isascii() and args.run_.isdecimal() and not folder.exists() else ""
    home = args.flower_home or (federation and federation.absolute() / "server" / "flower")
    flower = FlowerCli(home, args.connection or CONNECTION) if home else None
    if number and flower is None:
        raise ConfigError("RUN: a number needs --federation or --flower-home to query Flower, found neither; name one")
    below = [Path("runs"), *([federation / "runs"] if federation else [])]
    if number:
        return NamedRun(number, None, flower, below)
    places = [folder, *([federation / folder, federation / "runs" / folder] if federation else [])]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        known = {
            file.parent.name for above in {folder.parent, *below} for name in _MARKS for file in above.glob(f"*/{name}")
        }
        near = suggest_name(folder.name, map(sanitize, sorted(known)))
        raise ConfigError(
            f"RUN: {near}expected a run folder or a number, found neither at {folder}; fedveil status lists runs"
        )
    return NamedRun("", found, flower, below)


def flower_run(folder: Path) -> str:
    """Return Flower's ID of the run in `folder`; "" if unknown. It becomes part of commands that users run."""
    file = folder / "flower-run"
    if not file.is_file():
        return ""
    with file.open("rb") as noted:
        number = noted.read(40).strip()
    return number.decode() if number.isdigit() else ""
