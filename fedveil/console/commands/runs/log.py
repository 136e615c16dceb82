"""`fedveil log`: checks, shows, continues or compares audit logs and their anchors.

An anchor is a log's line count and the hash of its last line; another party keeps it. A log that is later truncated
or completely rewritten no longer matches the anchor.

`rotate` continues a log in a new file, to archive the old file or to move on from a damaged one. Lines keep their
numbers, and anchors stay valid. Earlier files next to a log are part of it; `verify` also accepts several files.

`policies` lists the policies by which a site decided, each with its first and last decision and the copy that the site
kept.

`compare` reads two sites' logs, and exits with 1 if their secure-aggregation rounds contradict each other.

`prove` prints a line's signed message as a separate file, and `check` verifies such a file with a public key.
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from fedveil.console.runs.policy_history import list_policies
from fedveil.console.terminal import say
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.claims import InstructionClaims
from fedveil.federation.message_signatures.evidence import MOST_BYTES, Evidence
from fedveil.federation.secagg.log_conflicts import count_common_plans, find_conflicts
from fedveil.records import audit_log
from fedveil.records.audit_log import LogHead
from fedveil.records.log_rotation import rotate_log
from fedveil.sanitize import sanitize

_OWN = ("n", "time", "event", "previous", "hash")
_FIRST = ("run", "round", "site", "operator", "call")
_BYTES = ("down_bytes", "up_bytes")
_LAST = ("cause", "reason")
_HEX = re.compile(r"(\d+:)?[0-9a-f]{40,}")
_HASH = 12  # number of hash characters to show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify", help="find lines that were changed, dropped, moved, or cut off at the beginning"
    )
    verify.add_argument(
        "--anchor", action="append", default=[], metavar="LINES:HASH",
        help="an anchor taken earlier and kept elsewhere; detects lines cut off at the end, or a replaced log",
    )  # fmt: skip
    verify.add_argument(
        "--other", type=Path, metavar="FILE",
        help="the other party's log, which holds anchors of this one; name the site with --site",
    )  # fmt: skip
    verify.add_argument("--site", default="", help="if --other is a server's log: the site that wrote this log")
    verify.add_argument("file", type=Path, nargs="+", metavar="FILE", help="a log, or all its files, oldest first")
    verify.set_defaults(run=_verify)
    rotate = actions.add_parser(
        "rotate", help="continue the log in a new file; the old file is kept under another name"
    )
    rotate.add_argument(
        "--after", default="", metavar="LINES:HASH",
        help="another party's latest anchor, for a log that is lost or whose last line is damaged",
    )  # fmt: skip
    rotate.set_defaults(run=_rotate)
    anchor = actions.add_parser("anchor", help="print the log's anchor; keep it where the log's owner cannot write")
    anchor.add_argument(
        "--site", default="", help="instead, print the latest anchor of this site's log in FILE, a server's log"
    )
    anchor.set_defaults(run=_anchor)
    show = actions.add_parser("show", help="print the lines as text, with times in this machine's time zone")
    show.add_argument(
        "--json", action="store_true", help="for programs: print the raw lines, with rounds counted from 0"
    )
    show.set_defaults(run=_show)
    policies = actions.add_parser(
        "policies", help="list the policies by which a site decided: from when until when, for which runs, and the copy"
    )
    policies.set_defaults(run=_policies)
    compare = actions.add_parser(
        "compare", help="find secure-aggregation rounds in which the server gave two sites different plans or lists"
    )
    compare.set_defaults(run=_compare)
    prove = actions.add_parser(
        "prove", help="print a line's signed message as a file that anyone can check without the log"
    )
    prove.set_defaults(run=_prove)
    for action in (rotate, anchor, show, policies, compare, prove):
        action.add_argument(
            "file", type=Path, help="audit-log.jsonl in a site's state folder, or in the server's run folder"
        )
    compare.add_argument("other", type=Path, help="audit-log.jsonl of another site")
    prove.add_argument("line", type=int, metavar="LINE", help="the line number, which fedveil log show prints first")
    check = actions.add_parser("check", help="verify a file from fedveil log prove with the signer's public key")
    check.add_argument("file", type=Path, help="the output of fedveil log prove")
    check.add_argument(
        "--key", required=True, metavar="HEX",
        help="64 hex digits: a site's key in server/roster/signers.json, a server's in the kit's instruction-keys.toml",
    )  # fmt: skip
    check.set_defaults(run=_check)


def _verify(args: argparse.Namespace) -> int:
    anchors = [LogHead.parse(text) for text in args.anchor]
    if args.other:
        anchors += _held_by(args.other, args.site)
    files = args.file if len(args.file) > 1 else audit_log.list_log_files(args.file[0])
    first = audit_log.start_of(files[0]).lines
    # The other party's anchors reach back to the beginning; an anchor given with --anchor must be checked or refused.
    own = [LogHead.parse(text) for text in args.anchor]
    checkable = [anchor for anchor in anchors if anchor.lines >= first or anchor in own]
    head = audit_log.verify_log_files(files, checkable)
    damaged, names = audit_log.count_damaged(files), ", ".join(map(str, files))
    what = f"{damaged} damaged, as a later line records; all others unchanged" if damaged else "all unchanged"
    say(f"{names}: {head.lines - first} lines, {what}; matching anchors: {len(checkable)}")
    if first:
        say(f"the log begins at line {first}; to check its earlier files, name them too")
    if skipped := len(anchors) - len(checkable):
        say(f"{skipped} anchors belong to earlier files and were not checked")
    if not anchors:
        say("no anchor was given, so lines cut off at the end, or a fully rewritten log, would not be detected")
    say(f"anchor now: {head}")
    return int(damaged > 0 or (bool(anchors) and not checkable))  # a forged start would leave no anchor to check


def _rotate(args: argparse.Namespace) -> int:
    old, head = rotate_log(args.file, LogHead.parse(args.after) if args.after else None)
    kept = f"earlier lines are in {old}, so keep it" if old else "earlier lines are lost, and the log says so"
    say(f"{args.file}: continues with line {head.lines - 1}; {kept}")
    say(f"anchor now: {head}")
    return 0


def _held_by(other: Path, site: str) -> list[LogHead]:
    """Return the anchors in the other party's log: the server's in a site's log, or `site`'s in the server's log."""
    lines = audit_log.read_log(other)
    anchors = [line["site_log"] for line in lines if site and line.get("site_log") and line.get("site") == site]
    anchors += [line["server_log"] for line in lines if not site and line.get("server_log")]
    if not anchors:
        whose = f"site {site}" if site else "a server"
        raise ConfigError(
            f"--other: expected anchors of {whose} in {other}, found none; name another file, or set --site"
        )
    return [LogHead.parse(text) for text in anchors]


