"""`fedveil site backup` and `fedveil site restore`: the state of a stopped site as one file, and back."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from fedveil.console.backup.disk_errors import report_disk_errors
from fedveil.console.backup.site_backup import RestoreChecks, back_up_site, restore_site
from fedveil.console.provisioning import kit_reader
from fedveil.console.terminal import say
from fedveil.encrypted_files import FileSeal
from fedveil.records.audit_log import LogHead
from fedveil.sanitize import sanitize

__all__ = ["add_actions"]

_Action = Callable[[argparse.Namespace], int]
_SHOWN = 10


def add_actions(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], in_own_folder: Callable[[_Action], _Action]
) -> Sequence[argparse.ArgumentParser]:
    """Add `backup` and `restore`, which take the state-folder options."""
    backup = actions.add_parser(
        "backup", help="write a stopped site's state, ledger and logs to one file, without keys"
    )
    backup.add_argument("--to", required=True, type=Path, metavar="FILE", help="the new file, best on another machine")
    backup.set_defaults(run=in_own_folder(_back_up))
    restore = actions.add_parser(
        "restore", help="put a backup back; a newer ledger or audit log at the site is never replaced by an older one"
    )
    restore.add_argument("file", type=Path, metavar="FILE", help="a file of fedveil site backup")
    restore.add_argument(
        "--data", type=Path, metavar="FOLDER", help="the site's data folder, whose mark knows the ledger's last change"
    )
    restore.add_argument(
        "--anchor", default="", metavar="LINES:HASH",
        help="the server's anchor of this site's log: fedveil log anchor SERVER-LOG --site NAME at the server",
    )  # fmt: skip
    restore.add_argument(
        "--older", action="store_true", help="restore although --data or --anchor knows more than the backup"
    )
    restore.add_argument("--key-file", default="", metavar="FILE", help="key of an encrypted state, to compare ledgers")
    restore.set_defaults(run=in_own_folder(_restore))
    return backup, restore


def _back_up(args: argparse.Namespace) -> int:
    with report_disk_errors(args.to):
        found, size, sha256 = back_up_site(args.state_dir, args.to)
    say(f"{args.to}: {len(found.files):,} files, {size:,} bytes, SHA-256 {sha256}")
    say(
        "it has the ledger, the audit log, copies of policies, withdrawn units, and each run's private state and secret"
    )
    for reason in found.left_out:
        say(f"left out: {sanitize(reason, 400)}")
    say("left out: keys, key file, policy and kit; keep copies of the keys apart")
    return 0


def _restore(args: argparse.Namespace) -> int:
    anchor = LogHead.parse(args.anchor) if args.anchor else None
    data = args.data or _data_of_kit(args.kit)
    checks = RestoreChecks(FileSeal.from_key_file(args.key_file), data, anchor, args.older)
    with report_disk_errors(args.state_dir):
        done = restore_site(args.file, args.state_dir, checks)
    say(f"{args.state_dir}: {len(done.written):,} files restored from the backup of {done.made}")
    say(f"SHA-256 of the backup: {done.sha256}; compare it with the one that fedveil site backup printed")
    if done.kept:
        say(f"kept, because the backup's are equal or older: {_listed(done.kept)}")
    if done.different:
        say(f"kept, not compared, although the backup's are different: {_listed(done.different)}")
    if done.closed:
        by = "fedveil site ledger recover closes" if done.must_recover else "closed at this site"
        say(f"{by}, because later rounds may have been served: {_listed(done.closed)}")
    say(f"data folder: {f'compared with the mark in {data}' if data else 'not compared; none was given with --data'}")
    say(done.log)
    if done.is_log_unchecked:
        say(
            "next: ask the operator for fedveil log anchor SERVER-LOG --site NAME, and run fedveil log rotate "
            "audit-log.jsonl --after LINES:HASH here, before the site starts"
        )
    if done.must_recover:
        say("next: fedveil site ledger recover DATA, until which this site trains in no run")
        if not done.has_ledger:
            say("instead, if DATA was charged since: fedveil site ledger adopt DATA --lost, as there is no ledger here")
    if any(name.startswith(".withdrawn/") for name in done.written):
        say(f"next: withdraw again the units that were withdrawn since {done.made}")
    return 0


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{sanitize(', '.join(names[:_SHOWN]), 2000)}{more}"


def _data_of_kit(kit: Path | None) -> Path | None:
    """Return the data folder that the kit names, if it is on this machine."""
    data = Path(kit_reader.node_config(kit).data) if kit else None
    return data if data and data.exists() else None
