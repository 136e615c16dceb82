"""The options that describe a site, shared by `fedveil site start` and `fedveil relay import`."""

from __future__ import annotations

import argparse
from pathlib import Path

STATE = Path("~/.local/state/fedveil")


def add_site_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, each of which overrides the kit."""
    parser.add_argument(
        "--data", metavar="FOLDER", help="folder with the site's examples; default: as in the run config"
    )
    parser.add_argument("--policy", metavar="FILE", help="TOML file with the site's policy")
    parser.add_argument("--key-file", metavar="FILE", help="file with the key that encrypts the site's state")
    parser.add_argument(
        "--signing-key", metavar="FILE", help="key by which other sites know this one; made by fedveil site init"
    )
    parser.add_argument(
        "--instruction-keys", metavar="FILE",
        help="the server's instruction keys, from the kit; without them, instructions are not verified",
    )  # fmt: skip
    parser.add_argument(
        "--permit-everything", action="store_true", help="run everything that the server sends, without a policy"
    )
    parser.add_argument("--device", help='"auto", "cpu", "cuda" or "cuda:1"; default: auto')
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes that train together, each on its own GPU; default: 1",
    )
    parser.add_argument(
        "--shard-base",
        action="store_true",
        default=None,
        help="shard a frozen base model across the GPUs of --processes if it does not fit on one",
    )
    parser.add_argument(
        "--worker-idle-seconds", type=float, metavar="S", help="idle seconds after which the worker stops; default: 900"
    )
    parser.add_argument("--worker-memory-mb", type=int, metavar="MB", help="limit on the worker's memory; 0 = none")
    parser.add_argument(
        "--state-dir", metavar="FOLDER", help=f"the site's state folder; default: state in the kit, or {STATE}"
    )
