"""One account per state folder: reservations, refusals, balances, and detection of a rollback."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import re
import stat
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest

from fedveil.contract.privacy import OLD_SUMMED, OWN_SHARE, SUMMED, Adjacency, PrivacyBudget, Spent, Step
from fedveil.errors import BudgetError, StateError
from fedveil.privacy import accounting
from fedveil.privacy.ledger import PrivacyLedger, WitnessMark
from fedveil.privacy.ledger_account import MAX_RUNS, ROW, UNIT, Party, RunTerms, SiteAccount, _largest
from fedveil.records.atomic_files import write_checksummed

DELTA, REPLACE, ZERO = 1e-5, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT
STEP = Step("gaussian", 0, 0, 10.0)
UNLIMITED = PrivacyBudget(math.inf, DELTA, REPLACE)
EVERYONE = frozenset(Party)


@dataclass
class Witness:
    """A data folder's mark, in memory."""

    mark: WitnessMark | None = None
    marks: list[WitnessMark] = field(default_factory=list)
    place: str = "data/.fedveil-data-set"

    def read(self) -> WitnessMark | None:
        return self.mark

    def read_others(self) -> list[tuple[str, WitnessMark]]:
        return []

    def write(self, mark: WitnessMark) -> None:
        self.mark = mark
        self.marks.append(mark)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def cost(steps: int, delta: float = DELTA, relation: Adjacency = REPLACE) -> float:
    return accounting.compute_epsilon({STEP: steps}, delta, relation)


def limit(steps: int, relation: Adjacency = REPLACE) -> float:
    """An epsilon for that many steps, and not one more."""
    return (cost(steps, relation=relation) + cost(steps + 1, relation=relation)) / 2


def terms(run: str = "r", epsilon: float = math.inf, most: int = 100, trusted: bool = False, **other) -> RunTerms:
    claim = PrivacyBudget(epsilon, DELTA, REPLACE, None, trusted)
    return RunTerms(run, other.pop("claim", claim), other.pop("rounds", most), most, **other)


def account(folder: Path, own: PrivacyBudget = UNLIMITED) -> SiteAccount:
    return PrivacyLedger(folder).read(own).account


def charge(folder: Path, run: RunTerms, own: PrivacyBudget = UNLIMITED, charges: Spent | None = None, **more) -> None:
    PrivacyLedger(folder).charge(run, charges or {STEP: 1}, own, **more)


def test_a_run_is_stopped_before_its_own_claim_is_passed_and_over_restarts(tmp_path):
    run = terms(epsilon=limit(3))
    for _ in range(3):
        charge(tmp_path, run)
    before = (tmp_path / "ledger.json").read_bytes()
    with pytest.raises(BudgetError, match=r"replace-one.* 3 spent and 4 after this round"):
        charge(tmp_path, run)
    assert (tmp_path / "ledger.json").read_bytes() == before
    assert stat.S_IMODE((tmp_path / "ledger.json").stat().st_mode) == 0o600
    standing = account(tmp_path).standing(Party.SERVER)
    assert standing.composed == pytest.approx(cost(3))
    assert account(tmp_path).reserved(Party.SERVER) == pytest.approx(cost(3, DELTA / MAX_RUNS))


def test_a_run_reserves_its_largest_plan_at_a_sixteenth_of_delta_and_runs_add_up(tmp_path):
    """A Gaussian run of 8 at 1e-5 costs 9.00 at delta / 16."""
    z = accounting.noise_multiplier_for(lambda z: {Step("gaussian", 0, 0, z): 1}, 8.0, DELTA, REPLACE)
    one = {Step("gaussian", 0, 0, z): 1}
    assert accounting.compute_epsilon(one, DELTA / MAX_RUNS, REPLACE) == pytest.approx(9.0, abs=0.01)
    with pytest.raises(
        BudgetError, match=r"at most epsilon 8 .*found 0 reserved by 0 .* and 8\.997 .*max-epsilon to 9"
    ):
        charge(tmp_path, terms(epsilon=8.0), PrivacyBudget(8.0, DELTA, REPLACE), one)
    assert not (tmp_path / "ledger.json").exists()
    own = PrivacyBudget(2 * cost(3, DELTA / MAX_RUNS) + 1e-6, DELTA, REPLACE)
    for name in "ab":
        charge(tmp_path, terms(name, limit(3)), own)
    with pytest.raises(BudgetError, match="over all runs together"):
        charge(tmp_path, terms("c", limit(3)), own)
    charge(tmp_path, terms("a", limit(3)), own)  # a run with a reservation may continue


