"""Collect what a site's own records say about one unit's exposure, such as a patient's (GDPR, article 15).

The records are the privacy ledger, the audit log and the run folders in the state folder; no server is queried. The
ledger charges every record for every run, so its figures hold for each unit that was in the data at the time. The
records do not say which units were drawn: that is secret, and the guarantee depends on this.

The ID stays in memory: it never appears in a returned value, log, error or file.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedveil.client_app.node_config import SiteConfig
from fedveil.client_app.state.withdrawn_units import WithdrawalRecord
from fedveil.console.runs.ledger_summary import LedgerStanding, bound_of, if_planned, ledger_files, ledger_standing
from fedveil.console.runs.retained_state import list_retained
from fedveil.console.terminal import say
from fedveil.contract.privacy import UNTIMED, Step, is_poisson_sampled
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, FedVeilError
from fedveil.privacy.ledger_account import ROW, AccountEntry, SiteAccount
from fedveil.records import audit_log
from fedveil.sanitize import sanitize

_SAMPLING = {
    "gaussian": "every record in every step",
    "poisson": "each record drawn independently with probability {q:.4g}",
    "fixed": "batches of a fixed size, {q:.4g} of the records",
}
_IN_SUM = "noise in the sum over the sites"
_ROWS_ONLY = (
    "the ledger counts rows: each epsilon is for one row, and gives no bound for a person with several rows. Only "
    "runs with dp.unit-column protect all of a person's rows"
)
NOT_DRAWN = (
    "which runs drew this unit's rows is not recorded, because that is secret. The figures hold for every unit that "
    "was in the data at the time, drawn or not"
)


@dataclass(frozen=True)
class UnitRows:
    """A unit's rows in the current data.

    Attributes:
        data: the folder or file; None if unknown.
        column: the column that was searched; "" if unknown.
        files: the number of the unit's rows in each file.
        problems: files that could not be searched, with the reason.
        withdrawn: time of the unit's withdrawal; "" if it is not withdrawn.
    """

    data: Path | None
    column: str
    files: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    withdrawn: str = ""

    @property
    def count(self) -> int:
        """Return the number of rows found."""
        return sum(self.files.values())

    def to_json(self) -> dict[str, Any]:
        """Return the rows for `--json`."""
        known = self.data is not None and bool(self.column)
        return {
            "data": str(self.data) if self.data else None,
            "column": self.column or None,
            "files": dict(self.files) if known else None,
            "problems": dict(self.problems),
            "withdrawn": self.withdrawn or None,
        }

    def lines(self) -> Iterator[str]:
        """Yield a description of the rows, as lines."""
        if self.data is None or not self.column:
            missing = "--data" if self.data is None else "--unit-column"
            yield f"rows in the data now: unknown, because their location is unknown; set {missing}"
        else:
            found = ", ".join(f"{count} in {sanitize(name, 100)}" for name, count in self.files.items() if count)
            yield f'rows in the data now: {found or "none"} (column "{sanitize(self.column, 80)}" of {self.data})'
        for name, reason in self.problems.items():
            yield f"rows in {sanitize(name, 100)}: unknown: {sanitize(reason)}"
        if self.withdrawn:
            yield f"withdrawn since {self.withdrawn}: no run that read the data later trained on these rows"


@dataclass(frozen=True)
class RunExposure:
    """A run that the site took part in.

    Attributes:
        run: its name.
        sites: names of this state folder's sites that took part.
        methods: its methods; more than one only if the server changed it.
        rounds: the rounds (0-based) whose uploads left the site, each with its number of uploads.
        of: planned rounds; 0 if unknown.
        first, last: times of the first and last upload; "" if unknown.
        claim: the run's own guarantee; "" for none.
        sampling: descriptions of how records were drawn.
        epsilon: epsilon by adversary, at the account's delta; infinite without a bound.
        why: the reason why an epsilon is infinite; "" if none is, or if there are too many charges to account for.
        in_ledger: whether the run is in the privacy ledger.
        state_bytes: size of the private state that the site stores for the run.
    """

    run: str
    sites: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    rounds: Mapping[int, int] = field(default_factory=dict)
    of: int = 0
    first: str = ""
    last: str = ""
    claim: str = ""
    sampling: tuple[str, ...] = ()
    epsilon: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    in_ledger: bool = False
    state_bytes: int = 0

    def lines(self) -> Iterator[str]:
        """Yield a description of the run, as lines."""
        method = " and ".join(self.methods) or "unknown method"
        yield f"run {self.run}: {method}; {self.describe_rounds()}"
        if self.claim:
            yield f"  its own claim: {self.claim}; {'; '.join(self.sampling) or 'no charge yet'}"
        for party, epsilon in self.epsilon.items():
            why = self.why or "it has more charges than the accountant can bound"
            bound = f"no bound: {why}" if math.isinf(epsilon) else f"epsilon {epsilon:.4g} so far"
            yield f"  against {party}: {bound}"
        if not self.in_ledger:
            yield "  no bound is known: this run is not in the privacy ledger"
        if self.state_bytes:
            yield f"  the site stores {self.state_bytes:,} bytes of private state for it (fedveil site purge --run)"

    def describe_rounds(self) -> str:
        """Return the rounds whose uploads left the site, 1-based."""
        if not self.rounds:
            return "no upload in the audit log"
        numbers, spans = sorted(self.rounds), list[list[int]]()
        for number in numbers:
            if spans and number == spans[-1][1] + 1:
                spans[-1][1] = number
            else:
                spans.append([number, number])
        text = ", ".join(f"{a + 1}" if a == b else f"{a + 1} to {b + 1}" for a, b in spans)
        of = f" of {self.of}" if self.of else ""
        return f"rounds {text}{of}, {sum(self.rounds.values())} uploads from {self.first} to {self.last}"


@dataclass(frozen=True)
class UnitExposure:
    """A unit's exposure according to the records.

    Attributes:
        rows: its current rows.
        runs: every run in the records.
        standing: the privacy ledger; None if there is none.
    """

    rows: UnitRows
    runs: tuple[RunExposure, ...]
    standing: LedgerStanding | None

    def lines(self) -> Iterator[str]:
        """Yield the answer as lines."""
        yield from self.rows.lines()
        yield from self.notes()
        for run in self.runs:
            yield from run.lines()
        if not self.runs:
            yield "according to this site's records, no run has trained here"
        for party, words in self.over_all_runs():
            yield f"over all runs, against {party}: {words}"

    def notes(self) -> list[str]:
        """Return the assumptions behind the figures."""
        account = self.standing.account if self.standing else None
        notes = [NOT_DRAWN]
        if account is not None:
            notes.append(
                f"each epsilon is at delta {account.own.delta:g} ({account.own.neighbours.value}), for this site's "
                "data only: another site with rows about the same person has its own ledger"
            )
        if account is not None and account.unit == ROW:
            notes.append(_ROWS_ONLY)
        if self.standing is not None and self.standing.poisson:
            notes.append(UNTIMED)
        return notes

    def over_all_runs(self) -> list[tuple[str, str]]:
        """Return, for each adversary, the guarantee over all runs."""
        if self.standing is None:
            return []
        budget = self.standing.budget
        return [
            (one.party.value, f"{bound_of(one, budget)}. {if_planned(one, budget)}") for one in self.standing.parties
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the answer for `--json`, with an infinite epsilon as the text "infinite"."""
        account = self.standing.account if self.standing else None
        return {
            "rows": self.rows.to_json(),
            "notes": self.notes(),
            "unit": account.unit or None if account else None,
            "delta": account.own.delta if account else None,
            "adjacency": account.own.neighbours.value if account else None,
            "runs": [
                {
                    "run": run.run, "sites": list(run.sites), "methods": list(run.methods),
                    "rounds": [{"round": number + 1, "uploads": count} for number, count in sorted(run.rounds.items())],
                    "planned-rounds": run.of or None,
                    "first-upload": run.first or None, "last-upload": run.last or None,
                    "claim": run.claim or None, "sampling": list(run.sampling),
                    "epsilon": {party: "infinite" if math.isinf(e) else e for party, e in run.epsilon.items()},
                    "why-infinite": run.why or None, "in-ledger": run.in_ledger,
                    "private-state-bytes": run.state_bytes,
                }
                for run in self.runs
            ],
            "over-all-runs": dict(self.over_all_runs()),
        }  # fmt: skip


