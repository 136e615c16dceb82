"""`fedveil site units`, `exposure` and `withdraw`: the units in a site's data, and requests that a person may make."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.console.runs.dataset_cache import list_cached_datasets, remove_cached
from fedveil.console.runs.ledger_summary import LedgerStanding, ledger_files, ledger_standing, site_of_folder
from fedveil.console.runs.unit_exposure import (
    RunExposure,
    collect_exposure,
    collect_runs,
    find_unit,
    list_row_files,
    read_id,
)
from fedveil.console.terminal import say
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, FedVeilError
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    from fedveil.data.units import UnitCounts

_Action = Callable[[argparse.Namespace], int]
_LISTED = 10  # maximum number of rows, or of pairs, to list
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # the server appends it to a run's name


def add_actions(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], in_own_folder: Callable[[_Action], _Action]
) -> Sequence[argparse.ArgumentParser]:
    """Add and return `units`, `exposure` and `withdraw`, which take the state-folder options."""
    units = actions.add_parser("units", help="count the units, such as patients, and find IDs that runs would refuse")
    units.set_defaults(run=in_own_folder(_units))
    exposure = actions.add_parser(
        "exposure", help="show which runs a person's rows may have been used in, and with what guarantee"
    )
    exposure.add_argument("--json", action="store_true", help="print JSON")
    exposure.set_defaults(run=in_own_folder(_exposure))
    withdraw = actions.add_parser("withdraw", help="exclude a person's rows from all later training")
    withdraw.set_defaults(run=in_own_folder(_withdraw))
    for action in (exposure, withdraw):
        action.add_argument(
            "--unit", required=True, metavar="ID",
            help="the unit's ID, such as a patient ID; - reads it from stdin, to keep it out of the shell history",
        )  # fmt: skip
    for action in (units, exposure, withdraw):
        action.add_argument(
            "--unit-column",
            default="",
            metavar="NAME",
            help="the ID column; default: the node config's unit-column",
        )
        action.add_argument(
            "--data", type=Path, metavar="FOLDER", help="the site's data; default: as for fedveil site start"
        )
        action.add_argument(
            "--data-set", default="", metavar="NAME", help="one of the site's data sets (data-sets in the node config)"
        )
        action.add_argument(
            "--policy", default="", metavar="FILE", help="needed only if fedveil site start did not record it"
        )
        action.add_argument(
            "--key-file",
            default="",
            metavar="FILE",
            help="key file for an encrypted state, if fedveil site start did not record it",
        )
    return units, exposure, withdraw


def withdrawn_lines(state_dir: Path, key_file: str = "") -> list[str]:
    """Return the line on withdrawn units for `fedveil site status`; [] if there are none."""
    if not WithdrawalRecord.open(state_dir).roles:
        return []
    try:
        site = site_of_folder(state_dir, "", key_file)
        count = len(WithdrawalRecord.open(state_dir, FileSeal.from_key_file(site.key_file)).read().units)
    except (FedVeilError, OSError, ValueError) as error:
        return [f"withdrawn units: cannot be read: {sanitize(error)}"]
    return [f"withdrawn units: {count}, whose rows no run trains on"] if count else []


def _exposure(args: argparse.Namespace) -> int:
    searched, unit = _searched(args), _unit(args)
    (first, site), *others = searched.items()
    exposure = collect_exposure(args.state_dir, site, unit, _data(args, site), args.unit_column or site.unit_column)
    more = {
        name: find_unit(args.state_dir, own, unit, _data(args, own), args.unit_column or own.unit_column)
        for name, own in others
    }
    if args.json:
        found = exposure.to_json()
        if len(searched) > 1:
            found["data_sets"] = {name: rows.to_json() for name, rows in {first: exposure.rows, **more}.items()}
        print(json.dumps(found, indent=2))
        return 0
    for line in itertools.chain(*(rows.lines() for rows in more.values()), exposure.lines()):
        say(line)
    return 0


def _units(args: argparse.Namespace) -> int:
    """Print each file's counts; return 1 if a run by units would be refused."""
    return max(_count_units(args, name, site) for name, site in _searched(args).items())


def _count_units(args: argparse.Namespace, name: str, site: SiteConfig) -> int:
    data, column = _data(args, site), _column(args, site)
    files = list_row_files(data) if data is not None else []
    if not files:
        raise ConfigError(f"--data: expected a folder with row files, found {data or 'none'}; name the site's data")
    from fedveil.data.units import count_units

    is_sound = True
    for file in files:
        label = f"{name}/{sanitize(file.name, 100)}" if name else sanitize(file.name, 100)
        try:
            counts = count_units(file, column)
        except FedVeilError as error:
            say(f"{label}: cannot be counted: {sanitize(error)}")
            is_sound = False
            continue
        say(f"{label}: {counts.units} units in {counts.rows} rows, at most {counts.largest} per unit")
        for line in _refusals(counts):
            say(f"  {line}")
            is_sound = False
    return 0 if is_sound else 1