def test_delta_is_divided_among_sixteen_runs_and_the_seventeenth_is_refused(tmp_path):
    own, thin = PrivacyBudget(1e6, DELTA, REPLACE), {Step("gaussian", 0, 0, 1e4): 1}
    for i in range(MAX_RUNS):
        charge(tmp_path, terms(str(i), most=1), own, thin)
    with pytest.raises(BudgetError, match="at most 16 runs"):
        charge(tmp_path, terms("17", most=1), own, thin)
    charge(tmp_path, terms("17", most=1), UNLIMITED, thin)  # nothing is promised over all runs then
    with pytest.raises(BudgetError, match="at most 16 runs"):
        charge(tmp_path, terms("18", most=1), own, thin)
    assert account(tmp_path).hold_to(own).standing(Party.SERVER).reserved == math.inf  # at 17 sixteenths of delta


@pytest.mark.parametrize(
    "later",
    [
        {"charges": {STEP._replace(multiplier=9.9): 1}},
        {"charges": {Step("poisson", 50, 6, 10.0): 1}},
        {"charges": {STEP._replace(variation=1e-9): 1}},
        {"run": terms(epsilon=5.1)},
        {"run": terms(claim=PrivacyBudget(5.0, DELTA, ZERO))},
        {"run": terms(claim=PrivacyBudget(5.0, DELTA, REPLACE, server_trusted=True))},
    ],
)
def test_what_a_run_has_fixed_is_not_changed_by_a_later_round(tmp_path, later):
    run = terms(epsilon=5.0)
    charge(tmp_path, run)
    with pytest.raises(BudgetError, match="expected what its first client round fixed"):
        charge(tmp_path, **{"run": run, **later})
    charge(tmp_path, run, charges={STEP._replace(multiplier=11.0): 1})  # more noise is within the plan


def test_no_refusal_tells_the_server_how_many_examples_a_masked_upload_is_of(tmp_path):
    """The number, what follows from it (an epsilon, a number of steps), or what another run reserved for it."""
    drawn = {Step(SUMMED, 4711, 471, 1.0): 1}
    cheap = accounting.compute_epsilon({Step(SUMMED, 4711, 471, 1.0): 2}, DELTA, REPLACE)
    below, own = terms("a", cheap / 4), PrivacyBudget(2 * cheap, DELTA, REPLACE)
    first = terms("r", cheap * 1.001, 1000)
    charge(tmp_path, first, own, drawn)
    tries = [
        (tmp_path / "new", below, UNLIMITED, drawn, "found more for its first"),
        (tmp_path, terms("next", 9.0), own, {STEP: 1}, "found more in 1 earlier runs and this one"),
        (tmp_path, first, own, {Step(SUMMED, 4710, 471, 1.0): 1}, "a larger share of the examples in a batch"),
        (tmp_path, first, own, {Step(SUMMED, 4711, 471, 0.5): 1}, "with a noise multiplier of 0.5;"),
        (tmp_path, first, own, dict.fromkeys(drawn, 2), "a number of steps is reserved, found more after"),
    ]
    for folder, run, limits, charges, words in tries:
        with pytest.raises(BudgetError, match=words) as refused:
            charge(folder, run, limits, charges)
        told = str(refused.value)
        for run_s_own in (f"epsilon {run.claim.epsilon!r}", f"epsilon {own.epsilon:.4g}", "delta 1e-05", "delta / 16"):
            told = told.replace(run_s_own, "")
        assert not re.search(r"[0-9]{2}", told), told


