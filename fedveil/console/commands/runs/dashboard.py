"""`fedveil dashboard`: shows runs, sites and audit logs in a browser, as they go on.

It reads, and changes nothing. It listens on this machine alone, and shows nothing to who has not the link that it
prints. `fedveil site dashboard` is the same for a site.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedveil.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "folder", type=Path, nargs="?", help="run.dir of the runs; default: runs, in each --federation if there is one"
    )
    parser.add_argument(
        "--federation", type=Path, action="append", default=[], metavar="FOLDER",
        help="what fedveil provision made: shows its sites too; repeatable, each with its runs",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8050, metavar="N", help="default: 8050; 0 = any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Until Ctrl-C."""
    if args.folder and not args.folder.is_dir():
        raise ConfigError(f"FOLDER: expected a folder of runs, found none at {args.folder}; name the run.dir of yours")
    print("Starting; the link follows in some seconds", file=sys.stderr, flush=True)
    from fedveil.console.web.apps import open_runs_dashboard

    return open_runs_dashboard(args.folder, args.federation, args.host, args.port)
