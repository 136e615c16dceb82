"""`fedveil app`: shows, compares or signs an app's bundle, or prints its digest.

A site policy lists app digests, or the signers that the site trusts. A signature covers one bundle, in runs with one
name, until the end of its last valid day in UTC.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from datetime import UTC, date, datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.config import parse
from fedveil.console.flower.app_bundle import build_bundle, bundle_digest
from fedveil.console.flower.bundle_reader import compare_bundles, list_hidden_code, read_bundle
from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.guard import run_signature
from fedveil.sanitize import sanitize, suggest_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    digest_parser = actions.add_parser("digest", help="print the SHA-256 of the bundle that `flwr run` would send")
    digest_parser.set_defaults(run=_digest)
    show = actions.add_parser("show", help="list the files of that bundle, print one, or compare two bundles")
    only = show.add_mutually_exclusive_group()
    only.add_argument("--file", metavar="NAME", help="print this file")
    only.add_argument(
        "--since", type=Path, metavar="OLD",
        help="print what changed since this folder or .fab file; the exit code is 1 if anything did",
    )  # fmt: skip
    show.set_defaults(run=_show)
    sign = actions.add_parser("sign", help="print a run.signature for that bundle")
    sign.add_argument("--key", type=Path, required=True, help='Ed25519 private key: ssh-keygen -t ed25519 -N "" -f key')
    sign.add_argument("--run", required=True, dest="name", metavar="NAME", help="the run.name to sign for")
    sign.add_argument(
        "--until", required=True, type=_day, metavar="DATE", help="last valid day in UTC, such as 2026-03-31"
    )
    sign.set_defaults(run=_sign)
    for action in (digest_parser, show, sign):
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


def _show(args: argparse.Namespace) -> int:
    content = build_bundle(args.app)
    files = read_bundle(content)
    for warning in list_hidden_code(files):
        say(f"Warning: {sanitize(warning, 400)}", mark="Warning", verdict="warn", file=sys.stderr)
    if args.file is not None:
        if args.file not in files:
            near = suggest_name(args.file, files) or "`fedveil app show` lists its files"
            raise ConfigError(f"--file: this bundle has no {sanitize(args.file, 200)}; {near.strip()}")
        print(_printable(files[args.file]))
        return 0
    if args.since is not None:
        old = build_bundle(args.since)
        print(f"old {hashlib.sha256(old).hexdigest()}\nnew {hashlib.sha256(content).hexdigest()}")
        changes = compare_bundles(read_bundle(old), files)
        print("\n".join(map(_whole_line, changes)) or "No file differs.")
        return 1 if changes else 0
    print(f"SHA-256 {hashlib.sha256(content).hexdigest()}, {len(files)} files, {sum(map(len, files.values())):,} bytes")
    for name, data in files.items():
        shown = name.encode("unicode_escape").decode()  # a letter of another script may look like one of this
        print(f"{len(data):>9,}  {hashlib.sha256(data).hexdigest()[:16]}  {sanitize(shown, 400)}")
    return 0


def _printable(data: bytes) -> str:
    """Return a text file as safe lines. Raises ConfigError for any other file."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError("--file: this file is not UTF-8 text") from None
    return "\n".join(map(_whole_line, text.removesuffix("\n").split("\n")))


def _whole_line(line: str) -> str:
    """Return a line with control characters escaped and nothing cut off: a reviewer must see all of it."""
    return sanitize(line, len(line))


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