def test_a_smaller_rate_is_within_the_plan_and_a_larger_one_is_not(tmp_path):
    charge(tmp_path, terms(), charges={Step("poisson", 50, 5, 2.0): 1})
    charge(tmp_path, terms(), charges={Step("poisson", 60, 5, 2.0): 1})
    with pytest.raises(BudgetError, match="fixed"):
        charge(tmp_path, terms(), charges={Step("poisson", 40, 5, 2.0): 1})
    assert account(tmp_path).used == {Step("poisson", 50, 5, 2.0): 2}


def test_an_open_entry_is_for_exactly_its_parties_and_for_ever(tmp_path):
    """Way 2: in DP-FPL's modes "paper" and "code" the server sees the gradient without noise."""
    charge(tmp_path, terms("paper", trusted=True))
    charge(tmp_path, terms("strict", 5.0))
    standings = {party: account(tmp_path).standing(party) for party in Party}
    assert [standings[party].because for party in Party] == ["paper", "paper", ""]
    assert standings[Party.OTHERS].composed == pytest.approx(cost(2))
    assert standings[Party.SERVER].composed == pytest.approx(cost(1))


def test_a_run_without_a_claim_is_open_against_everyone_once(tmp_path):
    """Way 3: such a run leaves a trace."""
    for run in ("plain", "plain", "seeded"):
        PrivacyLedger(tmp_path).note_open(run, "it has no privacy guarantee", UNLIMITED)
    assert [(entry.run, entry.open) for entry in account(tmp_path).entries] == [
        ("plain", EVERYONE), ("seeded", EVERYONE)
    ]  # fmt: skip
    charge(tmp_path, terms("later", 5.0))
    assert [account(tmp_path).standing(party).because for party in Party] == ["plain"] * 3
    with pytest.raises(BudgetError, match="after-open: .* site ledger show names it") as refused:
        charge(tmp_path, terms("next", 5.0), after_open="refuse")
    assert "plain" not in str(refused.value)  # the server of the next run reads this


def test_a_run_without_noise_is_open_and_has_no_claim(tmp_path):
    free = {Step("gaussian", 0, 0, 0.0): 1}
    with pytest.raises(BudgetError, match="noise"):
        charge(tmp_path, terms("r", 9.0), charges=free)
    with pytest.raises(BudgetError, match="noise"):
        charge(tmp_path, terms("r"), PrivacyBudget(9.0, DELTA, REPLACE), free)
    for _ in range(2):
        charge(tmp_path, terms("r"), charges=free)
    assert [entry.open for entry in account(tmp_path).entries] == [EVERYONE]


def test_noise_in_a_sum_is_limited_against_the_server_and_shown_against_all(tmp_path):
    both = {Step(SUMMED, 0, 0, 3.0): 1, Step(OWN_SHARE, 0, 0, 1.0): 1}
    once = accounting.compute_epsilon({Step(SUMMED, 0, 0, 3.0): 1}, DELTA / MAX_RUNS, REPLACE)
    charge(tmp_path, terms(most=1), PrivacyBudget(once * 1.001, DELTA, REPLACE), both)
    standings = {party: account(tmp_path).standing(party) for party in Party}
    assert standings[Party.SERVER].reserved == standings[Party.OTHERS].reserved == pytest.approx(once)
    assert standings[Party.SERVER].composed == standings[Party.OTHERS].composed
    assert standings[Party.ALL].reserved is None
    alone = accounting.compute_epsilon({Step(SUMMED, 0, 0, 1.0): 1}, DELTA, REPLACE)
    assert standings[Party.ALL].composed == pytest.approx(alone)
    assert standings[Party.ALL].composed > standings[Party.SERVER].composed


def test_two_site_names_do_not_put_the_same_data_twice_into_one_sum(tmp_path):
    """Two charges compose to a shift of sqrt(2) under one noise. Two uploads in one sum shift it by 2."""
    both = {Step(SUMMED, 0, 0, 3.0): 1, Step(OWN_SHARE, 0, 0, 1.0): 1}
    twice = accounting.compute_epsilon({Step(SUMMED, 0, 0, 3.0): 2}, DELTA, REPLACE)
    assert twice < accounting.compute_epsilon({Step(SUMMED, 0, 0, 1.5): 1}, DELTA, REPLACE)
    charge(tmp_path, terms("r", site="north"), charges=both)
    before = (tmp_path / "ledger.json").read_bytes()
    with pytest.raises(
        BudgetError, match=r'site "north" already takes part .* and "north-2" uses the same state folder'
    ):
        charge(tmp_path, terms("r", site="north-2"), charges=both)
    assert (tmp_path / "ledger.json").read_bytes() == before
    charge(tmp_path, terms("r", site="north"), charges=both)
    charge(tmp_path, terms("next", site="north-2"), charges=both)  # in another run's sums
    assert account(tmp_path).used[Step(SUMMED, 0, 0, 3.0)] == 3


