"""`fedveil bundle`: makes or checks an offline bundle, for sites without network.

An offline bundle is a folder with wheels of FedVeil and its dependencies, container images, and a manifest:

    fedveil bundle make FOLDER         with a network: collects everything in a new folder
    fedveil bundle manifest FOLDER     writes every file's size and SHA-256 to FOLDER/MANIFEST.json, after a change
    fedveil bundle verify FOLDER       at the site: reports files that are missing, changed, or not in the manifest

The manifest shows whether the folder arrived unchanged, not who made it. Send the SHA-256 that the commands print over
a second channel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil import __version__
from fedveil.console.provisioning.offline_bundle import OfflineBundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    make = actions.add_parser("make", help="collect wheels and images in a new folder; needs network access")
    make.add_argument("--source", type=Path, metavar="FOLDER", help="a checkout; default: this installation")
    make.add_argument(
        "--image", action="append", metavar="NAME", help=f"default: fedveil:{__version__}; may be repeated"
    )
    make.add_argument("--no-images", action="store_true", help="collect only wheels")
    make.set_defaults(run=_make)
    manifest = actions.add_parser("manifest", help="write the manifest: every file with its size and hash")
    manifest.set_defaults(run=_manifest)
    verify = actions.add_parser("verify", help="compare the bundle's files with its manifest")
    verify.set_defaults(run=_verify)
    for action in (make, manifest, verify):
        action.add_argument("folder", type=Path, help="the offline bundle")


def _make(args: argparse.Namespace) -> int:
    images = [] if args.no_images else args.image or [f"fedveil:{__version__}"]
    print(OfflineBundle.make(args.folder, args.source, images).write_manifest())
    return 0


def _manifest(args: argparse.Namespace) -> int:
    print(OfflineBundle(args.folder).write_manifest())
    return 0


def _verify(args: argparse.Namespace) -> int:
    print(OfflineBundle(args.folder).verify())
    return 0