def collect_exposure(state_dir: Path, site: SiteConfig, unit: str, data: Path | None, column: str) -> UnitExposure:
    """Read a unit's exposure from the records in a state folder.

    Args:
        site: the site config, for its policy and key file.
        data: the data folder or file; None if unknown.
        column: the column with the unit's ID; "" if unknown.

    Raises:
        ConfigError: the ID is blank.
        FedVeilError, OSError: a record cannot be read.
    """
    standing = ledger_standing(state_dir, site.policy, site.key_file) if ledger_files(state_dir) else None
    return UnitExposure(find_unit(state_dir, site, unit, data, column), collect_runs(state_dir, standing), standing)


def collect_runs(state_dir: Path, standing: LedgerStanding | None) -> tuple[RunExposure, ...]:
    """Return the runs in the audit log, in the state folder and, if given, in the ledger. Raises StateError."""
    runs = _from_log(state_dir.expanduser() / audit_log.NAME)
    for entry in standing.account.entries if standing else ():
        runs.setdefault(entry.run, RunExposure(sanitize(entry.run, 100)))
    for kept in list_retained(state_dir):
        run = runs.get(kept.run, RunExposure(sanitize(kept.run, 100)))
        sites = tuple(dict.fromkeys((*run.sites, sanitize(kept.site, 80))))
        runs[kept.run] = replace(run, sites=sites, state_bytes=run.state_bytes + kept.bytes)
    if standing is not None:
        runs = {name: _charged(run, name, standing) for name, run in runs.items()}
    return tuple(runs.values())