def _refusals(counts: UnitCounts) -> Iterator[str]:
    """Yield the reasons why a run by units would refuse a file. Rows are identified by number; IDs are never shown."""
    if counts.without_id:
        rows, more = counts.without_id[:_LISTED], ", ..." if len(counts.without_id) > _LISTED else ""
        yield (
            f"{len(counts.without_id)} rows without an ID, which may belong to the same person: rows "
            f"{', '.join(map(str, rows))}{more}; add the IDs, or drop the rows"
        )
    if counts.similar:
        pairs = "; ".join(" and ".join(map(str, rows)) for rows in counts.similar[:_LISTED])
        more = "; ..." if len(counts.similar) > _LISTED else ""
        yield (
            f"{len(counts.similar)} IDs in several spellings, first in rows {pairs}{more}; write each person's ID the "
            "same way in all rows, or give different people IDs that differ more clearly"
        )


def _column(args: argparse.Namespace, site: SiteConfig) -> str:
    column = str(args.unit_column or site.unit_column)
    if not column:
        raise ConfigError(
            "--unit-column: expected the column with the unit's ID, found none; name it, or set unit-column in "
            "the node config"
        )
    return column


def _withdraw(args: argparse.Namespace) -> int:
    searched, unit = _searched(args), _unit(args)
    site = next((own for own in searched.values() if own.unit_column), next(iter(searched.values())))
    plain, column = read_id(unit), _column(args, site)
    found = {
        name: find_unit(args.state_dir, own, unit, _data(args, own), str(args.unit_column or own.unit_column or column))
        for name, own in searched.items()
    }
    record = WithdrawalRecord.open(args.state_dir, FileSeal.from_key_file(site.key_file))
    is_new = record.add(plain, column)
    say("withdrawn: no client round that starts from now on will train on this unit's rows" if is_new else
          "this unit was already withdrawn")  # fmt: skip
    remove_cached(args.state_dir, list_cached_datasets(args.state_dir))  # caches contain its rows unencrypted
    about = {"column": column, "units": len(record.read().units), "new": is_new}
    audit_log.append_entry(args.state_dir.expanduser() / audit_log.NAME, "withdrawn", about)
    for line in itertools.chain(*(rows.lines() for rows in found.values())):
        say(line)
    if any(rows.problems for rows in found.values()):
        say("this site does not train on data in which it cannot find withdrawn units")
    say("a client round in progress still uses the rows, and they stay in the data until you remove them")
    say("the privacy ledger continues: no epsilon is refunded")
    for run in collect_runs(args.state_dir, _standing(args.state_dir, site)):
        for line in _retraining(run):
            say(line)
    return 0


def _standing(state_dir: Path, site: SiteConfig) -> LedgerStanding | None:
    """Return the ledger. If it cannot be read, print why and return None, so that a withdrawal still succeeds."""
    try:
        return ledger_standing(state_dir, site.policy, site.key_file) if ledger_files(state_dir) else None
    except (FedVeilError, OSError, ValueError) as error:
        say(f"privacy ledger: cannot be read, so the runs below come from the audit log: {sanitize(error)}")
    return None


def _retraining(run: RunExposure) -> Iterator[str]:
    """Yield the steps to retrain a run without the unit's rows."""
    yield f"run {run.run} may have used the rows: {run.describe_rounds()}"
    if run.state_bytes:
        purge = f"fedveil site purge --run {shlex.quote(run.run)}"
        yield f"  at this site: {purge} removes the private state trained in it"
    name = _SUFFIX.sub("", run.run)
    submit = f"fedveil submit --federation FOLDER --config {shlex.quote(f'runs/{name}/resume.toml')}"
    first, rounds = min(run.rounds, default=0), f"{run.of} rounds" if run.of else "all rounds"
    yield f"  to retrain without them, the operator runs ({rounds}):"
    yield f"    {submit} --set run.resume=false --set run.name={shlex.quote(f'{name}-again')}"
    if 0 < first == max(run.rounds):
        yield f"  if round {first + 1}, this site's first, is the run's latest, the run can resume from before it: move"
        yield "  checkpoint-before.safetensors to checkpoint.safetensors in the run's folder, then"
        yield f"    {submit}"


def _searched(args: argparse.Namespace) -> dict[str, SiteConfig]:
    """Return the site for each data set to search, by its name: the chosen one, or all."""
    site = site_of_folder(args.state_dir, args.policy, args.key_file)
    if args.data is not None or args.data_set:
        return {args.data_set: site.choose_data(args.data_set) if args.data_set else site}
    return site.list_data()


def _unit(args: argparse.Namespace) -> str:
    return sys.stdin.readline() if args.unit == "-" else str(args.unit)


def _data(args: argparse.Namespace, site: SiteConfig) -> Path | None:
    if args.data is not None:
        return Path(args.data)
    return Path(site.data) if site.data else None
