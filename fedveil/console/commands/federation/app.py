"""`fedveil app`: prints the digest of an app's bundle, or signs it for a run.

A site policy lists app digests, or the signers that the site trusts. A signature covers one bundle, in runs with one
name, until the end of its last valid day in UTC.
"""

from __future__ import annotations

import argparse
from datetime import UTC, date, datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.config import parse
from fedveil.console.flower.app_bundle import bundle_digest
from fedveil.errors import ConfigError
from fedveil.guard import run_signature


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    digest_parser = actions.add_parser("digest", help="print the SHA-256 of the bundle that `flwr run` would send")
    digest_parser.set_defaults(run=_digest)
    sign = actions.add_parser("sign", help="print a run.signature for that bundle")
    sign.add_argument("--key", type=Path, required=True, help='Ed25519 private key: ssh-keygen -t ed25519 -N "" -f key')
    sign.add_argument("--run", required=True, dest="name", metavar="NAME", help="the run.name to sign for")
    sign.add_argument(
        "--until", required=True, type=_day, metavar="DATE", help="last valid day in UTC, such as 2026-03-31"
    )
    sign.set_defaults(run=_sign)
    for action in (digest_parser, sign):
        action.add_argument(
            "app",
            type=Path,
            nargs="?",
            default=None,
            help="folder of the app, or a .fab file; default: this installation's own",
        )


def _digest(args: argparse.Namespace) -> int:
    print(bundle_digest(args.app))
    return 0


def _sign(args: argparse.Namespace) -> int:
    try:
        key = serialization.load_ssh_private_key(args.key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--key: expected an OpenSSH private key without a passphrase, found none ({error}); make one: ssh-keygen"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"--key: expected an Ed25519 key, found {type(key).__name__}; make one: ssh-keygen -t ed25519"
        )
    parse({"run.name": args.name})  # raises an error unless it is a valid run name
    print(f'run.name="{args.name}"')
    print(f'run.signature="{run_signature.sign_run(key, args.name, args.until, bundle_digest(args.app))}"')
    return 0


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a date such as 2026-03-31, found {text!r}") from None
    if day < datetime.now(UTC).date():
        raise argparse.ArgumentTypeError(f"expected today or a later date (UTC), found {text}")
    return day