def _anchor(args: argparse.Namespace) -> int:
    if args.site:
        print(max(_held_by(args.file, args.site), key=lambda head: head.lines))
    else:
        print(audit_log.verify_log(args.file))
    return 0


def _show(args: argparse.Namespace) -> int:
    for line in audit_log.read_log(args.file):
        if args.json:
            print(json.dumps(line, sort_keys=True))
        else:
            say(_words(line), hang=6)
    return 0


def _policies(args: argparse.Namespace) -> int:
    found = list_policies(args.file)
    if not found:
        raise ConfigError(f"{args.file}: expected a site's log, whose lines name its policy, found none; name another")
    for used in found:
        say(f"{used.digest[:_HASH]}...  {_time(used.first)} to {_time(used.last)}, {used.decisions} decisions")
        say(f"  runs: {', '.join(sanitize(run, 80) for run in used.runs) or 'none'}")
        say(f"  copy: {used.copy or 'none in this state folder'}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    logs = audit_log.read_log(args.file), audit_log.read_log(args.other)
    common = count_common_plans(*logs)
    found = find_conflicts([*logs[0], *logs[1]])
    for conflict in found:
        say(conflict)
    damaged = {file: audit_log.count_damaged(audit_log.list_log_files(file)) for file in (args.file, args.other)}
    for file, count in damaged.items():
        if count:
            say(f"{file}: {count} lines are damaged and were not compared")
    if found or any(damaged.values()):
        return 1
    if not common:
        raise ConfigError(
            f"{args.file} and {args.other}: expected secure-aggregation rounds that both sites took part in, found "
            "none; name the logs of two sites from one run"
        )
    say(f"{common} secure-aggregation attempts are in both logs: each has one plan, and one list of sites in its sum")
    return 0


def _prove(args: argparse.Namespace) -> int:
    lines = {line["n"]: line for line in audit_log.read_log(args.file)}
    if args.line not in lines:
        what = f"a line from {min(lines)} to {max(lines)}" if lines else "lines"
        raise ConfigError(f"LINE: expected {what} of {args.file}, found {args.line}")
    print(Evidence.from_line(lines[args.line]).to_json())
    return 0


def _check(args: argparse.Namespace) -> int:
    try:
        with args.file.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{args.file}: expected a file of fedveil log prove, found none ({error.strerror})") from None
    evidence = Evidence.from_json(content)
    evidence.require_signer(args.key)
    claims = evidence.claims
    message = "an instruction to" if isinstance(claims, InstructionClaims) else "a reply of"
    say(
        f"{args.file}: the holder of the key {args.key[:16]}... signed {message} site {sanitize(claims.site, 80)}: run "
        f"{sanitize(claims.run, 80)}, round {claims.round + 1}, attempt {claims.attempt + 1}, federation "
        f"{sanitize(claims.federation, 40)}"
    )
    for name, value in sorted(claims.as_evidence().items()):
        say(f"  {name} = {sanitize(value, 200)}")
    say("it does not show that the message arrived or counted")
    return 0


def _words(line: dict[str, Any]) -> str:
    """Format a line for display: rounds counted from 1, bytes with commas, long hashes shortened, the reason last."""
    about = {key: value for key, value in line.items() if key not in _OWN and value not in ("", None)}
    parts = [f"{sanitize(line['n'], 20):>5} {_time(line['time'])} {sanitize(line['event'], 40):<9}"]
    for key in [key for key in _FIRST if key in about]:
        value = about.pop(key)
        counted = key == "round" and isinstance(value, int)
        parts.append(f"round {value + 1}" if counted else sanitize(value, 80))
    for key in [key for key in _BYTES if isinstance(about.get(key), int)]:
        parts.append(f"{key.removesuffix('_bytes')} {about.pop(key):,} B")
    why = [sanitize(about.pop(key)) for key in _LAST if key in about]
    for key, value in about.items():
        text = f"{len(value)}" if isinstance(value, list | dict) else sanitize(value)
        parts.append(f"{sanitize(key, 80)}={text[:_HASH] + '...' if _HEX.fullmatch(text) else text}")
    return "  ".join(parts + ([f": {'; '.join(why)}"] if why else []))


def _time(value: object) -> str:
    """Format a time to the second, in the reader's time zone; text that is not a time is returned unchanged."""
    try:
        return datetime.fromisoformat(str(value)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return sanitize(value, 40)
