"""The claim against a count of what an adversary could gather."""

from __future__ import annotations

import pytest

from fedveil.federation.secagg.adversary_model import (
    DEVIATING,
    AdversaryModel,
    server_learns,
    single_site,
    weakest_adversary,
)


def opens_one_half(n: int, t: int, c: int) -> bool:
    """The server keeps to the protocol, so what the sites with it hold beside the sum is their own shares."""
    return c >= t


def leaves_one(least: int, c: int) -> bool:
    """A sum of the fewest sites, in which all that work with the server are."""
    return least - c < 2


@pytest.mark.parametrize("n", range(2, 12))
def test_the_number_is_that_of_a_count(n):
    for t in range(1, n + 1):
        for least in range(2, n + 1):
            holds = [c for c in range(n) if not opens_one_half(n, t, c) and not leaves_one(least, c)]
            assert AdversaryModel(n, t, least, partial=False).curious == max(holds)


@pytest.mark.parametrize("partial", [True, False, None])
@pytest.mark.parametrize("n,t,least", [(5, 4, 5), (6, 3, 4), (3, 3, 2), (10, 10, 10)])
def test_nothing_is_ever_claimed_against_a_server_that_deviates_or_lies(n, t, least, partial):
    curious, deviating, *rest = AdversaryModel(n, t, least, partial).words
    assert curious.startswith("Holds against an honest but curious server")
    assert deviating == DEVIATING == "Does not hold against a server that deviates from the protocol or lies."
    assert not any(line.startswith("Holds") or "roster" in line for line in rest)


def test_entries_of_one_site_are_named_where_sites_may_leave_entries_out():
    descriptions = {partial: " ".join(AdversaryModel(5, 4, 5, partial).words) for partial in (True, False, None)}
    assert (
        "With this method each site draws which entries it sends, so some entries of the sum may come from one site"
        in descriptions[True]
    )
    assert "one site" not in descriptions[False]
    assert "If each site draws which entries it sends" in descriptions[None]
    assert single_site(True) in server_learns(True)
    assert server_learns(False).endswith("values, number of examples, losses or norm.")


def test_what_a_server_learns_is_said_of_one_that_keeps_to_the_protocol_alone():
    assert "a server that follows the protocol learns no single site's values" in server_learns(False)


def test_a_sum_of_few_sites_is_what_bounds_it_and_the_words_say_so():
    claim = AdversaryModel(9, 7, 3, partial=False)
    assert claim.curious == 1
    assert claim.words == [
        "Holds against an honest but curious server and up to 1 site with it.",
        DEVIATING,
        "Does not hold against 2 sites with the server: a sum may have 3 sites, and two of them must be honest "
        "(secure.min-sites, min-cohort).",
    ]
    assert AdversaryModel(3, 3, 2, partial=False).words[0] == "Holds against an honest but curious server alone."


def test_the_weakest_attempt_of_a_run_counts_and_knows_no_more_of_the_method_than_it_is_told():
    adversary = weakest_adversary([{"holders": 9, "threshold": 7}, {"holders": 4, "threshold": 3}, {}], 5, partial=True)
    assert adversary == AdversaryModel(4, 3, 5, partial=True)
    assert weakest_adversary([{}], 5, partial=True) is None


@pytest.mark.parametrize("n,t,least", [(3, 0, 2), (3, 4, 2), (3, 2, 1)])
def test_what_is_no_membership_has_no_claim(n, t, least):
    with pytest.raises(ValueError, match="expected a threshold"):
        AdversaryModel(n, t, least, partial=False)
