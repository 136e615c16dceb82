"""`fedveil log`: checks an audit log, shows it, prints an anchor of it.

An anchor is the number of lines and the hash of the last one. Somebody else keeps it: a log that was cut at its end, or
written anew as a whole, then no longer fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.foreign import shown
from fedveil.records import audit_log
from fedveil.records.audit_log import Head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="find any line that was changed, dropped, moved or cut off the front")
    verify.add_argument(
        "--anchor", action="append", default=[], metavar="LINES:HASH",
        help="an anchor taken earlier and kept elsewhere; only with one is a cut at the end found, or a new log",
    )  # fmt: skip
    verify.add_argument(
        "--other", type=Path, metavar="FILE",
        help="the other end's log, which holds anchors of this one: --site says of which site",
    )  # fmt: skip
    verify.add_argument("--site", default="", help="with --other FILE of a server: the site that this log is of")
    verify.set_defaults(run=_verify)
    anchor = actions.add_parser("anchor", help="print the log's anchor: keep it where the log's owner cannot write")
    anchor.set_defaults(run=_anchor)
    show = actions.add_parser("show", help="the lines in words")
    show.set_defaults(run=_show)
    for action in (verify, anchor, show):
        action.add_argument(
            "file", type=Path, help="audit-log.jsonl of a site's state folder, or of the server's run folder"
        )


def _verify(args: argparse.Namespace) -> int:
    anchors = [Head.parse(text) for text in args.anchor]
    if args.other:
        anchors += _held_by(args.other, args.site)
    head = audit_log.verify(args.file, anchors)
    print(f"{args.file}: {head.lines} lines, each as it was written; anchors that it fits: {len(anchors)}")
    if not anchors:
        print("no anchor was given: lines cut off the end, or a log written anew as a whole, would not show")
    print(f"anchor now: {head}")
    return 0


def _held_by(other: Path, site: str) -> list[Head]:
    """The anchors in the other end's log: in a site's of the server, in the server's of the site `site`."""
    lines = audit_log.read(other)
    found = [line["site_log"] for line in lines if site and line.get("site_log") and line.get("site") == site]
    found += [line["server_log"] for line in lines if not site and line.get("server_log")]
    if not found:
        whose = f"site {site}" if site else "a server"
        raise ConfigError(
            f"--other: expected anchors of {whose} in {other}, found none; name the other file, or --site"
        )
    return [Head.parse(text) for text in found]


def _anchor(args: argparse.Namespace) -> int:
    print(audit_log.verify(args.file))
    return 0


def _show(args: argparse.Namespace) -> int:
    for line in audit_log.read(args.file):
        about = {key: value for key, value in line.items() if key not in ("n", "time", "event", "previous", "hash")}
        fields = about.pop("fields", None)
        words = [f"{shown(key, 80)}={shown(value)}" for key, value in about.items() if value not in ("", None)]
        words += [f"fields={len(fields)}"] if fields is not None else []
        print(f"{line['n']:>5} {shown(line['time'], 40)} {shown(line['event'], 40):<9} {' '.join(words)}")
    return 0
