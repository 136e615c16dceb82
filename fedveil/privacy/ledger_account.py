"""A site's privacy account: the budget that its runs have reserved and used, per party. This module does no file I/O.

Every charge counts for every record at the site, whether the record was drawn or not, so the account names no record,
data set or site. A run is reserved at its first charge, with the largest plan that its own guarantee permits, and every
later charge must stay within that plan.

| case | decision |
|---|---|
| a new run; the policy sets max-epsilon | its epsilon at delta / 16 is added to those of the earlier runs. The sum must
  be at most max-epsilon, and there may be at most 16 runs; otherwise BudgetError before any example is used |
| a new run; no max-epsilon | reserved; nothing is promised over all runs |
| a later charge with a step that no reserved step dominates, or under a different claim | BudgetError |
| a later charge above the reserved plan | BudgetError |
| noise in the sum, and a second site name in one run | BudgetError: see `_held_to_site` |
| a party sees the run without noise, the run has no guarantee, or its noise is seeded | an open entry: over all runs,
  epsilon against that party stays infinite |
| the policy's delta or adjacency differs from the account's | BudgetError: the sum of epsilons would mean nothing |
| a claim for units (dp.unit-column) after a claim for rows, or the reverse | BudgetError: a charge for a row is no
  bound for a unit with several rows |
| the policy raises max-epsilon | applied from then on, and recorded as a new limit |
| histories from ledgers of versions 1 to 3 | one entry, with all uses by sampled steps; for steps without sampling, the
  sum over the files of the largest count of any record |

max-epsilon limits the first and third party. Noise in a sum protects far less against the server together with all
other sites; that epsilon is computed and printed, but not limited.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from fedveil.contract.privacy import (
    OLD_OWN_SHARE,
    OLD_SUMMED,
    OWN_SHARE,
    SUMMED,
    PrivacyBudget,
    Spent,
    Step,
    stated_guarantee,
)
from fedveil.errors import BudgetError
from fedveil.privacy import accounting

MAX_RUNS = 16  # number of runs among which delta is divided
_RELATIVE = 1e-9  # relative tolerance for comparing floats
_MAX_STEPS, _MAX_LOSS = 3_000_000, 1200.0  # maximum number of sampled steps, and of their mean privacy loss
_ON_A_GRID = ("poisson", "fixed", SUMMED)  # if they are sampled, the accountant composes their privacy losses on a grid
ROW, UNIT = "row", "unit"  # units that a guarantee can protect
_PROTECTED = {ROW: "one row", UNIT: "a unit (dp.unit-column)"}


class Party(StrEnum):
    """An adversary for which the account computes an epsilon."""

    SERVER = "the server with the colluding sites that the run tolerates"
    ALL = "the server with all other sites"
    OTHERS = "the other sites and holders of the model"


LIMITED = (Party.SERVER, Party.OTHERS)  # the parties to which max-epsilon applies


@dataclass(frozen=True)
class RunTerms:
    """The terms that a run fixes before its first charge.

    Attributes:
        run: the run's name, only a label.
        claim: the run's privacy budget.
        rounds: number of rounds in the run.
        most_charges: maximum number of charges that the site accepts.
        unit: the unit that the guarantee protects, ROW or UNIT.
        site: the name under which the site takes part.
    """

    run: str
    claim: PrivacyBudget
    rounds: int
    most_charges: int
    unit: str = ROW
    site: str = ""


@dataclass(frozen=True)
class ReservedStep:
    """A step of a run, with its reserved maximum number of uses and the number of uses so far."""

    step: Step
    most: int
    used: int


@dataclass(frozen=True)
class AccountEntry:
    """One run in the account. Entries are only appended.

    Attributes:
        run: label of the run.
        why: reason for an open entry; "" for none.
        open: parties against which epsilon is infinite.
        claim: the run's own epsilon, delta and adjacency, as text; "" without a guarantee.
        steps: reserved steps.
        reserved: epsilon at delta / 16, computed at reservation; None if no limit applied then.
        site: with noise in the sum, the site name that the run was charged under; otherwise "".
    """

    run: str
    why: str = ""
    open: frozenset[Party] = frozenset()
    claim: str = ""
    steps: tuple[ReservedStep, ...] = ()
    reserved: float | None = None
    site: str = ""

    @property
    def largest(self) -> Spent:
        """Return the reserved plan."""
        return _count((one.step, one.most) for one in self.steps)

    @property
    def used(self) -> Spent:
        """Return the charges so far."""
        return _count((one.step, one.used) for one in self.steps if one.used)

    def use_up(self) -> AccountEntry:
        """Return the entry with its whole plan used, so that the run cannot be charged further."""
        return replace(self, steps=tuple(replace(one, used=one.most) for one in self.steps))


@dataclass(frozen=True)
class PartyStanding:
    """The account's epsilons against one party.

    Attributes:
        party: the adversary.
        because: the first run that makes epsilon infinite over all runs; "" for none.
        reserved: sum of the reserved epsilons; infinite above 16 runs, whose deltas add up to more than the account's;
            None if no limit applies.
        composed: epsilon of all charges so far, as if all runs had been planned together.
    """

    party: Party
    because: str
    reserved: float | None
    composed: float


@dataclass(frozen=True)
class SiteAccount:
    """All entries of a site, with the limit, delta and adjacency that apply to them.

    Attributes:
        own: delta and adjacency of the account, with the policy's current max-epsilon as epsilon.
        limits: each max-epsilon that the account has had, in order; infinite for none.
        unit: the unit of the first guarantee, ROW or UNIT; "" before that.
        entries: the runs.
    """

    own: PrivacyBudget
    limits: tuple[float, ...] = ()
    unit: str = ""
    entries: tuple[AccountEntry, ...] = ()

    def charge(self, terms: RunTerms, charges: Spent, after_open: str = "say") -> SiteAccount:
        """Return the account after one charge of a run. Raises BudgetError.

        Args:
            after_open: "refuse" if no run with a guarantee may follow an open entry.
        """
        account = self.count_unit(terms.unit)
        claim = _claim_text(terms.claim)
        for index, entry in enumerate(self.entries):
            if entry.run == terms.run and entry.claim:
                if entry.claim != claim:
                    raise BudgetError(_fixed(terms.run, entry.claim, claim))
                charged = _use(_held_to_site(entry, terms.site, charges), charges)
                entries = (*self.entries[:index], charged, *self.entries[index + 1 :])
                return replace(self, entries=entries)
        if after_open == "refuse" and any(entry.open for entry in self.entries):
            raise BudgetError(  # the server reads this message, and the open run may belong to another server
                'after-open: this site permits no private run after an open one ("refuse"), found one; at the site, '
                "fedveil site ledger show names it, and the site may set after-open to say"
            )
        entry = self._reserve(terms, charges, claim)
        return account.append(_held_to_site(entry, terms.site, charges))

    def note_open(self, run: str, why: str) -> SiteAccount:
        """Return the account with an open entry for this run against all parties."""
        if any(entry.run == run and entry.open >= set(Party) for entry in self.entries):
            return self
        return self.append(AccountEntry(run, why, frozenset(Party)))

    def count_unit(self, unit: str) -> SiteAccount:
        """Return the account with this unit; "" means none. Raises BudgetError if the account counts another unit."""
        if unit and self.unit not in ("", unit):
            raise BudgetError(
                f"dp.unit-column: this site's ledger counts runs that protect {_PROTECTED[self.unit]}, but this "
                f"run protects {_PROTECTED[unit]}, so its epsilon would not add up with the earlier ones; agree on "
                "it with the site"
            )
        return replace(self, unit=self.unit or unit)

    def append(self, *entries: AccountEntry) -> SiteAccount:
        """Return the account with more entries."""
        return replace(self, entries=(*self.entries, *entries))

    def use_up(self) -> SiteAccount:
        """Return the account in which every run counts as having used its whole plan."""
        return replace(self, entries=tuple(entry.use_up() for entry in self.entries))

    def hold_to(self, own: PrivacyBudget) -> SiteAccount:
        """Return the account under the site's current policy. Raises BudgetError if delta or adjacency differs."""
        for name, kept, now in (
            ("delta", self.own.delta, own.delta),
            ("adjacency", self.own.neighbours.value, own.neighbours.value),
        ):
            if kept != now:
                raise BudgetError(
                    f"{name}: this site's ledger was made for {kept} in its policy, which is now {now}; epsilons "
                    "of two kinds do not add up, so the site must restore the earlier value"
                )
        limits = self.limits if self.limits[-1:] == (own.epsilon,) else (*self.limits, own.epsilon)
        return replace(self, own=own, limits=limits)

    @property
    def delta_of_run(self) -> float:
        """Return the delta at which a run's epsilon is reserved."""
        return self.own.delta / MAX_RUNS

    def reserved_epsilon(self, entry: AccountEntry) -> float:
        """Return the epsilon that an entry reserves against the limited parties for which it is not open."""
        if entry.reserved is not None:
            return entry.reserved
        return self._epsilon(entry.largest, self.delta_of_run)

    @property
    def runs(self) -> int:
        """Return the number of entries among which delta is divided."""
        return sum(bool(entry.steps) for entry in self.entries)

    def standing(self, party: Party) -> PartyStanding:
        """Return the account against one party."""
        because = next((entry.run for entry in self.entries if party in entry.open), "")
        closed = [entry for entry in self.entries if entry.steps and party not in entry.open]
        used: Counter[Step] = Counter()
        for entry in closed:
            used.update(_against(party, entry.used))
        composed = accounting.round_epsilon(used, self.own.delta, self.own.neighbours) if _is_small(used) else math.inf
        is_limited = party in LIMITED and self.own.epsilon < math.inf
        reserved = (self.reserved(party) if self.runs <= MAX_RUNS else math.inf) if is_limited else None
        return PartyStanding(party, because, reserved, composed)

    def reserved(self, party: Party) -> float:
        """Return the sum of the reserved epsilons over the runs that are not open against a party."""
        entries = [entry for entry in self.entries if entry.steps and party not in entry.open]
        if party in LIMITED:
            return sum(self.reserved_epsilon(entry) for entry in entries)
        plans = (_against(party, entry.largest) for entry in entries)
        return sum(self._epsilon(plan, self.delta_of_run) for plan in plans)

    def _epsilon(self, charges: Spent, delta: float) -> float:
        return accounting.compute_epsilon(charges, delta, self.own.neighbours) if _is_small(charges) else math.inf

    @cached_property
    def used(self) -> Spent:
        """Return all charges so far, for both kinds of noise in a sum."""
        return _count(pair for entry in self.entries for pair in entry.used.items())

    def _reserve(self, terms: RunTerms, charges: Spent, claim: str) -> AccountEntry:
        if any(step.multiplier == 0 for step in charges):
            if terms.claim.epsilon < math.inf or self.own.epsilon < math.inf:
                raise BudgetError(f"noise: {terms.run} has an epsilon but no noise; set the noise above 0")
            return AccountEntry(terms.run, "it adds no noise", frozenset(Party), claim)
        times = _largest_plan(terms, charges, self.own)
        if times == 0:
            once = accounting.compute_epsilon(charges, terms.claim.delta, terms.claim.neighbours)
            found = "more" if _hides_examples(charges) else f"{once:.4g}"
            raise BudgetError(
                f"epsilon: expected at most {claim} for this run, found {found} for its first client round; "
                "agree on a larger epsilon, or on more noise from the start"
            )
        steps = tuple(ReservedStep(step, times * count, count) for step, count in sorted(charges.items()))
        unnoised = frozenset({Party.SERVER, Party.ALL}) if terms.claim.server_trusted else frozenset[Party]()
        why = "the server sees its values before the noise" if unnoised else ""
        entry = AccountEntry(terms.run, why, unnoised, claim, steps)
        return entry if self.own.epsilon == math.inf else self._hold(entry)

    def _hold(self, entry: AccountEntry) -> AccountEntry:
        """Return the entry with its reserved epsilon. Raises BudgetError if a limit would be exceeded."""
        if self.runs >= MAX_RUNS:
            raise BudgetError(
                f"runs: this site takes part in at most {MAX_RUNS} runs with a claim, because its delta is divided "
                f"among them, and has {self.runs} earlier ones; it joins no further private run under max-epsilon. "
                "Only a policy without max-epsilon, which promises nothing over all runs, has no such limit"
            )
        entry = replace(entry, reserved=self.reserved_epsilon(entry))
        reserved = max(self.reserved(party) for party in LIMITED if party not in entry.open)
        needed = self.reserved_epsilon(entry) + reserved
        if needed > self.own.epsilon * (1 + _RELATIVE):
            limit = stated_guarantee(self.own.epsilon, self.own.delta, self.own.neighbours)
            found, more = f"more in {self.runs} earlier runs and this one", ""
            if not any(_hides_examples(one.largest) for one in (*self.entries, entry)):
                found = f"{reserved:.4g} reserved by {self.runs} earlier runs and {entry.reserved:.4g} for this one"
                if needed < math.inf:
                    more = f", or the site sets max-epsilon to {math.ceil(needed * 100) / 100:g}"
            raise BudgetError(
                f"max-epsilon: this site permits at most {limit} over all runs together, found {found} (at delta / "
                f"{MAX_RUNS}); agree on a smaller epsilon or fewer rounds{more}"
            )
        return entry


