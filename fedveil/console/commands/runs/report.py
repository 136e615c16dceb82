"""`fedveil report`: writes one HTML page about one or more runs.

The runs may be finished, failed or still running. The page is self-contained: it loads nothing from the network.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.console.provisioning.online_status import absent_members
from fedveil.console.runs.run_reader import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder: <run.dir>/<run.name>")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument(
        "--federation", type=Path, metavar="FOLDER", help="on the server: explain why members did not take part"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    runs = [load_run(folder) for folder in args.runs]  # before importing torch: a missing run is reported at once
    from fedveil.console.web.report import run_page

    missing = absent_members(args.federation) if args.federation else {}
    run_page.write_run_page(args.out, runs, missing)
    print(args.out.absolute())
    return 0
