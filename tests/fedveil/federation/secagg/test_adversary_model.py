"""The claim against a count of what an adversary could gather, and against the plans that a site accepts."""

from __future__ import annotations

from itertools import product

import pytest

from fedveil.errors import FedVeilError
from fedveil.federation.secagg import plan_checks
from fedveil.federation.secagg.adversary_model import (
    BROADCASTS,
    BROADCASTS_METHODS,
    DEVIATING,
    POLICIES_DECIDE,
    TWO_ROUNDS,
    AdversaryModel,
    EnforcedBounds,
    server_learns,
    single_site,
    weakest_adversary,
)
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.testing.lying_server_search import claimed_honest_sites, claimed_in_round

ROSTER = f"sha256:{'ab' * 32}"


def claim(quorum, threshold, least, **update) -> AdversaryModel:
    """Of all pairs, a method that sends all sites the same, and a site whose policy names a roster."""
    about = {
        "colluding": 1, "neighbours": 0, "partial": False, "broadcasts_bound": True,
        "demands": SiteRequirements(roster=ROSTER),
    }  # fmt: skip
    return AdversaryModel(quorum, threshold, least, **(about | update))


def opens_one_secret(t: int, c: int) -> bool:
    """The server follows the protocol, so what the sites with it hold beside the sum is their own shares."""
    return c >= t


def leaves_one(q: int, least: int, c: int) -> bool:
    """A sum of the fewest sites, in which all that work with the server are."""
    return max(q, least) - c < 2


@pytest.mark.parametrize("m", range(2, 12))
def test_the_number_is_that_of_a_count(m):
    for q in range(2, m + 1):
        for t in range(1, q + 1):
            for least in range(2, m + 1):
                holds = [c for c in range(m) if not opens_one_secret(t, c) and not leaves_one(q, least, c)]
                assert claim(q, t, least).curious == max(holds)


def test_where_sites_send_different_entries_the_number_is_that_of_an_entry():
    """Of seven sites or more in a sum, an entry may have three: with two colluders among them it is the third's."""
    assert claim(7, 7, 3).curious == 5
    for planned in (True, None):
        words = claim(7, 7, 3, plans_entries=planned).words
        assert words[0] == "Holds against an honest but curious server and up to 1 site with it."
        assert any("against 2 sites with the server: an entry of a sum may have 3 sites" in line for line in words)


def test_with_neighbours_no_more_sites_than_those_for_which_the_graph_is_checked():
    assert claim(67, 23, 3, colluding=5, neighbours=42).curious == 5
    assert claim(67, 4, 3, colluding=5, neighbours=42).curious == 3
    assert claim(67, 23, 3, colluding=0, neighbours=42).words[0] == (
        "Holds against an honest but curious server alone."
    )


def accepted(demands: SiteRequirements, most: int):
    """Every plan of up to so many sites whose numbers a site with these demands accepts."""
    for m in range(1, most + 1):
        for c, q, least, neighbours in product(range(m + 1), range(1, m + 1), range(1, m + 1), (0, 1)):
            for t in range(1, q + 1) if neighbours else (q,):
                plan = AttemptPlan.model_construct(
                    members=tuple(range(m)), quorum=q, threshold=t, least=least, colluding=c, noise="site"
                )
                if neighbours and t < c + 1:  # require_graph
                    continue
                try:
                    plan_checks.require_numbers(plan, demands)
                except FedVeilError:
                    continue
                yield plan, neighbours


@pytest.mark.parametrize(
    "demands",
    [
        SiteRequirements(min_cohort=n, min_threshold=t, roster=ROSTER, colluding=c)
        for n, t, c in [(2, 1, 0), (2, 1, 1), (5, 1, 1), (5, 4, 1), (4, 5, 2), (2, 6, 0), (6, 4, 2)]
    ],
    ids=str,
)
def test_what_holds_against_a_liar_is_the_least_of_all_plans_that_a_site_accepts(demands):
    """min(2 q - m - 1, t - 1, L - 2), with neighbours no more than the graph is checked for; at that c, L - c and q - c
    honest sites. A plan for more colluding sites is no weaker."""
    plans = list(accepted(demands, 9))
    bounds = [
        min(
            2 * plan.quorum - len(plan.members) - 1,
            plan.threshold - 1,
            plan.least_in_sum - 2,
            *([plan.colluding] if neighbours else []),
        )
        for plan, neighbours in plans
    ]
    found = EnforcedBounds.from_requirements(demands)
    assert found is not None
    assert found.colluding == min(bounds) == demands.colluding
    assert found.least == min(plan.least_in_sum for plan, _ in plans)
    assert found.quorum == min(plan.quorum for plan, _ in plans)
    # The search for attacks (test_lying_server.py) takes the same numbers for the claim.
    honest = min(claimed_honest_sites(plan, demands.colluding) for plan, _ in plans)
    in_a_round = min(claimed_in_round(plan, demands.colluding) for plan, _ in plans)
    assert f"each sum has at least {honest} honest sites, and all sums of a round together" in found.words
    assert f"reveal nothing about fewer than {in_a_round} (" in found.words