@dataclass(frozen=True)
class OldLedger:
    """The content of one ledger from versions 1 to 3, which kept a history of each record.

    Attributes:
        histories: each distinct history, with the number of records that have it.
        inherited: the charges that every record began with, from a ledger of version 1.
        names_rows: True from version 2 on, where records are rows; in version 1 they are contents.
    """

    histories: tuple[tuple[Spent, int], ...]
    inherited: Spent
    names_rows: bool

    def compose(self) -> Counter[Step]:
        """Return the maximum number of times that each step was taken on any example.

        A sampled step is charged to all n rows of its data set, so the number of uses is the total charges of all
        records, divided by n. Each use counts for every example, because examples in a copy of the data were recorded
        as new ones.
        Steps without sampling do not state n, so the largest count of any record is used.
        """
        inherited = _count(self.inherited.items())
        total, charged = Counter(inherited), Counter[Step]()
        for history, records in self.histories:
            total |= _count(history.items())
            charged.update({step: records * (count - inherited[step]) for step, count in history.items()})
        for step, charges in charged.items():
            if step.examples and self.names_rows:
                total[step] = max(total[step], inherited[step] + math.ceil(charges / step.examples))
        return total


def carry_over(ledgers: Iterable[OldLedger]) -> AccountEntry:
    """Return one entry for older ledgers, adding up their uses."""
    total = _count(pair for ledger in ledgers for pair in ledger.compose().items())
    steps = tuple(ReservedStep(step, count, count) for step, count in sorted(total.items()))
    return AccountEntry("all runs before ledger version 4", steps=steps)


