"""A server that lies, with real sites: what it learns of the honest ones, with every rule and without each.

The claim, for plans with q signatures that withstand c colluding sites: of one plan no combination of vectors of fewer
than max(q, least) - c honest sites, and of all plans of a round none of fewer than q - c. The searches are exhaustive
up to renaming the sites for small cohorts, else random with fixed seeds.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fedveil.errors import PolicyError
from fedveil.federation.secagg import derivations, graph_connectivity, plan_checks
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.site import SecAggSite
from tests.fedveil.federation.secagg.liar import (
    POISON,
    TRUE,
    Game,
    List,
    Requests,
    lists_of,
    names,
    requests_modulo_symmetry,
    verify_once,
    with_fields,
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Without the sites' log: thousands of refusals; and each signature is verified once."""
    logging.disable(logging.WARNING)
    verify_once(monkeypatch)
    yield
    logging.disable(logging.NOTSET)


def least_quorum(sites: int, colluding: int) -> int:
    """Return the smallest q that withstands so many colluding sites."""
    return (sites + colluding) // 2 + 1


def claimed(plan: AttemptPlan, colluding: int) -> int:
    return plan.least_in_sum - colluding


def violation(game: Game, colluding: int) -> int:
    """Return the number of honest vectors in a combination that is lighter than the claim; 0 if there is none."""
    for plan in game.plans:
        if 0 < (found := game.fewest(plan)) < claimed(plan, colluding):
            return found
    found = game.fewest()
    return found if 0 < found < min(plan.quorum - colluding for plan in game.plans) else 0


# Exhaustive


def play_all(honest: int, colluders: int, attempts: list[dict]) -> Counter[int]:
    """Play every game with these attempts at one round. Return how often the fewest honest vectors were how many.

    Each site signs and opens any list of each attempt, or none, and masks for an attempt or not; then it is asked
    everything else as well.
    """
    sites = names(honest + colluders)
    game = Game(sites[colluders:], sites[:colluders])
    found: Counter[int] = Counter()
    plans: list[AttemptPlan] = []
    for attempt, numbers in enumerate(attempts):
        plans.append(game.plan(attempt=attempt, **numbers))
        game.begin(plans[-1])
    lists = [lists_of(plan, game.honest, plan.least_in_sum) for plan in plans]
    by_plan = {plan.digest: of_plan for plan, of_plan in zip(plans, lists, strict=True)}
    for requests in requests_modulo_symmetry(lists, game.honest):
        game.start_over()
        for plan, chosen in zip(plans, requests, strict=True):
            game.begin(plan, game.honest if plan is plans[0] else [site for site in chosen if chosen[site]])
            game.request(plan, chosen)
        game.ask_everything(by_plan)
        assert not violation(game, colluders), (requests, violation(game, colluders))
        found[game.fewest()] += 1
    print(f"exhaustive: {honest} honest, {colluders} colluding, {attempts}: {found.total()} games")
    print(f"fewest {dict(found)}, requests to real sites {dict(game.asked)}")
    return found


def numbers(sites: int, colluding: int, quorum: int | None = None, **others) -> dict:
    quorum = quorum or least_quorum(sites, colluding)
    return {"colluding": colluding, "quorum": quorum, "threshold": quorum, "least": min(3, sites)} | others


SMALL = [(m, c) for m in (3, 4, 5) for c in range(3) if max(least_quorum(m, c), 3) - c >= 2]


@pytest.mark.parametrize(("sites", "colluding"), [(m, c) for m, c in SMALL if m - c < 5])
def test_one_plan_opens_exactly_the_claim(sites, colluding):
    plan = numbers(sites, colluding)
    found = play_all(sites - colluding, colluding, [plan])
    assert min(found.keys() - {0}) == max(plan["quorum"], plan["least"]) - colluding


@pytest.mark.long
def test_one_plan_of_five_honest_sites():
    for quorum in (3, 4):
        found = play_all(5, 0, [numbers(5, 0, quorum)])
        assert min(found.keys() - {0}) == max(quorum, 3)


@pytest.mark.long
@pytest.mark.parametrize("second", [4, 3])
def test_two_attempts_of_a_round(second):
    found = play_all(3, 1, [numbers(4, 1), numbers(second, 1, cohort=names(second))])
    assert min(found.keys() - {0}) == 2


# Random