def test_two_site_names_with_noise_of_their_own_in_one_run_are_both_charged(tmp_path):
    for site in ("north", "north-2"):
        charge(tmp_path, terms("r", site=site, most=2))
    assert account(tmp_path).used == {STEP: 2}
    with pytest.raises(BudgetError, match="after this round"):
        charge(tmp_path, terms("r", site="north", most=2))


def test_a_promise_keeps_its_delta_and_relation_and_a_larger_limit_is_a_new_one(tmp_path):
    own = PrivacyBudget(9.0, DELTA, REPLACE)
    charge(tmp_path, terms(epsilon=5.0, most=1), own)
    for other in (PrivacyBudget(9.0, 1e-4, REPLACE), PrivacyBudget(9.0, DELTA, ZERO)):
        with pytest.raises(BudgetError, match="ledger was made for"):
            charge(tmp_path, terms("b"), other)
    charge(tmp_path, terms("b", 5.0, 1), PrivacyBudget(12.0, DELTA, REPLACE))
    assert account(tmp_path).limits == (9.0, 12.0)


@pytest.mark.parametrize("first, second", [(ROW, UNIT), (UNIT, ROW)])
def test_a_ledger_counts_rows_or_units_and_never_both(tmp_path, first, second):
    witness, refused = (
        Witness(),
        pytest.raises(BudgetError, match="this site's ledger counts runs that protect (one row|a unit .*), but"),
    )
    charge(tmp_path / "a", terms(unit=first), witness=witness)
    with refused:
        charge(tmp_path / "a", terms("other", unit=second))
    charge(tmp_path / "b", terms(unit=second))
    with refused:
        PrivacyLedger(tmp_path / "b").adopt(UNLIMITED, witness, PrivacyLedger(tmp_path / "a"))
    assert len(account(tmp_path / "b").entries) == 1
    PrivacyLedger(tmp_path / "c").adopt(UNLIMITED, witness, PrivacyLedger(tmp_path / "a"))
    with refused:
        charge(tmp_path / "c", terms("other", unit=second))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 10**12])
@pytest.mark.parametrize("edge", [0, 1, 2, 5, 8, 99, 100, 10**6])
def test_the_largest_plan_is_found_in_few_tries(most, edge):
    tried = []
    assert _largest(lambda times: tried.append(times) or times <= edge, most, (5, 6)) == min(most, edge)
    assert len(tried) <= 4 + 2 * (edge + 1).bit_length()


@pytest.mark.parametrize("kind", ["poisson", "fixed", SUMMED])
@pytest.mark.parametrize(("multiplier", "most"), [(0.001, 1), (20.0, 3_000_001)])
def test_no_sampled_plan_is_computed_that_would_take_all_memory(tmp_path, monkeypatch, kind, multiplier, most):
    """The server chooses the noise and the rounds, so no kind of step may be left out."""
    monkeypatch.setattr(accounting, "compute_epsilon", lambda *_: pytest.fail("computed"))
    with pytest.raises(BudgetError, match="over all runs together"):
        charge(tmp_path, terms(most=most), PrivacyBudget(1e6, DELTA, REPLACE), {Step(kind, 50, 25, multiplier): 1})


