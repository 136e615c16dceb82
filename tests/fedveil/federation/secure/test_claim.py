"""The claim against a count of what an adversary could gather."""

from __future__ import annotations

import pytest

from fedveil.federation.secure.claim import Claim


def opens_one_half(n: int, t: int, c: int) -> bool:
    """The server keeps to the protocol, so what the sites with it hold beside the sum is their own shares."""
    return c >= t


def opens_both_halves(n: int, t: int, c: int) -> bool:
    """Each honest holder answers one list: some the first, the others the second; the sites with the server both."""
    return any(first + c >= t and (n - c - first) + c >= t for first in range(n - c + 1))


def leaves_one(least: int, c: int) -> bool:
    """A sum of the fewest sites, in which all that work with the server are."""
    return least - c < 2


def honest_in_what_lists_open(n: int, t: int, c: int) -> int:
    """Each honest holder leaves out n - t sites: all the same ones at first, until t - c holders have left them out."""
    out = [0] * (n - c)
    for _ in range((n - c) * (n - t)):
        out[next((i for i, times in enumerate(out) if times < t - c), 0)] += 1
    return sum(times < t - c for times in out)


@pytest.mark.parametrize("n", range(2, 12))
def test_the_numbers_are_those_of_a_count(n):
    for t in range(n // 2 + 1, n + 1):
        for least in range(2, n + 1):
            claim = Claim(n, t, least, with_roster=True)
            holds = [c for c in range(n) if not opens_one_half(n, t, c) and not leaves_one(least, c)]
            assert claim.curious == max(holds)
            strong = [c for c in holds if not opens_both_halves(n, t, c) and honest_in_what_lists_open(n, t, c) >= 2]
            assert claim.deviating == max(strong, default=None)
            assert Claim(n, t, least, with_roster=True, all_pairs=False).deviating is None


def test_without_a_roster_only_the_weaker_one_is_claimed_and_the_words_say_why():
    claim = Claim(5, 4, 5, with_roster=False)
    assert (claim.curious, claim.deviating) == (3, None)
    assert claim.words[0] == "Holds against an honest but curious server and up to 3 sites with it."
    assert claim.words[1].startswith(
        "Does not hold against a server that deviates: without a roster in every site policy"
    )


def test_a_threshold_of_half_the_holders_is_too_low_with_or_without_a_roster():
    for with_roster in (True, False):
        claim = Claim(6, 3, 4, with_roster)
        assert claim.deviating is None
        assert "threshold too low, 3 of 6 holders" in claim.words[1]


def test_a_sum_of_few_sites_is_what_bounds_it_and_the_words_say_so():
    claim = Claim(9, 7, 3, True)
    assert (claim.curious, claim.deviating) == (1, 1)
    assert claim.words == [
        "Holds against an honest but curious server and up to 1 site with it.",
        "Holds against a server that deviates and up to 1 site with it.",
        "Not against 2 sites with the server: a sum may be of 3 sites, and two of them must be honest "
        "(secure.min-sites, min-cohort).",
    ]
    assert Claim(3, 3, 2, True).words[0] == "Holds against an honest but curious server alone."


@pytest.mark.parametrize("n,t,least", [(3, 0, 2), (3, 4, 2), (3, 2, 1)])
def test_what_is_no_membership_has_no_claim(n, t, least):
    with pytest.raises(ValueError, match="expected a threshold"):
        Claim(n, t, least, with_roster=True)
