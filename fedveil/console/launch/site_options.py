"""The options that `fedveil site start` and `fedveil relay import` share: what a site is, however its messages come."""

from __future__ import annotations

import argparse
from pathlib import Path

STATE = Path("~/.local/state/fedveil")


def add_site_options(parser: argparse.ArgumentParser) -> None:
    """Adds them; each goes before what the kit says."""
    parser.add_argument("--data", metavar="FOLDER", help="of the site's rows; else the run config names it")
    parser.add_argument("--policy", metavar="FILE", help="TOML file that says what the site permits")
    parser.add_argument("--key-file", metavar="FILE", help="seal what the site keeps under the key in it")
    parser.add_argument(
        "--signing-key", metavar="FILE", help="by which other sites know this one: made by fedveil site init"
    )
    parser.add_argument(
        "--permit-everything", action="store_true", help="run whatever the server sends, in place of a policy"
    )
    parser.add_argument("--device", help='"auto", "cpu", "cuda" or "cuda:1"; default: auto')
    parser.add_argument("--processes", type=int, metavar="N", help="that train together, each on a GPU; default: 1")
    parser.add_argument(
        "--shard-base", action="store_true", default=None, help="divide a frozen base among them: too large for one"
    )
    parser.add_argument(
        "--worker-idle-seconds", type=float, metavar="S", help="a worker without a turn ends then; default: 900"
    )
    parser.add_argument("--worker-memory-mb", type=int, metavar="MB", help="bound on the worker's memory; 0 = none")
    parser.add_argument(
        "--state-dir", metavar="FOLDER", help=f"the site's own folder; default: state in the kit, or {STATE}"
    )