@pytest.mark.long
def test_a_run_of_absurdly_many_rounds_ends_the_site_s_patience_and_not_its_memory(tmp_path):
    """The server chooses the rounds: a plan that the accountant cannot compute is not reserved."""
    drawn = {Step("poisson", 50, 25, 1.0): 1}
    charge(tmp_path, terms("endless", most=10**12), charges=drawn)
    assert account(tmp_path).reserved(Party.SERVER) == math.inf
    with pytest.raises(BudgetError, match="over all runs together"):
        charge(tmp_path, terms("next", most=1), PrivacyBudget(1e6, DELTA, REPLACE), drawn)
    with pytest.raises(BudgetError, match="for its first client round"):
        charge(tmp_path, terms("r", 0.5, 10**12), charges=drawn)


def test_a_plain_run_is_noted_whatever_the_policy_s_delta_is(tmp_path):
    charge(tmp_path, terms(most=1))
    PrivacyLedger(tmp_path).note_open("plain", "no claim", PrivacyBudget(9.0, 1e-3, ZERO))
    assert [entry.run for entry in account(tmp_path).entries] == ["r", "plain"]
    assert account(tmp_path).limits == (math.inf,)


def test_the_own_relation_and_delta_bound_a_run_too(tmp_path):
    """A claim under zero-out costs more under the site's replace-one, which counts."""
    claim = PrivacyBudget(limit(4, ZERO), DELTA, ZERO)
    charge(tmp_path, terms(claim=claim))
    with pytest.raises(BudgetError, match="after this round"):
        charge(tmp_path, terms(claim=claim))


def old_ledger(version: int, groups: list, carried: list) -> bytes:
    content = {"fedveil-ledger": version, "carried": carried, "spent": groups}
    return write_checksummed(content) if version == 3 else json.dumps(content).encode()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_older_ledgers_are_carried_over_with_the_largest_history_of_each_file(tmp_path, version):
    gaussian, in_sum = ["gaussian", 0, 0, 10.0], ["summed", 0, 0, 3.0]
    north = [[[[gaussian, 2], [in_sum, 1]], ["a"]], [[[gaussian, 5]], ["b"]]]
    (tmp_path / "north.json").write_bytes(old_ledger(version, north, [[gaussian, 1]]))
    (tmp_path / "north.key").write_bytes(bytes(48))
    (tmp_path / "ledger.json").write_bytes(old_ledger(version, [[[[gaussian, 3]], ["c"]]], []))  # a site "ledger"
    spent = {STEP: 8, Step(OLD_SUMMED, 0, 0, 3.0): 1}
    assert account(tmp_path).used == spent
    with pytest.raises(BudgetError, match="this site's ledger counts runs that protect one row, "):
        charge(tmp_path, terms(most=1, unit=UNIT))
    charge(tmp_path, terms(most=1))
    assert account(tmp_path).used == {**spent, STEP: 9}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.json", "ledger.lock"]
    carried = accounting.compute_epsilon(spent, DELTA / MAX_RUNS, REPLACE)
    with pytest.raises(BudgetError, match=f"{carried + cost(1, DELTA / MAX_RUNS):.4g} reserved by 2 earlier runs"):
        charge(tmp_path, terms("b", most=1), PrivacyBudget(carried, DELTA, REPLACE))


@pytest.mark.parametrize("version, times", [(1, 5), (2, 12), (3, 12)])
def test_older_charges_of_two_data_sets_are_those_of_one_example_that_both_may_contain(tmp_path, version, times):
    """A copy of the data had other records. 30 rows had 5 uses and 10 more rows 2, of 20 in each; and 5 came before."""
    drawn, names = ["poisson", 20, 5, 2.0], [f"row-{i}" for i in range(40)]
    before = [[drawn, 1]] if version > 1 else []
    groups = [[[[drawn, 5 + len(before)]], names[:40]], [[[drawn, 2 + len(before)]], names[:10]]]
    (tmp_path / "north.json").write_bytes(old_ledger(version, groups, before))
    assert account(tmp_path).used == {Step("poisson", 20, 5, 2.0): times}


