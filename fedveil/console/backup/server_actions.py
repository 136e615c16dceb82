"""`fedveil server backup`, `restore` and `purge`: a federation's folder as one file, and back; old runs removed."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedveil.console.backup.disk_errors import report_disk_errors
from fedveil.console.backup.server_backup import FederationPlaces, back_up_server, restore_server
from fedveil.console.backup.server_purge import offer_server_purge
from fedveil.console.provisioning.federation_folder import SiteRegistry, registry_folder
from fedveil.console.provisioning.operator_registry import OperatorRegistry
from fedveil.console.terminal import ask_to_delete, say
from fedveil.sanitize import sanitize

__all__ = ["add_actions"]


def add_actions(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `backup`, `restore` and `purge`."""
    backup = actions.add_parser(
        "backup", help="write registry, certificates, keys, logs and database to one file, also while the server runs"
    )
    backup.add_argument("--to", required=True, type=Path, metavar="FILE", help="the new file, best on another machine")
    which = backup.add_mutually_exclusive_group()
    which.add_argument(
        "--run", dest="runs", action="append", default=[], metavar="NAME", help="include this run's folder; repeatable"
    )
    which.add_argument("--all-runs", action="store_true", help="include the folders of all runs that are not running")
    backup.set_defaults(run=_back_up)
    restore = actions.add_parser("restore", help="put a backup into an empty folder")
    restore.add_argument("file", type=Path, metavar="FILE", help="a file of fedveil server backup")
    restore.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder for the federation")
    restore.set_defaults(run=_restore)
    purge = actions.add_parser(
        "purge", help="delete checkpoints and captured messages of old runs; models, cards, metrics and logs are kept"
    )
    purge.add_argument(
        "--older-than", type=float, metavar="DAYS", help="select runs that have not changed for this many days"
    )
    purge.add_argument(
        "--run", dest="runs", action="append", default=[], metavar="NAME", help="select this run; repeatable"
    )
    purge.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    purge.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    purge.set_defaults(run=_purge)
    for action in (backup, purge):
        _add_places(action)


def _add_places(action: argparse.ArgumentParser) -> None:
    """Add the arguments that name a federation's folders."""
    action.add_argument("folder", type=Path, metavar="FOLDER", help="the folder made by fedveil provision")
    action.add_argument(
        "--state-dir", type=Path, metavar="FOLDER", help="as given to fedveil server start; default: server in FOLDER"
    )
    action.add_argument("--runs-dir", type=Path, metavar="FOLDER", help="the runs' run.dir; default: runs in FOLDER")


def _back_up(args: argparse.Namespace) -> int:
    places = FederationPlaces.resolve(args.folder, args.state_dir, args.runs_dir)
    with report_disk_errors(args.to):
        done = back_up_server(places, args.to, None if args.all_runs else args.runs)
    say(f"{args.to}: {done.files:,} files, {done.bytes:,} bytes, SHA-256 {done.sha256}")
    say("it has the server's private keys and the owner's token: whoever reads it can pose as this server")
    say("a run in progress: the database has its sites' uploads of the current round, as objects of Flower")
    for reason in done.left_out:
        say(f"left out: {sanitize(reason, 400)}")
    return 0


def _restore(args: argparse.Namespace) -> int:
    with report_disk_errors(args.folder):
        made, count, sha256 = restore_server(args.file, args.folder)
    members = SiteRegistry(args.folder)
    operators = OperatorRegistry(registry_folder(args.folder))
    sites = sorted(site for site, entry in members.sites.items() if entry["state"] == "registered")
    say(f"{args.folder}: {count:,} files restored from the backup of {made}")
    say(f"SHA-256 of the backup: {sha256}; compare it with the one that fedveil server backup printed")
    say(f"registered sites: {', '.join(sites) or 'none'}; operators: {', '.join(sorted(operators.entries)) or 'none'}")
    say(f"next: revoke again the sites and operators that were revoked since {made}, before the server starts")
    say(
        "next: compare the audit log with each site's: fedveil log verify runs/audit-log.jsonl --other SITE-LOG; if "
        "lines are missing, continue it after a site's anchor with fedveil log rotate --after"
    )
    say(f"next: fedveil server start {args.folder}; resume runs with fedveil submit --config RUN/resume.toml")
    return 0


def _purge(args: argparse.Namespace) -> int:
    places = FederationPlaces.resolve(args.folder, args.state_dir, args.runs_dir)
    agreed = None if args.dry_run else lambda: args.yes or ask_to_delete()
    with report_disk_errors(places.runs):
        return offer_server_purge(places, args.runs, args.older_than, agreed)
