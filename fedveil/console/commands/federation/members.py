"""`fedveil members`: adds sites; registers, renews and revokes keys.

A change goes to Flower first and then to the registry, so both agree. The commands reach Flower through its CLI,
at this machine's control port. `--offline` changes only the registry, for a server whose database is lost or does
not exist yet; `fedveil members sync` then brings Flower in line with the registry. If two commands run at once, the
second waits for the first. `list` and `roster` change nothing, but rewrite signers.json if it is missing or outdated.

`list --json` prints one JSON object for other programs, such as a daily check:

| field | value |
|---|---|
| format | 1; a field changes its name or meaning only with this number |
| is_soon | whether a date below is past or within 30 days, as in the exit code |
| certificates | a list: name, until, days_left |
| members | a list: name, state, until, days_left, is_online, note |

Dates are in ISO 8601, UTC. A member's until and days_left are null before it is registered. is_online is null if the
server was not asked (--offline) or did not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.console.flower import instruction_key_files
from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError
from fedveil.console.flower.processes import LaunchError
from fedveil.console.provisioning import enrollment, instruction_keys, startup_kit
from fedveil.console.provisioning.federation_folder import FederationFile, SiteRegistry, roster_file
from fedveil.console.provisioning.online_status import absent_members
from fedveil.console.provisioning.server_certificate import issue_certificate, read_certificate
from fedveil.console.terminal import Verdict, say, say_row
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import INSTRUCTION_KEYS, InstructionKeys
from fedveil.federation.secagg.roster import SigningKeyRoster, roster_digest
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

JSON_FORMAT = 1
_SOON = timedelta(days=30)
_SEEN = "/roster/roster.json"  # where the process that runs apps reads it, in the compose file's containers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listed = actions.add_parser(
        "list", help="list sites: state, expiry date, who is online; exit code 1 if a date is near or past"
    )
    listed.add_argument("--json", action="store_true", help="print one JSON object, for other programs")
    listed.add_argument("--offline", action="store_true", help="do not ask the server who is online")
    listed.set_defaults(run=_list)
    add = actions.add_parser("add", help="add a site and write its start-up kit")
    add.set_defaults(run=_changing(_add))
    kit = actions.add_parser("kit", help="rewrite a site's start-up kit with the server's current instruction keys")
    kit.set_defaults(run=_changing(_kit))
    register = actions.add_parser("register", help="register a site's keys from its request.json")
    register.set_defaults(run=_changing(_register))
    revoke = actions.add_parser("revoke", help="revoke a site's key permanently")
    revoke.set_defaults(run=_changing(_revoke))
    expire = actions.add_parser("expire", help="expire every key past its expiry date; meant for a daily timer")
    expire.set_defaults(run=_changing(_expire))
    sync = actions.add_parser("sync", help="bring Flower's registered keys in line with the registry")
    sync.set_defaults(run=_changing(_sync))
    roster = actions.add_parser("roster", help="write the sites' signing keys to a file and print their digest")
    roster.set_defaults(run=_roster)
    address = actions.add_parser("address", help="print the server's address, and which kits contain it")
    address.set_defaults(run=_address)
    renew = actions.add_parser("renew-server", help="issue a new server key and certificate from the same CA")
    renew.set_defaults(run=_changing(_renew))
    instruction = actions.add_parser(
        "renew-instruction-key", help="switch to the standby key, generate a new standby key, and rewrite all kits"
    )
    instruction.set_defaults(run=_changing(_renew_instruction_key))
    require = actions.add_parser(
        "require-signatures", help="count only signed replies; refused while any registered site cannot sign"
    )
    require.set_defaults(run=_changing(_require_signatures))
    for action in (listed, add, kit, register, revoke, expire, sync, roster, address, renew, instruction, require):
        action.add_argument("folder", type=Path, help="the folder made by fedveil provision")
    roster.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; default: server/roster/roster.json in FOLDER"
    )
    for action in (add, kit):
        action.add_argument("site", metavar="SITE", help="the site's name")
    register.add_argument("request", type=Path, help="the request.json that fedveil site init wrote")
    register.add_argument(
        "--fingerprint", required=True, help="SHA256:..., as the site read it to you; - skips the comparison"
    )
    revoke.add_argument("site", help="the site's name")
    renew.add_argument("--ca-key", type=Path, help="path of ca.key if it is no longer in the folder")
    instruction.add_argument(
        "--standby-key", type=Path, metavar="PATH",
        help="path of instruction-standby.key if it is no longer in the folder; the command deletes it there",
    )  # fmt: skip
    for action in (register, revoke, expire):
        action.add_argument(
            "--offline", action="store_true", help="change only the registry, while the server is not running"
        )
        action.set_defaults(run=partial(_asking, action.get_default("run")))


def _changing(act: Callable[[argparse.Namespace, SiteRegistry], int]) -> Callable[[argparse.Namespace], int]:
    """Return the action bound to the folder's registry, which stays locked until the action ends."""

    def run(args: argparse.Namespace) -> int:
        with SiteRegistry.locked(args.folder) as members:
            return act(args, members)

    return run