def _largest_plan(terms: RunTerms, charges: Spent, own: PrivacyBudget) -> int:
    """Return how often the run may make these charges under its guarantee and the site's delta and adjacency."""
    claim = terms.claim

    def fits(times: int) -> bool:
        plan = {step: times * count for step, count in charges.items()}
        kinds = {(claim.delta, claim.neighbours), (own.delta, own.neighbours)}
        return _is_small(plan) and all(accounting.compute_epsilon(plan, *kind) <= claim.epsilon for kind in kinds)

    if claim.epsilon == math.inf:
        return terms.most_charges
    return _largest(fits, terms.most_charges, (terms.rounds, terms.rounds + 1))


def _is_small(charges: Spent) -> bool:
    """Return whether the accountant can handle these charges within seconds and without exhausting memory.

    The server chooses the number of rounds. Larger plans count as infinite, which is an upper bound.
    """
    is_closed = not any(step.kind in _ON_A_GRID and step.examples for step in charges)
    return is_closed or (sum(charges.values()) <= _MAX_STEPS and accounting.mean_loss(charges) <= _MAX_LOSS)


def _largest(fits: Callable[[int], bool], most: int, likely: Iterable[int]) -> int:
    """Return the largest number up to `most` that fits, testing likely numbers first; 0 if none fits."""
    if fits(most):
        return most
    low, high = 0, most
    for probe in likely:
        if low < probe < high:
            low, high = (probe, high) if fits(probe) else (low, probe)
    probe = max(1, 2 * low)  # search upward, because the server chooses `most`, and large plans take long
    while probe < high and fits(probe):
        low, probe = probe, 2 * probe
    high = min(high, probe)
    while high - low > 1:
        probe = (low + high) // 2
        low, high = (probe, high) if fits(probe) else (low, probe)
    return low


