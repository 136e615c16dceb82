"""`fedveil bundle`: makes or checks an offline bundle, for sites without network access.

An offline bundle is a folder with wheels for FedVeil and its dependencies, container images, and their checksums:

    fedveil bundle make FOLDER         with network access: collects everything in a new folder
    fedveil bundle checksums FOLDER    rewrites requirements.txt and SHA256SUMS in FOLDER after a change
    fedveil bundle verify FOLDER       at the site: reports missing, changed and unlisted files

Before it installs from the folder, a site checks it with `sha256sum -c SHA256SUMS`, and compares the SHA-256 of
SHA256SUMS with the bundle's maker by phone. `verify` is part of the software in the bundle, so it finds copying errors
and unlisted files, but not forgery.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedveil import __version__
from fedveil.console.provisioning.offline_bundle import OfflineBundle
from fedveil.console.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    make = actions.add_parser("make", help="collect wheels and images in a new folder; needs network access")
    make.add_argument("--source", type=Path, metavar="FOLDER", help="a checkout; default: this installation")
    make.add_argument(
        "--image", action="append", metavar="NAME", help=f"default: fedveil:{__version__}; may be repeated"
    )
    make.add_argument("--no-images", action="store_true", help="collect only wheels")
    make.set_defaults(run=_make)
    checksums = actions.add_parser("checksums", help="write requirements.txt and SHA256SUMS, after a change")
    checksums.set_defaults(run=_checksums)
    verify = actions.add_parser("verify", help="compare the bundle's files with SHA256SUMS")
    verify.set_defaults(run=_verify)
    for action in (make, checksums, verify):
        action.add_argument("folder", type=Path, help="the offline bundle")


def _make(args: argparse.Namespace) -> int:
    images = [] if args.no_images else args.image or [f"fedveil:{__version__}"]
    bundle = OfflineBundle.make(args.folder, args.source, images, lambda step: say(step, file=sys.stderr, flush=True))
    say("computing checksums", file=sys.stderr, flush=True)
    say(bundle.write_checksums())
    return 0


def _checksums(args: argparse.Namespace) -> int:
    say(OfflineBundle(args.folder).write_checksums())
    return 0


def _verify(args: argparse.Namespace) -> int:
    say(OfflineBundle(args.folder).verify())
    return 0