@pytest.mark.parametrize(
    ("cohort", "colluding", "honest"), [(2, 1, 2), (10, 1, 9), (3, 1, 2), (5, 2, 3), (2, 0, 2), (8, 3, 5)]
)
def test_the_least_number_of_honest_sites_in_a_sum_is_the_policys_smallest_cohort_less_the_colluding(
    cohort, colluding, honest
):
    """Without min-cohort and with min-colluders = 1, a site takes three sites, of which two are honest."""
    found = EnforcedBounds.from_requirements(SiteRequirements(min_cohort=cohort, roster=ROSTER, colluding=colluding))
    assert found is not None
    assert found.least - found.colluding == honest
    assert f"up to {colluding} site" in found.words or colluding == 0
    assert f"at least {honest} honest sites" in found.words


@pytest.mark.parametrize("partial", [True, False, None])
@pytest.mark.parametrize("bound", [True, False, None])
@pytest.mark.parametrize("q,t,least", [(4, 4, 5), (3, 3, 4), (3, 3, 2), (10, 10, 10)])
def test_without_a_roster_nothing_is_claimed_against_a_server_that_lies(q, t, least, partial, bound):
    words = claim(q, t, least, partial=partial, broadcasts_bound=bound, demands=SiteRequirements(min_cohort=5)).words
    curious, deviating, *rest = words
    assert curious.startswith("Holds against an honest but curious server")
    assert deviating == DEVIATING == "Does not hold against a server that deviates from the protocol or lies."
    assert not any(line.startswith("Holds") or "roster" in line for line in rest)


def test_where_no_policy_is_known_it_is_said_that_the_policies_decide():
    words = claim(4, 4, 5, demands=None).words
    assert words[1] == POLICIES_DECIDE
    assert not any(line.startswith("Holds against a server") for line in words)
    assert claim(4, 4, 5, demands=None).deviating is None
    assert claim(4, 4, 5, demands=None, broadcasts_bound=False).words[2] == BROADCASTS


def test_with_a_roster_the_bound_and_its_conditions_are_said():
    words = claim(7, 7, 3, demands=SiteRequirements(min_cohort=5, min_threshold=4, roster=ROSTER, colluding=1)).words
    assert words[1] == (
        "Holds against a server that lies and up to 1 site with it, if every site's policy names this roster, requires "
        "secure aggregation and admits only known code: each sum has at least 4 honest sites, and all sums of a round "
        "together reveal nothing about fewer than 3 (min-cohort, min-threshold, min-colluders). Where sites "
        "send different "
        "entries (FedRand, FedQSN, HetLoRA, FLoRA), a single entry may come from 4 of them. A site that lost "
        "its state, or "
        "was rolled back to an older one, counts as one that colludes with the server."
    )
    assert DEVIATING not in words


def test_broadcasts_are_left_out_for_methods_with_private_state_or_messages_that_differ():
    said = {bound: claim(4, 4, 5, broadcasts_bound=bound).words for bound in (True, False, None)}
    assert not any("leave one site's update alone" in line for line in said[True])
    assert said[False][2] == BROADCASTS
    assert said[None][2] == BROADCASTS_METHODS


def test_entries_of_one_site_are_named_where_sites_may_leave_entries_out():
    descriptions = {partial: " ".join(claim(4, 4, 5, partial=partial).words) for partial in (True, False, None)}
    assert (
        "With this method each site draws which entries it sends, so some entries of the sum may come from only one "
        "site" in descriptions[True]
    )
    assert "from only one site" not in descriptions[False]
    assert "If each site draws which entries it sends" in descriptions[None]
    assert single_site(True) in server_learns(True)
    assert server_learns(False).endswith("values, number of examples, losses or norm.")


def test_what_a_server_learns_is_said_of_one_that_keeps_to_the_protocol_alone():
    assert "a server that follows the protocol learns no single site's values" in server_learns(False)


def test_a_sum_of_few_sites_is_what_bounds_it_and_the_words_say_so():
    words = claim(3, 3, 3, demands=SiteRequirements()).words
    assert words == [
        "Holds against an honest but curious server and up to 1 site with it.",
        DEVIATING,
        "Does not hold against 2 sites with the server: a sum may have 3 sites, and two of them must be honest "
        "(secure.threshold, secure.min-sites).",
        TWO_ROUNDS,
    ]
    whole = claim(0, 0, 3, demands=SiteRequirements()).words
    assert any("a sum may have 3 sites" in line and line.endswith("honest (secure.min-sites).") for line in whole)
    assert claim(2, 2, 2).words[0] == "Holds against an honest but curious server alone."
    assert not any("with the server: a sum may have" in line for line in claim(4, 3, 9).words)


def noted(quorum, threshold, **update):
    return {"sites": 3, "cohort": 9, "quorum": quorum, "threshold": threshold, "colluding": 1, "neighbours": 0} | update


def test_the_weakest_attempt_of_a_run_counts_and_knows_no_more_of_the_method_than_it_is_told():
    attempts = [noted(7, 7), noted(3, 3), noted(7, 5, neighbours=6), {"reason": "expected 3"}]
    adversary = weakest_adversary(attempts, 5, partial=True, broadcasts_bound=False, plans_entries=False)
    assert adversary == AdversaryModel(7, 5, 5, 1, 6, True, False, None)
    assert weakest_adversary(attempts[:2], 5, True, True, False) == AdversaryModel(3, 3, 5, 1, 0, True, True, None)
    assert weakest_adversary([{}], 5, partial=True, broadcasts_bound=None, plans_entries=None) is None


@pytest.mark.parametrize("q,t,least", [(3, 0, 2), (1, 1, 1)])
def test_what_is_no_plan_has_no_claim(q, t, least):
    with pytest.raises(ValueError, match="expected a threshold"):
        claim(q, t, least)