def _held_to_site(entry: AccountEntry, site: str, charges: Spent) -> AccountEntry:
    """Return the entry with its site, if the noise is in the sum. Raises BudgetError for a second site in the run.

    Two uploads of a record in the same sum move the sum twice as far as one upload, under the same noise. But two
    charges account only for a factor of sqrt(2).
    """
    if not any(step.kind == SUMMED for step in charges):
        return entry
    if entry.site not in ("", site):
        raise BudgetError(
            f'run {entry.run}: site "{entry.site}" already takes part with noise in the sum, and "{site}" uses the '
            "same state folder; a sum with two uploads of the same data protects that data less than the two "
            "charges say. Take part under one name, or give each site its own state folder and data"
        )
    return replace(entry, site=site)


def _use(entry: AccountEntry, charges: Spent) -> AccountEntry:
    steps = list(entry.steps)
    for step, count in charges.items():
        index = next((i for i, one in enumerate(steps) if _dominates(one.step, step)), None)
        if index is None and not entry.steps:
            return entry
        if index is None:
            reserved = ", ".join(_describe_step(one.step) for one in entry.steps)
            raise BudgetError(_fixed(entry.run, reserved, _describe_step(step, entry.steps)))
        one = steps[index]
        if one.used + count > one.most:
            reserved, found = f"{one.most} steps are reserved", f"{one.used} spent and {one.used + count}"
            if _hides_examples(charges):
                reserved, found = "a number of steps is reserved", "more"
            raise BudgetError(
                f"epsilon: expected at most {entry.claim} for this run, for which {reserved}, found {found} after this "
                "round; the run ends here for this site: agree on a larger epsilon, or on more noise from the start"
            )
        steps[index] = replace(one, used=one.used + count)
    return replace(entry, steps=tuple(steps))