@dataclass
class Scenario:
    """Random games of one kind.

    Attributes:
        colluding: c, of the plans.
        attempts: the plans' rounds, attempts, and numbers other than those of `numbers`.
        cohorts: smallest number of sites of a cohort; 0 = all sites in every one.
        extra_colluders: colluding sites beyond c.
        set_back: sites whose state the adversary sets back; they count to c.
        unlisted: colluders that are in no roster.
        is_poisoned: all honest sites but one get another message under a plan that is the same otherwise.
        is_split: lists are as small as possible, and each site chooses its own.
        absent, follows: shares of the sites that are asked nothing, and of those that are asked for the same list.
        is_cut: the sites of two windows of the circle are silent, and all others sign that list.
    """

    sites: int
    colluding: int
    attempts: tuple[dict, ...] = ({},)
    cohorts: int = 0
    extra_colluders: int = 0
    set_back: int = 0
    unlisted: bool = False
    is_poisoned: bool = False
    is_split: bool = False
    is_cut: bool = False
    absent: float = 0.15
    follows: float = 0.6
    demands: dict = field(default_factory=dict)

    def game(self) -> Game:
        sites = names(self.sites)
        count = self.colluding - self.set_back + self.extra_colluders
        colluders = sites[: max(count, 0)]
        kwargs = {"unlisted": colluders} if self.unlisted else {}
        game = Game(sites[len(colluders) :], colluders, **kwargs)
        if self.demands:
            for name, site in game.sites.items():
                game.sites[name] = replace(site, demands=replace(site.demands, **self.demands))
        game.set_back = set(game.honest[: self.set_back])
        return game


def random_lists(rng: random.Random, scenario: Scenario, plan: AttemptPlan, game: Game) -> list[List]:
    """Return up to four lists, and the cohort; colluders are in most of them."""
    honest = [site for site in plan.cohort if site in game.honest]
    if scenario.is_split:
        chosen = itertools.combinations(honest, max(plan.quorum - len(game.colluders), 1))
        return [tuple(sorted([*game.colluders, *sites])) for sites in chosen]
    if scenario.is_cut:
        first, gap = rng.randrange(len(plan.circle)), rng.randint(3, 5)
        turned = plan.circle[first:] + plan.circle[:first]
        half = plan.neighbours // 2
        silent = {*turned[:half], *turned[half + gap : 2 * half + gap]} - set(game.colluders)
        return [tuple(site for site in plan.cohort if site not in silent)]
    lists = [tuple(plan.cohort)]
    for _ in range(rng.randint(1, 3)):
        silent = rng.sample(plan.cohort, rng.randint(0, max(len(plan.cohort) - plan.quorum, 0)))
        keep = set(game.colluders) if rng.random() < 0.9 else set()
        lists.append(tuple(site for site in plan.cohort if site not in silent or site in keep))
    return list(dict.fromkeys(lists))


def random_requests(rng: random.Random, scenario: Scenario, lists: list[List], game: Game) -> Requests:
    favorite, order = rng.choice(lists), list(game.honest)
    rng.shuffle(order)
    requests: dict[str, List | None] = {}
    for site in order:
        mine = [in_sum for in_sum in lists if site in in_sum]
        if not mine or (rng.random() < scenario.absent and not (scenario.is_split or scenario.is_cut)):
            requests[site] = None
        else:
            follows = favorite in mine and not scenario.is_split and rng.random() < scenario.follows
            requests[site] = favorite if follows else rng.choice(mine)
    return requests


def random_plan(rng: random.Random, scenario: Scenario, game: Game, attempt: dict) -> AttemptPlan:
    cohort, changes = game.names, {k: v for k, v in attempt.items() if k not in ("round_", "attempt")}
    if scenario.cohorts and game.plans:
        chosen = rng.sample(game.honest, rng.randint(scenario.cohorts - len(game.colluders), len(game.honest)))
        cohort = sorted([*chosen, *game.colluders])
    quorum = changes.get("quorum", least_quorum(len(cohort), scenario.colluding))
    fields = numbers(len(cohort), scenario.colluding, quorum) | {"least": min(3, quorum)} | changes
    return game.plan(attempt.get("round_", 0), attempt.get("attempt", 0), cohort, **fields)


