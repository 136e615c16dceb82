"""A server that lies, with real sites: what it learns of the honest ones, with every rule and without each.

The claim, for plans with q signatures that withstand c colluding sites: of one plan no combination of vectors of fewer
than max(q, least) - c honest sites, and of all plans of a round none of fewer than q - c. The searches are exhaustive
up to renaming the sites for small cohorts, else random with fixed seeds.
"""

from __future__ import annotations

import logging
import os
from collections import Counter

import numpy as np
import pytest

from fedveil.federation.secagg import derivations, graph_connectivity
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.testing.lying_server import remembered_signatures, site_names, with_fields
from fedveil.testing.lying_server_games import LyingServerGame, SiteList, lists_of, requests_modulo_symmetry
from fedveil.testing.lying_server_search import (
    AGAIN,
    REDUNDANT_RULES,
    RULE_REMOVALS,
    LyingServerScenario,
    find_violation,
    least_quorum,
    plan_numbers,
    search_for_violation,
)


@pytest.fixture(autouse=True)
def quiet():
    """Without the sites' log: thousands of refusals; and each signature is verified once."""
    logging.disable(logging.WARNING)
    with remembered_signatures():
        yield
    logging.disable(logging.NOTSET)


# Exhaustive


def play_all(honest: int, colluders: int, attempts: list[dict]) -> Counter[int]:
    """Play every game with these attempts at one round. Return how often the fewest honest vectors were how many.

    Each site signs and opens any list of each attempt, or none, and masks for an attempt or not; then it is asked
    everything else as well.
    """
    sites = site_names(honest + colluders)
    game = LyingServerGame(sites[colluders:], sites[:colluders])
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
        assert not find_violation(game, colluders), (requests, find_violation(game, colluders))
        found[game.fewest()] += 1
    print(f"exhaustive: {honest} honest, {colluders} colluding, {attempts}: {found.total()} games")
    print(f"fewest {dict(found)}, requests to real sites {dict(game.asked)}")
    return found


SMALL = [(m, c) for m in (3, 4, 5) for c in range(3) if max(least_quorum(m, c), 3) - c >= 2]


@pytest.mark.parametrize(("sites", "colluding"), [(m, c) for m, c in SMALL if m - c < 5])
def test_one_plan_opens_exactly_the_claim(sites, colluding):
    plan = plan_numbers(sites, colluding)
    found = play_all(sites - colluding, colluding, [plan])
    assert min(found.keys() - {0}) == max(plan["quorum"], plan["least"]) - colluding


@pytest.mark.long
def test_one_plan_of_five_honest_sites():
    for quorum in (3, 4):
        found = play_all(5, 0, [plan_numbers(5, 0, quorum)])
        assert min(found.keys() - {0}) == max(quorum, 3)


@pytest.mark.long
@pytest.mark.parametrize("second", [4, 3])
def test_two_attempts_of_a_round(second):
    found = play_all(3, 1, [plan_numbers(4, 1), plan_numbers(second, 1, cohort=site_names(second))])
    assert min(found.keys() - {0}) == 2


# Without a rule


SLOWER = {"certificate", "certificate with neighbors", "connectivity"}
PARAMETERS = [pytest.param(name, marks=pytest.mark.long if name in SLOWER else ()) for name in RULE_REMOVALS]


@pytest.mark.parametrize("name", PARAMETERS)
def test_finds_an_attack_without_the_rule(name):
    removal = RULE_REMOVALS[name]
    with removal.removed():
        played, found, seen = search_for_violation(removal.scenario, 600)
    print(f"without {name}: {found} honest vectors after {played} games, fewest {dict(seen)}")
    assert found


@pytest.mark.parametrize("name", PARAMETERS)
def test_finds_nothing_in_the_same_games_with_the_rule(name):
    games = 40 if name in SLOWER else 12
    played, found, seen = search_for_violation(RULE_REMOVALS[name].scenario, games)
    print(f"with {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (games, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", REDUNDANT_RULES)
def test_a_second_rule_makes_up_for_it(name):
    removal = REDUNDANT_RULES[name]
    with removal.removed():
        played, found, seen = search_for_violation(removal.scenario, 150)
    print(f"without {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (150, 0)


# Just outside the claim, and inside it


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(LyingServerScenario(5, 2, extra_colluders=1), id="a colluder too many, 5 sites"),
        pytest.param(LyingServerScenario(6, 1, extra_colluders=1), id="a colluder too many, 6 sites"),
        pytest.param(LyingServerScenario(4, 1, extra_colluders=1, set_back=1), id="a site set back too many, 4 sites"),
    ],
)
def test_finds_an_attack_just_outside_the_claim(scenario):
    played, found, seen = search_for_violation(scenario, 600)
    print(f"{scenario}: {found} honest vectors after {played} games, fewest {dict(seen)}")
    assert found


ROUNDS = ({}, {"attempt": 1}, {"round_": 1}, {"round_": 1, "attempt": 1})
INSIDE = {
    "all pairs, 4 sites": LyingServerScenario(4, 1, AGAIN, cohorts=3),
    "all pairs, 6 sites, 2 colluding": LyingServerScenario(6, 2, AGAIN, cohorts=5),
    "two rounds of two attempts": LyingServerScenario(5, 1, ROUNDS, cohorts=4),
    "another message to the others": LyingServerScenario(5, 1, AGAIN, is_poisoned=True),
    "a site set back": LyingServerScenario(4, 1, AGAIN, cohorts=4, set_back=1),
    "one colluding and one set back": LyingServerScenario(6, 2, AGAIN, cohorts=6, set_back=1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", INSIDE)
def test_finds_nothing_inside_the_claim(name):
    played, found, seen = search_for_violation(INSIDE[name], 60, seed=2)
    print(f"inside: {name}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (60, 0)


def larger(sites: int, colluding: int, **ring) -> LyingServerScenario:
    again = tuple({**ring, **attempt} for attempt in AGAIN)
    return LyingServerScenario(sites, colluding, again, cohorts=sites - 1, absent=0.05, follows=0.85)


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
    played, found, seen = search_for_violation(scenario, games, seed=3)
    print(f"larger: {scenario}: {found} after {played} games, fewest {dict(seen)}")
    assert (played, found) == (games, 0)
    assert sum(seen.values()) > seen[0], "every game learned nothing: the search is too weak"


# Rows of another plan

SEED_OF_PREKEYS = 5  # with which a second plan is found soon


def find_second_plan(game: LyingServerGame, plan: AttemptPlan) -> tuple[AttemptPlan, list[str], SiteList]:
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
    game = LyingServerScenario(12, 1).game()
    plan = game.plan(**plan_numbers(12, 1, 7, neighbours=4, threshold=2))
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