def _dominates(reserved: Step, step: Step) -> bool:
    """Return whether a step costs at most as much as the reserved step; less noise or a larger rate costs more."""
    if reserved.kind != step.kind or bool(reserved.examples) != bool(step.examples):
        return False
    return (
        step.multiplier >= reserved.multiplier
        and step.variation <= reserved.variation
        and step.batch * reserved.examples <= reserved.batch * step.examples
    )


def _hides_examples(charges: Spent) -> bool:
    """Return whether the server must not learn the number of examples, such as from an epsilon or a number of steps.

    The server reads these errors. Unlike other uploads, a masked upload does not reveal its number of examples.
    """
    return any(step.kind in (SUMMED, OLD_SUMMED) and step.examples for step in charges)


def _describe_step(step: Step, reserved: Iterable[ReservedStep] = ()) -> str:
    """Describe a step in words, without the number of examples; none of the `reserved` steps dominates it."""
    drawn = "sampled" if step.examples else "not sampled"
    words = f'"{step.kind}" steps, {drawn}, with a noise multiplier of {step.multiplier:g}'
    alike = (one.step for one in reserved if one.step.kind == step.kind)
    if any(bool(one.examples) == bool(step.examples) and one.multiplier <= step.multiplier for one in alike):
        words += " and a larger share of the examples in a batch, or coarser sums"
    return words


def _fixed(run: str, reserved: str, found: str) -> str:
    return (
        f"run {run}: expected what its first client round fixed, {reserved}, found {found}; a run does not change its "
        "claim, noise or sampling: start another run"
    )


def _against(party: Party, charges: Spent) -> Spent:
    if party is Party.ALL:
        return accounting.epsilon_against_all(charges)
    return {step: count for step, count in charges.items() if step.kind not in (OWN_SHARE, OLD_OWN_SHARE)}


def _count(pairs: Iterable[tuple[Step, int]]) -> Counter[Step]:
    total: Counter[Step] = Counter()
    for step, count in pairs:
        total[step] += count
    return total


def _claim_text(claim: PrivacyBudget) -> str:
    trusted = ", the server sees more" if claim.server_trusted else ""
    return f"epsilon {claim.epsilon!r} at delta {claim.delta!r} ({claim.neighbours.value}){trusted}"