def _asking(act: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run an action that queries the server. Raises ServerUnreachableError, with advice, if it cannot be reached."""
    try:
        return act(args)
    except ServerUnreachableError:
        raise ServerUnreachableError(
            f"members: expected the server of {args.folder} to be running, but it doesn't answer; start it with "
            f"fedveil server start {args.folder}, or change only the registry with --offline and run fedveil members "
            f"sync {args.folder} once the server runs"
        ) from None


def _list(args: argparse.Namespace) -> int:
    members, now = SiteRegistry(args.folder), datetime.now(UTC)
    members.write_signers()
    certificates = [
        {"name": name, **_until(read_certificate(args.folder / "server" / name).not_valid_after_utc, now)}
        for name in ("ca.crt", "server.pem")
    ]
    online, silence = (None, "") if args.offline else _online(args.folder)
    listed = [_member(site, entry, now, online) for site, entry in sorted(members.sites.items())]
    dates = [*certificates, *(member for member in listed if member["state"] == "registered")]
    is_soon = any(_is_soon(one["days_left"]) for one in dates)
    if args.json:
        document = {"format": JSON_FORMAT, "is_soon": is_soon, "certificates": certificates, "members": listed}
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        _print_list(certificates, listed)
    if silence:
        say(silence, file=sys.stderr)
    return int(is_soon)


def _online(folder: Path) -> tuple[dict[str, str] | None, str]:
    """Return why members are not online, by name, and ""; or None and a sentence, if the server does not answer."""
    try:
        return absent_members(folder), ""
    except LaunchError as error:
        return None, f"who is online is not known: {error}"


def _member(site: str, entry: Mapping[str, Any], now: datetime, absent: Mapping[str, str] | None) -> dict[str, Any]:
    dated = (
        _until(datetime.fromisoformat(entry["until"]), now) if "until" in entry else {"until": None, "days_left": None}
    )
    is_online = None if absent is None else site not in absent
    return {
        "name": site,
        "state": entry["state"],
        **dated,
        "is_online": is_online,
        "note": (absent or {}).get(site, ""),
    }


def _until(ends: datetime, now: datetime) -> dict[str, Any]:
    return {"until": ends.astimezone(UTC).isoformat(timespec="seconds"), "days_left": (ends - now) // timedelta(days=1)}


def _is_soon(days: int | None) -> bool:
    return days is not None and days < _SOON.days


def _print_list(certificates: Sequence[Mapping[str, Any]], listed: Sequence[Mapping[str, Any]]) -> None:
    width = max(20, *(min(40, len(sanitize(one["name"], 40))) for one in (*certificates, *listed)))
    say(f"{'certificate':<{width}} until")
    for one in certificates:
        _say_dated(f"{one['name']:<{width}} ", one, "")
    say(f"\n{'member':<{width}} {'state':<10} {'until':<10} online")
    words = {True: "online", False: "offline", None: "?"}
    for one in listed:
        row = f"{sanitize(one['name'], 40):<{width}} {one['state']:<10} "
        _say_dated(row, one, words[one["is_online"]], has_date=one["state"] == "registered")


def _say_dated(row: str, one: Mapping[str, Any], online: str, has_date: bool = True) -> None:
    """Print a row with its date, and color the date if it is near or past."""
    date, remark = "-", ""
    if has_date:
        date, remark = one["until"][:10], _remark(one["days_left"])
    verdict: Verdict | None = {"": None, "soon": "warn", "EXPIRED": "fail"}[remark]
    notes = "; ".join(filter(None, (remark, one.get("note", ""))))
    say_row(f"{row}{date:<10} {online}".rstrip(), notes, mark=date, verdict=verdict, start=len(row))


def _add(args: argparse.Namespace, members: SiteRegistry) -> int:
    federation = members.with_site(args.site)
    read_certificate(args.folder / "server" / "ca.crt")  # fail before creating keys if there is no certificate
    keys = instruction_keys.ensure_keys(members)
    file = _write_kit(args.folder, federation, args.site, keys)
    members.add(args.site, signs=True)
    say(f"{args.site}: added; the start-up kit is {file}")
    say(f"instruction keys in it, to be confirmed by phone: {_fingerprint(keys)}")
    say(
        f"next: send the kit to the site, then run fedveil members register {args.folder} request.json "
        "--fingerprint SHA256:..., as the site reads it to you"
    )
    return 0


def _kit(args: argparse.Namespace, members: SiteRegistry) -> int:
    members.entry(args.site)
    read_certificate(args.folder / "server" / "ca.crt")
    keys = instruction_keys.ensure_keys(members)
    file, new = _write_kit(args.folder, members.federation, args.site, keys), not members.signs(args.site)
    members.mark_signing(args.site)
    say(f"{args.site}: the start-up kit is {file}")
    say(f"instruction keys in it: {_fingerprint(keys)}")
    say(f"a site that already has a kit takes only {INSTRUCTION_KEYS} from the new one: {_trust(keys)}")
    if new:
        say(f"{args.site}: its replies must be signed from now on; have the site set this up before the next run")
        _remind_of_start(args.folder)
    return 0


def _write_kit(folder: Path, federation: FederationFile, site: str, keys: InstructionKeys) -> Path:
    """Write a site's kit and return its path. Raises ConfigError if the certificate is missing."""
    ca = folder / "server" / "ca.crt"
    read_certificate(ca)  # raises an error that names it if it is missing
    file = folder / "kits" / f"{site}.tar.gz"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    startup_kit.write_kit(file, federation, site, ca.read_bytes(), keys)
    return file


def _trust(keys: InstructionKeys) -> str:
    """Return the command that a site runs to trust these keys."""
    return f"fedveil site trust NEW-FILE --kit . --fingerprint {_fingerprint(keys)}"


def _fingerprint(keys: InstructionKeys) -> str:
    return instruction_key_files.keys_fingerprint(keys.federation, keys.keys)


def _remind_of_start(folder: Path) -> None:
    say(f"a server that is running now signs only after a restart: fedveil server start {folder}")


def _renew_instruction_key(args: argparse.Namespace, members: SiteRegistry) -> int:
    read_certificate(args.folder / "server" / "ca.crt")
    had_keys = bool(members.instruction_keys)
    keys = instruction_keys.renew_keys(members, args.standby_key) if had_keys else instruction_keys.ensure_keys(members)
    sites = [site for site, entry in sorted(members.sites.items()) if entry["state"] in ("registered", "invited")]
    first = [site for site in sites if not members.signs(site)]
    for site in sites:
        _write_kit(args.folder, members.federation, site, keys)
        members.mark_signing(site)
    what = "the standby key signs from the next run on" if had_keys else "generated, because this folder had none"
    say(f"{instruction_key_files.current_file(args.folder)}: {what}")
    say(f"{instruction_key_files.standby_file(args.folder)}: the new standby key; move it to a safe place")
    say(f"{args.folder / 'kits'}: {len(sites)} kits rewritten")
    say(f"next: send each site the {INSTRUCTION_KEYS} from its kit, and read it the fingerprint by phone; it runs:")
    say(f"      {_trust(keys)}")
    if had_keys:
        say("until then a site accepts the old key, and, with the old file, the new one too")
    if first:
        say(f"from now on, replies from {', '.join(first)} must be signed; have them set this up before the next run")
        _remind_of_start(args.folder)
    return 0


def _require_signatures(args: argparse.Namespace, members: SiteRegistry) -> int:
    members.require_signatures()
    say(f"{args.folder}: the server counts only signed replies, and doesn't ask sites that do not sign")
    for site, entry in sorted(members.sites.items()):
        if entry["state"] != "registered" and not members.signs(site):
            say(f"{site}: {entry['state']}; before it registers, it needs a kit from fedveil members kit")
    return 0


def _remark(days_left: int) -> str:
    return "EXPIRED" if days_left < 0 else "soon" if _is_soon(days_left) else ""


def _register(args: argparse.Namespace, members: SiteRegistry) -> int:
    ca = args.folder / "server" / "ca.crt"
    read_certificate(ca)  # raises an error that names it if it is missing
    asked = enrollment.check_request(args.request, members.federation.name, ca.read_bytes())
    site = asked.site
    before = members.entry(site).get("signing", "")
    keys = instruction_keys.pinned_keys(members)
    must_sign = members.signs(site) or members.federation.signatures == "required"
    enrollment.require_instruction_keys(asked, keys.digest if keys.keys else "", must_sign)
    members.require_new(site, asked.key)
    members.require_new_signing(site, asked.signing)
    if args.fingerprint not in ("-", asked.fingerprint):
        raise ConfigError(
            # Don't print the request's own fingerprint: the user would copy it instead of asking the site by phone.
            f"--fingerprint: expected the fingerprint of the keys in {args.request}, found a different one: "
            f"{sanitize(args.fingerprint, 100)}; have the site read out the one that its fedveil site init printed, "
            "and do not register this request if it still differs"
        )
    node = ""
    if (flower := _flower(args)) is not None:
        _unregister(flower, members, site)
        node = flower.register(asked.key, site)
    members.register(site, asked.key, node, signing=asked.signing)
    say(f"{site}: registered, keys {asked.fingerprint}, until {members.sites[site]['until'][:10]}")
    if before != asked.signing:
        say(f"its signing key is new: run fedveil members roster {args.folder}, and have the sites compare digests")
    return 0


def _roster(args: argparse.Namespace) -> int:
    members = SiteRegistry(args.folder)
    members.write_signers()
    keys_ = members.signing_keys
    for site, entry in sorted(members.sites.items()):
        if site in keys_:
            say(f"{site:<20} {enrollment.short_key(keys_[site])}")
        elif entry["state"] == "registered":
            say(f"{site:<20} has NO signing key: run fedveil site init --renew there, then register the request")
        else:
            say(f"{site:<20} is not in the roster: {entry['state']}")
    if not keys_:
        raise ConfigError(
            f"{args.folder}: expected a registered site with a signing key, found none; register a site first"
        )
    out = args.out or roster_file(args.folder)
    write_atomic(out, SigningKeyRoster(signing_keys=keys_).to_bytes())
    seen = "" if args.out else f" (in containers: {_SEEN})"
    say(f"{out}: {len(keys_)} sites; set secure.roster in the run config to this file{seen}")
    say("each site checks its own key above (fedveil doctor shows it there); then the sites read the last line to each")
    say("other, bypassing the server, and put it in their site-policy.toml:")
    print(f'roster = "{roster_digest(keys_)}"')
    return 0


def _revoke(args: argparse.Namespace, members: SiteRegistry) -> int:
    members.entry(args.site)
    if (flower := _flower(args)) is not None:
        _unregister(flower, members, args.site)
    members.end(args.site, "revoked")
    say(f"{args.site}: revoked; this key is never accepted again")
    return 0


def _expire(args: argparse.Namespace, members: SiteRegistry) -> int:
    over = members.expired()
    flower = _flower(args) if over else None
    for site in over:
        if flower is not None:
            _unregister(flower, members, site)
        members.end(site, "expired")
        say(f"{site}: expired; make a new key at the site with fedveil site init --renew")
    if not over:
        say("no key is past its expiry date")
    return 0


def _sync(args: argparse.Namespace, members: SiteRegistry) -> int:
    flower = FlowerCli(args.folder.absolute() / "server" / "flower")
    known, over = flower.nodes(), members.expired()
    for site, entry in sorted(members.sites.items()):
        if entry["state"] == "registered" and site not in over and entry["node"] not in known:
            entry["node"] = flower.register(entry["key"], site)
            members.save()
            say(f"{site}: registered with Flower")
    for site, entry in sorted(members.sites.items()):
        if (entry["state"] in ("revoked", "expired") or site in over) and entry.get("node") in known:
            flower.unregister(entry["node"])
            say(f"{site}: {entry['state']}, and now also unregistered from Flower")
    return 0


def _renew(args: argparse.Namespace, members: SiteRegistry) -> int:
    issue_certificate(args.folder, members.federation, args.ca_key)
    say(f"{args.folder / 'server'}: new server.pem and server.key; restart the SuperLink; sites reconnect on their own")
    return 0


def _address(args: argparse.Namespace) -> int:
    """Print the server's address, and each kit's address with the command that updates an outdated kit."""
    members = SiteRegistry(args.folder)
    say(f"{members.federation.superlink}: the address for the kits; names in the certificate: "
          f"{', '.join(members.federation.server)}")  # fmt: skip
    for site, entry in sorted(members.sites.items()):
        if entry["state"] not in ("registered", "invited"):
            continue
        kit = args.folder / "kits" / f"{site}.tar.gz"
        named = startup_kit.address_in_kit(kit)
        if named == members.federation.superlink:
            say(f"{site}: its kit {kit} has this address")
        else:
            again = f"rewrite it: fedveil members kit {args.folder} {site}"
            say(f"{site}: its kit {kit} has {named or 'no address'}; {again}")
    say(startup_kit.ADDRESS_AT_SITE)
    return 0


def _flower(args: argparse.Namespace) -> FlowerCli | None:
    return None if args.offline else FlowerCli(args.folder.absolute() / "server" / "flower")


def _unregister(flower: FlowerCli, members: SiteRegistry, site: str) -> None:
    """Unregister the site's key from Flower, if it is registered."""
    node = members.entry(site).get("node", "")
    if node and node in flower.nodes():
        flower.unregister(node)
