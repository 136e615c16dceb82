"""`fedveil dashboard`: shows runs, sites and audit logs live in a browser.

The dashboard is read-only. It listens only on this machine, and only the link it prints gives access.
`fedveil site dashboard` is the equivalent for a site.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedveil.console.terminal import say
from fedveil.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "folder", type=Path, nargs="?", help="the runs' run.dir; default: runs, inside each --federation if given"
    )
    parser.add_argument(
        "--federation", type=Path, action="append", default=[], metavar="FOLDER",
        help="a folder made by fedveil provision: also shows its sites and runs; repeatable",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8050, metavar="N", help="default: 8050; 0 = any free port")
    parser.add_argument("--host", default="127.0.0.1", help="only 127.0.0.1 is allowed")
    parser.add_argument(
        "--metrics-token", type=Path, metavar="FILE",
        help="also serve /metrics for Prometheus, with the bearer token in this file, which is created if missing",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C."""
    if args.folder and not args.folder.is_dir():
        raise ConfigError(f"FOLDER: expected a folder of runs, found none at {args.folder}; name your runs' run.dir")
    say("Starting; a link will appear in a few seconds", file=sys.stderr, flush=True)
    from fedveil.console.web.apps import open_runs_dashboard

    return open_runs_dashboard(args.folder, args.federation, args.host, args.port, args.metrics_token)