def play_random(scenario: Scenario, game: Game, rng: random.Random) -> None:
    """Play one game: plans, lists and orders are random; at the end each site is asked everything that is left."""
    game.start_over()
    by_plan: dict[str, list[List]] = {}
    for attempt in scenario.attempts:
        plan = random_plan(rng, scenario, game, attempt)
        shown = [(plan, [s for s in game.honest if rng.random() > scenario.absent / (1 if game.plans else 3)])]
        if scenario.is_poisoned:
            target = rng.choice(game.honest)
            poisoned = game.plan(**(attempt | {"broadcast": POISON}), **numbers(len(game.names), scenario.colluding))
            shown = [(plan, [target]), (poisoned, [site for site in game.honest if site != target])]
        lists = random_lists(rng, scenario, plan, game)
        for variant, maskers in shown:
            by_plan[variant.digest] = lists
            game.begin(variant, maskers)
        requests = random_requests(rng, scenario, lists, game)
        for variant, maskers in shown:
            game.request(variant, {site: in_sum for site, in_sum in requests.items() if site in maskers})
        if rng.random() < 0.05:
            game.restart(rng.choice(game.honest))
    game.ask_everything(by_plan)


def search(scenario: Scenario, most: int, seed: int = 1, worlds: int = 1) -> tuple[int, int, Counter[int]]:
    """Play until something lighter than the claim is found. Return the games, what was found, and all fewest."""
    rng, played, seen = random.Random(seed), 0, Counter()
    for _ in range(worlds):
        game = scenario.game()
        for _ in range(most // worlds):
            play_random(scenario, game, rng)
            played += 1
            seen[game.fewest()] += 1
            if found := violation(game, scenario.colluding):
                return played, found, seen
    return played, 0, seen


# Without a rule


def forget_list(self, state, plan, live) -> None:
    self.store.save(state.model_copy(update={"fence": state.fence.model_copy(update={"signed": plan.round})}))


def save_after_answer(self, state, plan, live) -> None:
    """The machine dies after the answer and before the write."""


def any_plan(self, state, plan):
    if state.live is None:
        raise PolicyError("a plan")
    keys = dict.fromkeys(plan.cohort, "0" * 64)  # of rows that it does not hold; none opens
    return state.live.model_copy(update={"rows": keys | state.live.rows})


def no_check(*args) -> None: ...


def listed_in_any_number(plan, in_sum, site, demands) -> None:
    if not set(in_sum) <= plan.by_name.keys() or site not in in_sum:
        raise PolicyError("a list of sites of the plan")


def later_attempt_alone(plan, state) -> None:
    if state.fence.masked is not None and (plan.round, plan.attempt) <= state.fence.masked:
        raise PolicyError("a later attempt")


def connected_alone(plan, sites) -> None:
    if not graph_connectivity.is_connected(plan, sites, plan.colluding):
        raise PolicyError("connected")


def digest_without_broadcast(plan: AttemptPlan) -> str:
    return hashlib.sha256(plan.model_copy(update={"broadcast": TRUE}).to_bytes()).hexdigest()


def short_way_for_any_threshold(plan, in_sum, listed, agreed) -> None:
    if len(in_sum) < len(plan.members):
        REQUIRE_CERTIFICATE(plan, in_sum, listed, agreed)


REQUIRE_CERTIFICATE = plan_checks.require_certificate


@dataclass(frozen=True)
class Removal:
    """A rule that is taken out, where, and games in which something lighter than the claim is then found."""

    patches: tuple[tuple[object, str, object], ...]
    scenario: Scenario


AGAIN = ({}, {"attempt": 1})
RING = {"neighbours": 4, "threshold": 2, "quorum": 7}
REMOVALS = {
    "one list a plan": Removal(((SecAggSite, "_save_agreed", forget_list),), Scenario(4, 1)),
    "write before answer": Removal(((SecAggSite, "_save_agreed", save_after_answer),), Scenario(4, 1)),
    "certificate": Removal(((plan_checks, "require_certificate", no_check),), Scenario(6, 1, is_split=True)),
    "certificate with neighbors": Removal(
        ((plan_checks, "require_certificate", no_check),), Scenario(12, 1, (RING,)),
    ),
    "quorum lower": Removal(
        ((plan_checks, "require_numbers", no_check),), Scenario(5, 1, ({"quorum": 3, "threshold": 3},)),
    ),
    "lists of any size": Removal(
        ((plan_checks, "require_listed", listed_in_any_number),), Scenario(6, 1, ({"least": 5},)),
    ),
    "broadcast not in p": Removal(
        ((AttemptPlan, "digest", property(digest_without_broadcast)),),
        Scenario(4, 1, is_poisoned=True),
    ),
    "once a round": Removal(
        ((plan_checks, "require_later", later_attempt_alone),), Scenario(5, 1, AGAIN, cohorts=4),
    ),
    "t <= c": Removal(
        ((plan_checks, "require_connected", connected_alone),),
        Scenario(7, 1, ({"neighbours": 4, "threshold": 1},), demands={"min_threshold": 1}),
    ),
    "connectivity": Removal(
        ((graph_connectivity, "is_connected", lambda plan, sites, colluding: True),),
        Scenario(12, 1, (RING,), is_cut=True),
    ),
    "roster": Removal(
        ((plan_checks, "require_roster", no_check),), Scenario(4, 1, extra_colluders=2, unlisted=True),
    ),
    "short way with t < q": Removal(
        (
            (plan_checks, "require_graph", no_check),
            (plan_checks, "require_certificate", short_way_for_any_threshold),
        ),
        Scenario(4, 1, ({"quorum": 3, "threshold": 2},)),
    ),
}  # fmt: skip

SLOWER = {"certificate", "certificate with neighbors", "connectivity"}
PARAMETERS = [pytest.param(name, marks=pytest.mark.long if name in SLOWER else ()) for name in REMOVALS]


@pytest.mark.parametrize("name", PARAMETERS)
def test_finds_an_attack_without_the_rule(name, monkeypatch):
    removal = REMOVALS[name]
    for target, attribute, value in removal.patches:
        monkeypatch.setattr(target, attribute, value)
    played, found, seen = search(removal.scenario, 600)
    print(f"without {name}: {found} honest vectors after {played} games, fewest {dict(seen)}")
    assert found


@pytest.mark.parametrize("name", PARAMETERS)
def test_finds_nothing_in_the_same_games_with_the_rule(name):
    games = 40 if name in SLOWER else 12
    played, found, seen = search(REMOVALS[name].scenario, games)
    print(f"with {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (games, 0)


# A second rule refuses what these would let through.
NOT_NEEDED = {
    "only plans that it masked for": Removal(
        ((SecAggSite, "_live", any_plan),), Scenario(5, 1, AGAIN, cohorts=4),
    ),
    "only lists that it is in": Removal(
        ((plan_checks, "require_listed", lambda plan, in_sum, site, demands: None),), Scenario(5, 1),
    ),
    "t = q, where O3 asks for it too": Removal(
        ((plan_checks, "require_graph", no_check),), Scenario(4, 1, ({"quorum": 3, "threshold": 2},)),
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", NOT_NEEDED)
def test_a_second_rule_makes_up_for_it(name, monkeypatch):
    removal = NOT_NEEDED[name]
    for target, attribute, value in removal.patches:
        monkeypatch.setattr(target, attribute, value)
    played, found, seen = search(removal.scenario, 150)
    print(f"without {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (150, 0)


# Just outside the claim, and inside it


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(5, 2, extra_colluders=1), id="a colluder too many, 5 sites"),
        pytest.param(Scenario(6, 1, extra_colluders=1), id="a colluder too many, 6 sites"),
        pytest.param(Scenario(4, 1, extra_colluders=1, set_back=1), id="a site set back too many, 4 sites"),
    ],
)
def test_finds_an_attack_just_outside_the_claim(scenario):
    played, found, seen = search(scenario, 600)
    print(f"{scenario}: {found} honest vectors after {played} games, fewest {dict(seen)}")
    assert found


ROUNDS = ({}, {"attempt": 1}, {"round_": 1}, {"round_": 1, "attempt": 1})
INSIDE = {
    "all pairs, 4 sites": Scenario(4, 1, AGAIN, cohorts=3),
    "all pairs, 6 sites, 2 colluding": Scenario(6, 2, AGAIN, cohorts=5),
    "two rounds of two attempts": Scenario(5, 1, ROUNDS, cohorts=4),
    "another message to the others": Scenario(5, 1, AGAIN, is_poisoned=True),
    "a site set back": Scenario(4, 1, AGAIN, cohorts=4, set_back=1),
    "one colluding and one set back": Scenario(6, 2, AGAIN, cohorts=6, set_back=1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", INSIDE)
def test_finds_nothing_inside_the_claim(name):
    played, found, seen = search(INSIDE[name], 60, seed=2)
    print(f"inside: {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (60, 0)


def larger(sites: int, colluding: int, **ring) -> Scenario:
    again = tuple({**ring, **attempt} for attempt in AGAIN)
    return Scenario(sites, colluding, again, cohorts=sites - 1, absent=0.05, follows=0.85)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "games"),
    [
        pytest.param(larger(8, 3), 60, id="8"),
        pytest.param(larger(12, 1, neighbours=4, threshold=2), 40, id="12 on a circle"),
        pytest.param(larger(12, 3, neighbours=8, threshold=4), 20, id="12 on a circle, 3 colluding"),
        pytest.param(larger(16, 5), 20, id="16"),
        pytest.param(larger(32, 1), 6, id="32"),
        pytest.param(larger(32, 10), 6, id="32, 10 colluding"),
        pytest.param(larger(32, 3, neighbours=10, threshold=4), 6, id="32 on a circle"),
    ],
)
def test_finds_nothing_in_larger_cohorts(scenario, games):
    played, found, seen = search(scenario, games, seed=3)
    print(f"larger: {scenario}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (games, 0)
    assert sum(seen.values()) > seen[0], "every game learned nothing: the search is too weak"


# Rows of another plan

SEED_OF_PREKEYS = 5  # with which a second plan is found soon


def find_second_plan(game: Game, plan: AttemptPlan) -> tuple[AttemptPlan, list[str], List]:
    """Return a plan with the same prekeys, by which holders would open rows that two sites made for the first plan.

    Both sites are next to each other on the first plan's circle. In the second one the partners at the same places of
    their rows are silent, so that holders open the secrets of all pairs but the two sites' own.
    """
    for attempt in range(1, 3000):
        second = with_fields(plan, attempt=attempt)
        for pair in zip(plan.circle, [*plan.circle[1:], plan.circle[0]], strict=True):
            outward = [(d, other) for d in pair for other in plan.partners(d) if other not in pair]
            silent = {second.partners(d)[plan.partners(d).index(other)] for d, other in outward if other in game.honest}
            in_sum = tuple(site for site in plan.cohort if site not in silent)
            others = [site for site in in_sum if site in game.honest and site not in pair]
            holders = [
                sum(site in second.holders(d) and site in plan.holders(d) for site in [*others, *game.colluders])
                for d in pair
            ]
            if (
                silent <= {*game.honest} - {*pair}
                and {*pair} <= {*game.honest}
                and len(others) + len(game.colluders) >= plan.quorum
                and min(holders) >= plan.threshold
                and graph_connectivity.fewest_partners(second, in_sum) >= plan.threshold
                and graph_connectivity.is_connected(second, in_sum, plan.colluding)
            ):
                return second, sorted(pair), in_sum
    raise AssertionError("expected a second plan; widen the search")


@pytest.mark.parametrize("bound_to_plan", [False, True])
def test_rows_that_are_not_bound_to_their_plan_open_two_sites(bound_to_plan, monkeypatch):
    """Two sites mask for one plan, the others for another, with the same prekeys; these are asked for rows of those."""
    if not bound_to_plan:
        key, close, read = derivations.row_key, derivations.encrypt_row, derivations.decrypt_row
        monkeypatch.setattr(derivations, "row_key", lambda x, plan, i, h: key(x, "0" * 64, i, h))
        monkeypatch.setattr(derivations, "encrypt_row", lambda k, shares, plan, i, h: close(k, shares, "0" * 64, i, h))
        monkeypatch.setattr(derivations, "decrypt_row", lambda k, r, n, plan, i, h: read(k, r, n, "0" * 64, i, h))
    monkeypatch.setattr(os, "urandom", np.random.default_rng(SEED_OF_PREKEYS).bytes)
    game = Scenario(12, 1).game()
    plan = game.plan(**numbers(12, 1, 7, neighbours=4, threshold=2))
    second, pair, in_sum = find_second_plan(game, plan)
    others = [site for site in game.honest if site not in pair]
    game.begin(plan, pair)
    game.begin(second, others)
    for site in others:
        if site in in_sum:
            assert game.agree(site, second, in_sum)
    for site in others:
        if site in in_sum:
            rows = game.rows(site, second, in_sum)
            rows |= {dealer: row for dealer, row in game.rows(site, second, in_sum, plan).items() if dealer in pair}
            assert game.open(site, second, in_sum, rows=rows)
    assert game.fewest(plan) == (0 if bound_to_plan else 2)
    assert game.fewest(second) == 0
