"""`fedveil operators`: manages a federation's operators, each with a name and a role.

| role | permissions |
|---|---|
| read | list runs and sites, read a run's output |
| submit | the same as read; start and stop runs |
| members | the same as read; register and unregister sites' keys |
| admin | all of these |

The SuperLink checks the token at its control port, and logs each request with the operator's name. A change
takes effect with the next request. If two commands run at once, the second waits for the first. Anyone who can write to
the federation's folder can bypass all roles.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from fedveil import paths
from fedveil.console.flower.flwr_cli import write_connection
from fedveil.console.flower.operator_tokens import write_login
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.provisioning.operator_registry import ROLES, OperatorRegistry
from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.records.atomic_files import write_atomic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser("add", help="add an operator and write the only copy of the token to a file")
    add.add_argument("--role", required=True, choices=sorted(ROLES), help="the operator's permissions")
    add.add_argument("--days", type=int, default=180, metavar="N", help="days until the token expires; default: 180")
    add.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file for the token; give it to the operator"
    )
    add.add_argument("--renew", action="store_true", help="replace the token, role and expiry of an existing operator")
    add.set_defaults(run=_add)
    revoke = actions.add_parser("revoke", help="revoke an operator's token immediately")
    revoke.add_argument("--last-admin", action="store_true", help="even if no other operator has the admin role")
    revoke.set_defaults(run=_revoke)
    listed = actions.add_parser(
        "list", help="list operators with role, state and expiry date; exit code 1 if a token has expired"
    )
    listed.set_defaults(run=_list)
    for action in (add, revoke, listed):
        action.add_argument("folder", type=Path, help="the folder made by fedveil provision")
    for action in (add, revoke):
        action.add_argument("name", metavar="NAME", help="the operator's name")
    login = actions.add_parser("login", help="on the operator's machine: create the folder to pass as --federation")
    login.add_argument("folder", type=Path, help="the folder to create, or to update with another token")
    login.add_argument(
        "--token", type=Path, required=True, metavar="FILE", help="the file written by fedveil operators add"
    )
    login.add_argument("--ca", type=Path, required=True, metavar="FILE", help="the federation's ca.crt")
    login.add_argument(
        "--address", default="127.0.0.1:8000", metavar="HOST:PORT", help="the control port; default: 127.0.0.1:8000"
    )
    login.set_defaults(run=_login)


def _add(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise ConfigError(f"--out: expected a file that does not exist yet, found {args.out}; name another")
    out = args.out.absolute()
    with OperatorRegistry.locked(registry_folder(args.folder)) as registry:
        write_atomic(out, b"")  # if this fails, no operator is added
        try:
            token = registry.add(args.name, args.role, args.days, args.renew)
        except BaseException:  # also after Ctrl-C or on a full disk: leave no empty token file
            out.unlink()
            raise
    write_atomic(out, token.encode())
    say(f"{args.name}: {args.role}, until {registry.entries[args.name]['until'][:10]}; the token is in {args.out}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    with OperatorRegistry.locked(registry_folder(args.folder)) as operators:
        if operators.is_last_admin(args.name) and not args.last_admin:
            raise ConfigError(
                f"NAME: {args.name} is the last operator with the admin role; add another first (fedveil operators add "
                f"{args.folder} NEW --role admin --out FILE), or revoke it anyway with --last-admin; after that, "
                "an admin can be added only on this machine"
            )
        operators.revoke(args.name)
    say(f"{args.name}: revoked as of the next request")
    if operators.entries[args.name]["role"] in ("submit", "admin") and _signs(args.folder):
        say(
            "unless bundles.toml limited them, this operator's runs could read the key that signs instructions; run "
            f"fedveil members renew-instruction-key {args.folder}"
        )
    return 0


def _signs(folder: Path) -> bool:
    """Return whether the federation has instruction keys; False if the registry is damaged, to let revocation go on."""
    try:
        return bool(SiteRegistry(folder).instruction_keys)
    except ConfigError:
        return False


def _list(args: argparse.Namespace) -> int:
    over, now = False, datetime.now(UTC)
    for name, entry in sorted(OperatorRegistry(registry_folder(args.folder)).entries.items()):
        ended = entry["state"] == "active" and datetime.fromisoformat(entry["until"]) <= now
        over |= ended
        say(f"{name:<20} {entry['role']:<8} {entry['state']} until {entry['until'][:10]}{'  EXPIRED' if ended else ''}")
    return int(over)


def _login(args: argparse.Namespace) -> int:
    try:
        token, ca = args.token.read_text().strip(), args.ca.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--token, --ca: expected two readable files, found a problem ({error}); ask the server's operator for them"
        ) from None
    if not token.isascii() or not 1 <= len(token) <= 200 or any(c.isspace() for c in token):
        raise ConfigError(
            f"--token: expected a token written by fedveil operators add, found something else in {args.token}; ask "
            "the server's operator for it"
        )
    home = paths.private_folder(args.folder.absolute() / "server" / "flower")
    write_atomic(home.parent / "ca.crt", ca)
    write_connection(home, args.address, home.parent / "ca.crt")
    write_login(home, args.address, token)
    say(f"{args.folder}: fedveil submit --federation {args.folder} ... now submits to {args.address}")
    return 0