@pytest.mark.parametrize("relation", [REPLACE, ZERO])
@pytest.mark.parametrize("examples, batch", [(0, 0), (50, 5)])
def test_older_noise_in_sums_counts_by_renyi_in_the_coarser_unit_of_its_noise(
    tmp_path, monkeypatch, relation, examples, batch
):
    """Also beside later steps, and where a version-4 step with the same z would count as continuous noise."""
    step = ["summed", examples, batch, 4.0]
    (tmp_path / "north.json").write_bytes(old_ledger(3, [[[[step, 3]], ["a"] * max(examples, 1)]], []))
    own, later = PrivacyBudget(math.inf, DELTA, relation), Step("poisson", 50, 5, 3.0)
    unit = 1.0 if relation is REPLACE and not examples else 1.5
    as_renyi = {Step(SUMMED, examples, batch, 4.0 / unit, 1.0): 3}  # whose distance from continuous noise is not known
    old = account(tmp_path, own).standing(Party.SERVER).composed
    assert old == pytest.approx(accounting.compute_epsilon(as_renyi, DELTA, relation), rel=0.01)
    assert old > accounting.compute_epsilon({Step(SUMMED, examples, batch, 4.0, 0.0): 3}, DELTA, relation)
    charge(tmp_path, terms(claim=replace(own)), own, {later: 1})
    half = accounting.compute_epsilon(as_renyi, DELTA / 2, relation)
    both = half + accounting.compute_epsilon({later: 1}, DELTA / 2, relation)
    assert account(tmp_path, own).standing(Party.SERVER).composed == pytest.approx(both, rel=0.01)


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"fedveil-ledger": 99}', '{"fedveil-ledger": 4}', '{"fedveil-ledger": 2, "spent": []}',
     '{"fedveil-ledger": 1, "spent": [[[[["none",0,0,1],1]],["a"]]]}'],
)  # fmt: skip
def test_a_damaged_ledger_lets_no_run_spend(tmp_path, damage):
    charge(tmp_path, terms())
    (tmp_path / "ledger.json").write_text(damage)
    with pytest.raises(StateError, match="privacy ledger"):
        charge(tmp_path, terms())
    assert (tmp_path / "ledger.json").read_text() == damage


def test_a_ledger_with_a_new_checksum_and_an_older_account_breaks_its_chain(tmp_path):
    charge(tmp_path, terms())
    path = tmp_path / "ledger.json"
    content = json.loads(path.read_text())
    content.pop("checksum")
    content["entries"][0]["steps"][0][-1] = 0
    path.write_bytes(write_checksummed(content))
    with pytest.raises(StateError, match="does not match its chain"):
        charge(tmp_path, terms())


def _spend(folder: Path) -> None:
    for _ in range(10):
        charge(folder, terms())


