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

from fedveil.console.runs.run_follower import RunFollower
from fedveil.console.runs.run_lookup import add_run_arguments, find_run
from fedveil.console.runs.run_reader import status_of
from fedveil.console.terminal import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, default=0.0, metavar="SECONDS", help="how long to wait; default: until the run ends"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the run until it ends."""
    named = find_run(args)
    if named.folder is not None:
        status_of(named.folder)  # raises an error that names the folder if it holds no run
    places = [named.folder] if named.folder else []
    return RunFollower(make_console(), named.number, places, named.flower, below=named.below).to_its_end(args.timeout)
