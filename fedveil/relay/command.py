"""`fedveil relay`: exchanges messages as files, for sites without a network.

The files are encrypted and signed. On the server, `fedveil relay export` acts for the site and writes the server's
orders to files. At the site, `fedveil relay import` answers them as if they had come over the network. See
docs/relay.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedveil.console.launch import site_options
from fedveil.console.launch.site import NODE_OPTIONS
from fedveil.errors import ConfigError
from fedveil.guard import poll_backoff
from fedveil.relay import keys, launch

COMMAND_GROUP = "site"

_RELAY = ("orders", "replies", "relay-key", "peer", "most-mb", "state-dir")
_LINK = ("superlink", "ca", "key", "name", "poll-seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    init = actions.add_parser("init", help="make the keys for one end of a relay; run it once at each end")
    init.add_argument(
        "--kit", type=Path, metavar="FOLDER", help="the unpacked start-up kit; the keys are stored in its keys folder"
    )
    init.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the keys, instead of --kit")
    init.set_defaults(run=_init)
    export = actions.add_parser("export", help="on the server: write orders to files, read replies; Ctrl-C stops it")
    _both(export)
    export.add_argument("--superlink", metavar="HOST:PORT", help="the server's fleet port")
    export.add_argument("--ca", metavar="FILE", help="the server's ca.crt")
    export.add_argument("--key", metavar="FILE", help="the site's node key, whose public key is registered")
    export.add_argument("--name", help="the site's name, as registered")
    export.add_argument("--state-dir", metavar="FOLDER", help="folder for logs; default: relay in the kit")
    export.add_argument(
        "--poll-seconds", type=float, metavar="S", help=f"initial delay between polls; default {poll_backoff.DEFAULT}"
    )
    export.set_defaults(run=_export)
    answer = actions.add_parser("import", help="at the site: answer received orders and write replies to files")
    _both(answer)
    answer.add_argument("--name", help="the site's name, as registered")
    answer.add_argument("--follow", action="store_true", help="keep running and answer new orders; Ctrl-C stops it")
    site_options.add_site_options(answer)
    answer.set_defaults(run=_import)


def _both(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "orders", type=Path, metavar="ORDERS", help="the folder for the server's encrypted instructions (orders)"
    )
    action.add_argument("replies", type=Path, metavar="REPLIES", help="the folder for the site's replies")
    action.add_argument(
        "--kit", type=Path, metavar="FOLDER", help="the unpacked start-up kit; the options below override it"
    )
    action.add_argument("--relay-key", metavar="FILE", help="this end's key; default: keys/relay.key in the kit")
    action.add_argument("--peer", metavar="FILE", help="the other end's relay.pub; default: keys/peer.pub in the kit")
    action.add_argument(
        "--most-mb",
        type=int,
        default=launch.MOST_MB,
        metavar="MB",
        help=f"maximum file size; default {launch.MOST_MB}",
    )


def _init(args: argparse.Namespace) -> int:
    if (args.kit is None) == (args.out is None):
        raise ConfigError("--kit: give either --kit or --out, and not both; run: fedveil relay init --kit .")
    folder = args.out or args.kit / "keys"
    public = keys.make_keys(folder)
    print(f"{folder / keys.SECRET}: created; keep it on this machine")
    print(f"copy {folder / keys.PUBLIC} to the other end as keys/{launch.PEER} in its kit, and read this to them:")
    print(public.fingerprint)
    return 0


def _export(args: argparse.Namespace) -> int:
    return launch.start_export(_given(args, (*_RELAY, *_LINK)), args.kit)


def _import(args: argparse.Namespace) -> int:
    given = _given(args, (*_RELAY, "name", *NODE_OPTIONS))
    return launch.start_import(given, args.kit, args.permit_everything, args.follow)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name.replace("-", "_")) for name in names}