def test_two_processes_lose_no_charge(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_spend, args=(tmp_path,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert account(tmp_path).used == {STEP: 20}
    assert len(PrivacyLedger(tmp_path).read(UNLIMITED).heads) == 20


# --- witnesses


def test_each_charge_is_on_the_disk_before_its_witness(tmp_path, monkeypatch):
    witness = Witness()
    seen = []
    real = witness.write
    witness.write = lambda mark: (seen.append(len(PrivacyLedger(tmp_path).read(UNLIMITED).heads)), real(mark))  # type: ignore[method-assign]
    for _ in range(3):
        charge(tmp_path, terms(), witness=witness)
    assert seen == [1, 2, 3]
    assert all(after.changes == before.changes + 1 for before, after in pairwise(witness.marks))


def test_a_restored_ledger_is_found_and_recovered_with_the_largest_plans(tmp_path):
    witness, path = Witness(), tmp_path / "ledger.json"
    charge(tmp_path, terms(most=5), witness=witness)
    backup = path.read_bytes()
    charge(tmp_path, terms(most=5), witness=witness)
    path.write_bytes(backup)
    with pytest.raises(
        StateError, match=r"data/\.fedveil-data-set has recorded change 2, .* ledger's 1 changes.*ledger recover"
    ):
        charge(tmp_path, terms(most=5), witness=witness)
    assert PrivacyLedger(tmp_path).recover(UNLIMITED, witness) == "all runs used up"
    assert account(tmp_path).used == {STEP: 5}
    with pytest.raises(BudgetError, match="after this round"):
        charge(tmp_path, terms(most=5), witness=witness)
    charge(tmp_path, terms("next"), witness=witness)


def test_a_restored_ledger_that_lacks_runs_is_open_for_ever(tmp_path):
    witness, path = Witness(), tmp_path / "ledger.json"
    charge(tmp_path, terms(), witness=witness)
    backup = path.read_bytes()
    charge(tmp_path, terms("lost"), witness=witness)
    path.write_bytes(backup)
    assert "open entry" in PrivacyLedger(tmp_path).recover(UNLIMITED, witness)
    assert account(tmp_path).standing(Party.OTHERS).because == "a restored ledger"
    charge(tmp_path, terms("next"), witness=witness)


def test_a_restored_ledger_that_went_on_elsewhere_is_another_history(tmp_path):
    first, second, path = Witness(), Witness(), tmp_path / "ledger.json"
    charge(tmp_path, terms(), witness=second)
    backup = path.read_bytes()
    charge(tmp_path, terms(), witness=first)
    path.write_bytes(backup)
    for run in ("b", "c", "d"):
        charge(tmp_path, terms(run), witness=second)
    with pytest.raises(StateError, match="ledger recover"):
        charge(tmp_path, terms(), witness=first)
    assert "open entry" in PrivacyLedger(tmp_path).recover(UNLIMITED, first)


def test_a_restored_ledger_with_as_many_entries_may_still_lack_a_run(tmp_path):
    """It went on with another run, which only another data folder saw."""
    first, second, path = Witness(), Witness(), tmp_path / "ledger.json"
    charge(tmp_path, terms("a"), witness=second)
    backup = path.read_bytes()
    for _ in range(3):
        charge(tmp_path, terms("lost"), witness=first)
    path.write_bytes(backup)
    charge(tmp_path, terms("c"), witness=second)
    assert "open entry" in PrivacyLedger(tmp_path).recover(UNLIMITED, first)


def test_recovery_without_a_later_witness_trusts_nothing(tmp_path):
    """State and data folder may have been restored together."""
    witness = Witness()
    charge(tmp_path, terms(most=5), witness=witness)
    assert "open entry" in PrivacyLedger(tmp_path).recover(UNLIMITED, witness)
    assert account(tmp_path).used == {STEP: 5}


def test_data_of_another_state_folder_is_refused_until_its_history_is_adopted(tmp_path):
    """Way 1: two state folders on one data folder."""
    witness, ours, theirs = Witness(), tmp_path / "ours", tmp_path / "theirs"
    charge(theirs, terms("a", most=4), witness=witness)
    charge(ours, terms("b", most=4))
    with pytest.raises(StateError, match="found another ledger.*ledger adopt"):
        charge(ours, terms("b", most=4), witness=witness)
    with pytest.raises(StateError, match="this is the same state folder"):
        PrivacyLedger(ours).adopt(UNLIMITED, witness, PrivacyLedger(ours))
    charge(tmp_path / "third", terms("x"))
    with pytest.raises(StateError, match="this is not the ledger that .*; name the state folder"):
        PrivacyLedger(ours).adopt(UNLIMITED, witness, PrivacyLedger(tmp_path / "third"))
    assert PrivacyLedger(ours).adopt(UNLIMITED, witness, PrivacyLedger(theirs)) == 1
    charge(ours, terms("b", most=4), witness=witness)
    assert account(ours).used == {STEP: 6}
    with pytest.raises(StateError, match=r"data/\.fedveil-data-set: .*found another ledger"):
        charge(theirs, terms("a", most=4), witness=witness)
    with pytest.raises(StateError, match="taken over"):
        charge(theirs, terms("a", most=4), witness=Witness())


def test_a_lost_ledger_is_adopted_as_an_open_entry(tmp_path):
    witness = Witness()
    charge(tmp_path / "lost", terms(), witness=witness)
    with pytest.raises(StateError, match="no ledger here"):
        charge(tmp_path / "new", terms(), witness=witness)
    assert PrivacyLedger(tmp_path / "new").adopt(UNLIMITED, witness, None) == 1
    charge(tmp_path / "new", terms(), witness=witness)
    assert account(tmp_path / "new").standing(Party.SERVER).because == "a lost ledger"
    with pytest.raises(StateError, match="nothing to adopt"):
        PrivacyLedger(tmp_path / "new").adopt(UNLIMITED, witness, None)
