"""`fedveil site ledger`: shows the site's privacy ledger, moves another folder's history into it, or repairs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from fedveil.client_app.policy import site_policy as policies
from fedveil.client_app.state.client_state import open_ledger
from fedveil.client_app.state.data_sets import FolderWitness
from fedveil.console.runs.ledger_summary import ledger_files, ledger_standing, site_of_folder, standing_lines
from fedveil.console.runs.restored_runs import close_noted_runs, forget_noted_runs
from fedveil.console.terminal import say
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError
from fedveil.privacy.ledger_account import AccountEntry, Party, SiteAccount
from fedveil.records import audit_log
from fedveil.records.log_rotation import is_unchecked as is_unchecked_log
from fedveil.sanitize import sanitize

_Action = Callable[[argparse.Namespace], int]


def add_actions(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], in_own_folder: Callable[[_Action], _Action]
) -> Sequence[argparse.ArgumentParser]:
    """Add `ledger` with its actions; return the actions that take the state-folder options."""
    ledger = actions.add_parser("ledger", help="show the privacy ledger, move a history into it, or repair it")
    ledger_actions = ledger.add_subparsers(metavar="ACTION", required=True)
    show = ledger_actions.add_parser("show", help="show each run, its reserved budget, and open entries")
    show.set_defaults(run=in_own_folder(_show))
    adopt = ledger_actions.add_parser(
        "adopt", help="add the history of data charged in another state folder, and bind the data to this one"
    )
    adopt.add_argument("data", type=Path, metavar="DATA", help="the data folder")
    source = adopt.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="other", type=Path, metavar="FOLDER", help="the other site's state folder")
    source.add_argument("--lost", action="store_true", help="that ledger is lost, so epsilon over all runs is infinite")
    adopt.add_argument(
        "--other-key-file", default="", metavar="FILE", help="the other ledger's key, if the ledger is encrypted"
    )
    adopt.set_defaults(run=in_own_folder(_adopt))
    recover = ledger_actions.add_parser(
        "recover", help="after every restore from a backup: count the most that may have been charged since the backup"
    )
    recover.add_argument("data", type=Path, metavar="DATA", help="the data folder")
    recover.add_argument(
        "--nothing-lost",
        action="store_true",
        help="the site did not run since the backup, as after a move; the data folder's mark must confirm it",
    )
    recover.set_defaults(run=in_own_folder(_recover))
    for action in (show, adopt, recover):
        action.add_argument(
            "--policy", default="", metavar="FILE", help="needed only if fedveil site start did not record it"
        )
        action.add_argument(
            "--key-file",
            default="",
            metavar="FILE",
            help="key file for an encrypted state, if fedveil site start did not record it",
        )
    return show, adopt, recover


def _show(args: argparse.Namespace) -> int:
    if not ledger_files(args.state_dir):
        say(f"no privacy ledger in {args.state_dir.expanduser()}: no run has trained here")
        return 0
    standing = ledger_standing(args.state_dir, args.policy, args.key_file)
    for line in standing_lines(standing):
        say(line)
    for entry in standing.account.entries:
        say(f"  {_described(standing.account, entry)}")
    return 0


def _described(account: SiteAccount, entry: AccountEntry) -> str:
    words = [f"run {sanitize(entry.run, 100)}"]
    if entry.open:
        whom = "everyone" if entry.open == set(Party) else " and ".join(sorted(party.value for party in entry.open))
        words.append(f"open against {whom}: {sanitize(entry.why, 200)}")
    if entry.claim:
        words.append(f"claims {sanitize(entry.claim, 200)}")
    if entry.steps:
        words.append(f"reserves epsilon {account.reserved_epsilon(entry):.4g} at delta {account.delta_of_run:.3g}")
        words += [f"{one.used} of {one.most} steps {tuple(one.step)}" for one in entry.steps]
    return "; ".join(words)


def _adopt(args: argparse.Namespace) -> int:
    site = site_of_folder(args.state_dir, args.policy, args.key_file)
    if args.other is not None and not ledger_files(args.other):
        raise ConfigError(f"--from: expected a state folder with a ledger, found none in {args.other}; use --lost")
    other = None if args.lost else open_ledger(args.other, FileSeal.from_key_file(args.other_key_file))
    ledger, witness = open_ledger(args.state_dir, FileSeal.from_key_file(site.key_file)), _witness(args.data, "")
    ledger.require_whole()
    if ledger.is_restored:
        close_noted_runs(args.state_dir)  # before the ledger may permit runs again
    added = ledger.adopt(policies.load_policy(site).budget, witness, other)
    if not ledger.is_restored:
        forget_noted_runs(args.state_dir)
    say(f"{added} entries added; the data folder now belongs to the ledger in {args.state_dir.expanduser()}")
    return 0


def _recover(args: argparse.Namespace) -> int:
    site = site_of_folder(args.state_dir, args.policy, args.key_file)
    ledger = open_ledger(args.state_dir, FileSeal.from_key_file(site.key_file))
    own, witness = policies.load_policy(site).budget, _witness(args.data, site.data_set)
    ledger.require_whole()
    was_restored = ledger.is_restored
    closed = close_noted_runs(args.state_dir, args.nothing_lost)  # before the ledger permits runs again
    if args.nothing_lost:
        ledger.confirm_complete(own, witness)
        done = "the ledger is used as it was restored; the data folder's mark is its last change"
    else:
        done = ledger.recover(own, witness)
    forget_noted_runs(args.state_dir)
    log = args.state_dir.expanduser() / audit_log.NAME
    is_unchecked = was_restored and is_unchecked_log(log)
    if was_restored and not is_unchecked:
        about = {"lost": "nothing, as the site says" if args.nothing_lost else "unknown", "closed": closed}
        audit_log.append_entry(log, "recovered", about)
    say(f"recovered: {done}{f'; {closed} runs closed at this site' if closed else ''}")
    if is_unchecked:
        say(
            "not recorded in the audit log, which was not compared with the server's anchor; before the site starts: "
            "fedveil log rotate audit-log.jsonl --after LINES:HASH"
        )
    return 0


def _witness(data: Path, given: str) -> FolderWitness:
    if not data.exists():
        raise ConfigError(f"DATA: expected the site's data folder, found none at {data}; correct the path")
    try:
        witness = FolderWitness.open(data, given)
    except ConfigError:
        witness = None
    if witness is None or not (witness.is_writable or witness.is_absent):
        raise ConfigError(
            f"DATA: expected a data folder that this user can write, because it has the ledger's mark, found {data}, "
            "which is not writable; nothing was changed: run this where the folder is writable"
        )
    return witness