def find_unit(state_dir: Path, site: SiteConfig, unit: str, data: Path | None, column: str) -> UnitRows:
    """Return the unit's current rows. Raises ConfigError for a blank ID, or StateError."""
    plain = read_id(unit)
    withdrawn = WithdrawalRecord.open(state_dir, FileSeal.from_key_file(site.key_file)).read().find(plain, "")
    since = withdrawn.since if withdrawn else ""
    if data is None or not column:
        return UnitRows(data, column, withdrawn=since)
    from fedveil.data import units

    files: dict[str, int] = {}
    problems: dict[str, str] = {}
    if not data.exists():
        problems[data.name] = "it does not exist"
    try:
        every = list_row_files(data)
    except FedVeilError as error:
        every, problems[data.name] = [], str(error)
    for file in every:
        name = file.relative_to(data).as_posix() if file != data else file.name
        try:
            files[name] = units.count_rows(file, column, plain)
        except (FedVeilError, OSError) as error:
            problems[name] = str(error)
    if not files and not problems:
        problems[data.name] = "it has no row files"
    return UnitRows(data, column, files, problems, since)


def list_row_files(data: Path) -> list[Path]:
    """Return the row files in a data folder, or the file itself; [] if there are none.

    Raises TaskError if it is unclear which files belong to a split.
    """
    from fedveil.data.row_files import row_suffix
    from fedveil.data.split_files import SPLIT_NAMES, find_split_files

    found = sorted(data.iterdir()) if data.is_dir() else [data]
    files = [file for file in found if file.is_file() and row_suffix(file)]
    shards = [file for split in SPLIT_NAMES for file in find_split_files(data, split)] if data.is_dir() else []
    return list(dict.fromkeys(files + shards))


def read_id(unit: str) -> str:
    """Return the normalized form of an ID, which all its spellings share. Raises ConfigError if it is blank."""
    from fedveil.data import units

    plain = units.plain_id(unit)
    if not plain:
        raise ConfigError("--unit: expected the unit's ID, found a blank one; name it, or use - to read it from stdin")
    return plain


def _from_log(file: Path) -> dict[str, RunExposure]:
    """Return the runs with uploads in the site's audit log. Raises StateError if the log cannot be read."""
    runs: dict[str, RunExposure] = {}
    if file.exists() and (damaged := audit_log.count_damaged(audit_log.list_log_files(file))):
        say(
            f"note: {damaged} lines of {file} and its earlier files are damaged; runs in them may be missing here",
            file=sys.stderr,
        )
    for line in audit_log.read_log(file) if file.exists() else []:
        if line["event"] != "sent" or not isinstance(line.get("run"), str) or type(line.get("round")) is not int:
            continue
        name, number, time = line["run"], line["round"], sanitize(line["time"], 40)
        run = runs.get(name, RunExposure(sanitize(name, 100), first=time))
        runs[name] = replace(
            run,
            sites=_with(run.sites, sanitize(line.get("site", ""), 80)),
            methods=_with(run.methods, sanitize(line.get("method", ""), 80)),
            rounds=Counter(run.rounds) + Counter({number: 1}),
            of=line["rounds"] if type(line.get("rounds")) is int else run.of,
            last=time,
        )
    return runs


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, name)))


def _charged(run: RunExposure, name: str, standing: LedgerStanding) -> RunExposure:
    """Return the run with the figures from its own account entries."""
    entries = tuple(entry for entry in standing.account.entries if entry.run == name)
    if not entries:
        return run
    alone = replace(standing.account, entries=entries)
    return replace(
        run,
        in_ledger=True,
        claim="; ".join(sanitize(entry.claim, 200) for entry in entries if entry.claim),
        sampling=_samplings(entries),
        epsilon={one.party.value: _own_epsilon(alone, one.party) for one in standing.parties},
        why="; ".join(sanitize(entry.why, 200) for entry in entries if entry.why),
    )


def _own_epsilon(account: SiteAccount, party: Any) -> float:
    against = account.standing(party)
    return math.inf if against.because else against.composed


def _samplings(entries: Sequence[AccountEntry]) -> tuple[str, ...]:
    steps = {one.step for entry in entries for one in entry.steps}
    return tuple(sorted({_sampling(step) for step in steps}))


def _sampling(step: Step) -> str:
    rate = step.batch / step.examples if step.examples else 1.0
    if step.kind in _SAMPLING:
        return _SAMPLING[step.kind].format(q=rate)
    drawn = _SAMPLING["poisson" if is_poisson_sampled([step]) else "gaussian"].format(q=rate)
    return f"{_IN_SUM}, {drawn}"
