"""`fedveil server`: starts a federation's server from its folder.

A server is Flower's SuperLink, with FedVeil's checks in front, and the SuperExec that runs apps. Ports, certificates
and members come from the folder made by fedveil provision. In containers, the folder's compose file does the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.console.launch import server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    start = parser.add_subparsers(metavar="ACTION", required=True).add_parser(
        "start", help="start SuperLink and SuperExec; Ctrl-C stops both"
    )
    start.add_argument("folder", type=Path, help="the folder made by fedveil provision")
    start.add_argument(
        "--listen", metavar="HOST:PORT", help="address for sites; default: all addresses of this machine, on fleet-port"
    )
    start.add_argument(
        "--state-dir", type=Path, metavar="FOLDER", help="folder of the database and logs; default: server in FOLDER"
    )
    start.set_defaults(run=_start)


def _start(args: argparse.Namespace) -> int:
    return server.run(server.resolve_server(args.folder, args.listen, args.state_dir))
