"""`fedveil operators`: says who may operate a federation, each with a name and a role.

| role | may |
|---|---|
| read | list runs and sites, read what a run printed |
| submit | the same, start and stop runs |
| members | what read may, register and unregister sites' keys |
| admin | all of these |

The SuperLink asks for the token at its control port, and logs each request with the operator's name. A change holds
from the next request on. Whoever can write the federation's folder is above all roles.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from fedveil import places
from fedveil.console.flower.command_line import write_connection
from fedveil.console.flower.operators import write_login
from fedveil.console.provisioning.federation import registry
from fedveil.console.provisioning.operators import ROLES, Operators
from fedveil.errors import ConfigError
from fedveil.records.files import write_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser("add", help="let an operator in; the token goes to a file, and is kept nowhere else")
    add.add_argument("--role", required=True, choices=sorted(ROLES), help="what they may do")
    add.add_argument("--days", type=int, default=180, metavar="N", help="for how long; default: 180")
    add.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the token goes: give it to them")
    add.add_argument(
        "--renew", action="store_true", help="another token, role and time for one who is known; the old one ends"
    )
    add.set_defaults(run=_add)
    revoke = actions.add_parser("revoke", help="shut an operator out, at once")
    revoke.set_defaults(run=_revoke)
    listed = actions.add_parser("list", help="each operator with role, state and last day; 1 where one is over")
    listed.set_defaults(run=_list)
    for action in (add, revoke, listed):
        action.add_argument("folder", type=Path, help="what fedveil provision made")
    for action in (add, revoke):
        action.add_argument("name", metavar="NAME", help="the operator's name")
    login = actions.add_parser("login", help="at the operator's machine: make the folder that --federation names")
    login.add_argument("folder", type=Path, help="the folder to make, or to give another token")
    login.add_argument("--token", type=Path, required=True, metavar="FILE", help="what fedveil operators add wrote")
    login.add_argument("--ca", type=Path, required=True, metavar="FILE", help="the federation's ca.crt")
    login.add_argument(
        "--address", default="127.0.0.1:8000", metavar="HOST:PORT", help="the control port; default: 127.0.0.1:8000"
    )
    login.set_defaults(run=_login)


def _add(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"--out: expected a file that does not exist yet, found {args.out}; name another")
    found, out = Operators(registry(args.folder)), args.out.absolute()
    write_atomic(out, b"")  # where that cannot be, nobody is let in
    try:
        token = found.add(args.name, args.role, args.days, args.renew)
    except BaseException:  # Ctrl-C and a full disk too: no empty token stays
        out.unlink()
        raise
    write_atomic(out, token.encode())
    print(f"{args.name}: {args.role}, until {found.entries[args.name]['until'][:10]}; the token is in {args.out}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    Operators(registry(args.folder)).revoke(args.name)
    print(f"{args.name}: revoked, from the next request on")
    return 0


def _list(args: argparse.Namespace) -> int:
    over, now = False, datetime.now(UTC)
    for name, found in sorted(Operators(registry(args.folder)).entries.items()):
        ended = found["state"] == "active" and datetime.fromisoformat(found["until"]) <= now
        over |= ended
        print(
            f"{name:<20} {found['role']:<8} {found['state']} until {found['until'][:10]}{'  EXPIRED' if ended else ''}"
        )
    return int(over)


def _login(args: argparse.Namespace) -> int:
    try:
        token, ca = args.token.read_text().strip(), args.ca.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--token, --ca: expected two files, found none ({error}); ask who operates the server"
        ) from None
    if not token.isascii() or not 1 <= len(token) <= 200 or any(c.isspace() for c in token):
        raise ConfigError(
            f"--token: expected what fedveil operators add wrote, found something else in {args.token}; ask for it"
        )
    home = places.private_folder(args.folder.absolute() / "server" / "flower")
    write_atomic(home.parent / "ca.crt", ca)
    write_connection(home, args.address, home.parent / "ca.crt")
    write_login(home, args.address, token)
    print(f"{args.folder}: fedveil submit --federation {args.folder} ... goes to {args.address}")
    return 0
