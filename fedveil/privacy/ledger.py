"""The privacy ledger: the charges of each record of a site, over all runs, on the site's own disk.

    <state-dir>/.ledger/<site>.json     {"checksum": of all that follows, "fedveil-ledger": 3,
                                         "carried": [[step, count], ...],
                                         "spent": [[[[step, count], ...], [record, ...]], ...]}
    <state-dir>/.ledger/<site>.key      the key of the records' names, and its checksum

It keeps mechanisms and counts, not epsilons, so that charges of different runs compose. A record takes
the same 36 bytes however often it is charged. The file is written whole: a charge names every example
that could have been used, so a journal's lines would be as long as the file. A charge is on disk before
the data is used. A client round that dies afterwards stays charged, and its retry is charged again.

| case | what happens |
|---|---|
| a charge that would take a record above a budget, the run's or the site's own | BudgetError; no record is charged |
| a record that other runs have already charged | their charges count |
| two rows with equal content | two records |
| a ledger of 0.1, whose records were named by their content | every record starts with the largest charge that any of
them had for each mechanism ("carried"), because it is not known which row was which |
| ledger or key is damaged, or from a later version | StateError: nothing is charged until the site has restored it |
| a ledger or key without a checksum, as 0.1 wrote it | read, and written with one at the next charge |
| two processes of one site | one waits for the other: the file is locked while it changes |
| the site has a key file | ledger and key are encrypted (fedveil.encrypted_files) |

A record is a row of a data set as the site names it (client_app/state/data_sets.py), under a keyed hash
of that name. The key never leaves the site; without it the ledger does not reveal which files the site
has. Deleting the ledger, or moving a row to another place of its file, resets that record. The ledger
protects a site against its runs, not against itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, final

from fedveil import paths
from fedveil.contract.privacy import (
    OLD_OWN_SHARE,
    OLD_SUMMED,
    OWN_SHARE,
    SUMMED,
    PrivacyBudget,
    Spent,
    Step,
    legacy_step,
    stated_guarantee,
)
from fedveil.encrypted_files import FileSeal
from fedveil.errors import BudgetError, StateError
from fedveil.privacy import accounting
from fedveil.records.atomic_files import (
    checksummed_bytes,
    read_checksummed,
    verify_checksummed,
    write_atomic,
    write_checksummed,
)

Record = tuple[str, str, int]  # data set, file in it, row of the file

_VERSION = 3
_WITHOUT_CHECKSUM = (1, 2)
_BY_CONTENT = 1  # the version whose records were named by their content
_KEY_BYTES = 32
_KINDS = ("gaussian", "poisson", "fixed", SUMMED, OWN_SHARE, OLD_SUMMED, OLD_OWN_SHARE)


@final
class PrivacyLedger:
    """One site's ledger. Every call reads the file, so that processes and runs can share it."""

    def __init__(self, path: Path, seal: FileSeal = FileSeal()) -> None:
        self._path, self._seal = path, seal

    def names(self, records: Iterable[Record]) -> list[str]:
        """Return the names of these records, in their order."""
        key = self._key()
        texts = (json.dumps(record).encode() for record in records)
        return [hashlib.blake2b(text, key=key, digest_size=16).hexdigest() for text in texts]

    def charge(self, records: Sequence[str], charges: Spent, *budgets: PrivacyBudget) -> None:
        """Charge all of the records or none; a record that is named twice is charged twice.

        A budget of infinite epsilon is no limit and is not computed.

        Raises:
            BudgetError: a record would be charged more than one of the budgets.
            StateError: the file cannot be read or written.
        """
        with self._locked():
            spent, carried = self._read()
            new: dict[str, Counter[Step]] = {}
            after: dict[tuple[int, int], tuple[Counter[Step], Counter[Step]]] = {}
            # Records mostly share one history, so it is added to once. `after` keeps the old one, and with it its id.
            for record, times in Counter(records).items():
                before = spent.get(record, carried)
                if (key := (id(before), times)) not in after:
                    more = Counter({step: times * count for step, count in charges.items()})
                    after[key] = (before, Counter(before))
                    after[key][1].update(more)
                new[record] = after[key][1]
            for history in {frozenset(h.items()) for _, h in after.values()}:
                for budget in budgets:
                    self._require(dict(history), charges, budget)
            self._write(spent | new, carried)

    def histories(self) -> list[tuple[Spent, int]]:
        """Return each distinct charge history with the number of records that have it.

        The number is 0 for the history that all other records begin with, where there is one.

        Raises:
            StateError: the file cannot be read.
        """
        spent, carried = self._read()
        history_counts = Counter(frozenset(history.items()) for history in spent.values())
        if carried:
            history_counts.setdefault(frozenset(carried.items()), 0)
        return [(dict(history), count) for history, count in history_counts.items()]

    def epsilon(self, record: str, budget: PrivacyBudget) -> float:
        """Return the epsilon that a record has been charged, at the budget's delta and relation."""
        spent, carried = self._read()
        return accounting.compute_epsilon(spent.get(record, carried), budget.delta, budget.neighbours)

    def _require(self, history: Spent, charges: Spent, budget: PrivacyBudget) -> None:
        if budget.epsilon == math.inf:  # no limit; what was spent is computed when it is asked for
            return
        after = accounting.compute_epsilon(history, budget.delta, budget.neighbours)
        if after <= budget.epsilon:
            return
        before = {step: count - charges.get(step, 0) for step, count in history.items()}
        so_far = (
            accounting.compute_epsilon(before, budget.delta, budget.neighbours) if min(before.values()) >= 0 else after
        )
        raise BudgetError(
            f"epsilon: expected at most {stated_guarantee(budget.epsilon, budget.delta, budget.neighbours)} for every "
            f"record, found {so_far:.4g} spent and {after:.4g} after this round; the run ends here for this site: "
            "agree on a larger epsilon, or on more noise from the start"
        )

    @property
    def roles(self) -> dict[Path, str]:
        """Return the ledger's files with their encryption roles."""
        site = self._path.stem
        return {self._path: f"ledger/{site}", self._path.with_suffix(".key"): f"ledger-key/{site}"}

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[Path, str]]:
        """Lock the ledger; yield its existing files with their roles, which no other process changes meanwhile."""
        with self._locked():
            yield {file: role for file, role in self.roles.items() if file.exists()}

    def _key(self) -> bytes:
        path = self._path.with_suffix(".key")
        with self._locked():
            if not path.exists():
                if self._path.exists():
                    raise StateError(
                        f"{path}: expected the key of {self._path.name}, found none; restore it from a backup"
                    )
                write_atomic(path, self._seal.closed([checksummed_bytes(os.urandom(_KEY_BYTES))], self.roles[path]))
            data = self._seal.read(path, self.roles[path])
            if len(data) == _KEY_BYTES:
                write_atomic(path, self._seal.closed([data := checksummed_bytes(data)], self.roles[path]))
        try:
            return verify_checksummed(data)
        except ValueError as error:
            raise StateError(
                f"{path}: expected the key of the ledger's records, found {len(data)} bytes: {error}; restore it "
                "from a backup: with another key every record would start from zero"
            ) from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        paths.private_folder(self._path.parent)
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> tuple[dict[str, Counter[Step]], Counter[Step]]:
        """Return the charges of every charged record, and the charges that every other record begins with."""
        if not self._path.exists():
            return {}, Counter()
        try:
            data = self._seal.read(self._path, self.roles[self._path])
            version = json.loads(data)["fedveil-ledger"]
            if version not in (*_WITHOUT_CHECKSUM, _VERSION):
                raise ValueError(f"version {version}")
            has_none = version in _WITHOUT_CHECKSUM and b"checksum" not in data
            content = json.loads(data) if has_none else read_checksummed(data)
            groups = [(_history(spent), names) for spent, names in content["spent"]]
            if version == _BY_CONTENT:
                return {}, reduce(or_, (spent for spent, _ in groups), Counter())
            carried = _history(content["carried"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(
                f"{self._path}: expected a privacy ledger of version {_VERSION}, found none that can be read "
                f"({error}); restore it from a backup: without it the privacy spent so far is unknown"
            ) from None
        return {name: spent for spent, names in groups for name in names}, carried

    def _write(self, spent: Mapping[str, Counter[Step]], carried: Counter[Step]) -> None:
        groups: dict[tuple[tuple[Step, int], ...], list[str]] = defaultdict(list)
        for name, history in spent.items():
            groups[tuple(sorted(history.items()))].append(name)
        by_history = [[_listed(history), names] for history, names in groups.items()]
        content = {"fedveil-ledger": _VERSION, "carried": _listed(sorted(carried.items())), "spent": by_history}
        try:
            write_atomic(self._path, self._seal.closed([write_checksummed(content)], self.roles[self._path]))
        except OSError as error:
            raise StateError(f"{self._path}: cannot write the privacy ledger: {error}; free space") from error


def _listed(history: Iterable[tuple[Step, int]]) -> list[Any]:
    return [[step, count] for step, count in history]


def _history(spent: Iterable[Sequence[Any]]) -> Counter[Step]:
    return Counter({_step(step): int(count) for step, count in spent})


def _step(parts: Sequence[Any]) -> Step:
    kind, examples, batch, multiplier, *variation = parts
    if kind not in _KINDS or not float(multiplier) >= 0 or not all(0 <= float(v) <= 1 for v in variation):
        raise ValueError(f"step {parts}")
    step = Step(str(kind), int(examples), int(batch), float(multiplier), *map(float, variation))
    return step if variation else legacy_step(step)  # before version 4, steps had no variation
