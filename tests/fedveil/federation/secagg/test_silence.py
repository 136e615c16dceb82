"""The sum is exact for every pattern of silence at each of the three exchanges, or nothing is signed or opened.

A site falls silent before it uploads, before it signs or before it opens; or it never does. The honest server's half
is used, so all sites are alike and only the number that fall silent at each exchange matters; which ones is tried for
three sites, and by a different order of names for the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import numpy as np
import pytest

from fedveil.errors import QuorumError
from fedveil.federation.secagg.in_process import InProcessSecureSums
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.testing.lying_server import RUN, remembered_signatures, site_names


@pytest.fixture(autouse=True)
def quick():
    with remembered_signatures():
        yield


UPLOAD, AGREE, OPEN, NEVER = range(4)


def vector_of(site: str) -> np.ndarray:
    return np.random.default_rng(list(site.encode())).integers(0, 1 << 32, 6, dtype=np.uint64).astype("<u4")


def run_round(local: InProcessSecureSums, silent_from: Mapping[str, int], round_: int = 0) -> np.ndarray:
    """Return the sum of a round in which sites fall silent. Raises QuorumError as the honest server does."""
    attempt = local.begin(round_, 0, sorted(silent_from))
    for site, exchange in silent_from.items():
        if exchange > UPLOAD:
            vector = vector_of(site)
            attempt.add(site, vector, local.mask(site, attempt.plan, vector))
    attempt.close()
    if attempt.needs_agreement:
        for site, request in attempt.agree_requests().items():
            if silent_from[site] > AGREE:
                attempt.take_agreement(site, local.sites[site].agree(request))
    for site, wanted in attempt.open_requests().items():
        if silent_from[site] > OPEN:
            attempt.take_opening(site, local.sites[site].open(wanted))
    return attempt.total()


def phases(local: InProcessSecureSums) -> set[str]:
    return {state.live.phase for site in local.sites.values() if (state := site.store.load()) and state.live}


def check_pattern(silent_from: Mapping[str, int], settings: SecAggConfig) -> bool:
    """Check the sum of a round, or that it is refused. Return whether there was one."""
    local = InProcessSecureSums(RUN, settings, sorted(silent_from))
    quorum, count = settings.quorum(len(silent_from)), list(silent_from.values())
    uploads = sum(exchange > UPLOAD for exchange in count)
    signed, opened = sum(exchange > AGREE for exchange in count), sum(exchange > OPEN for exchange in count)
    needs_list = uploads < len(count)
    if uploads < max(quorum, settings.least):
        with pytest.raises(QuorumError, match="secure.min-sites, secure.threshold: a sum needs at least"):
            run_round(local, silent_from)
        assert phases(local) <= {"masked"}
        return False
    if needs_list and signed < quorum:
        with pytest.raises(QuorumError, match="must sign the list"):
            run_round(local, silent_from)
        assert phases(local) <= {"masked", "signed"}
        return False
    if opened < quorum:
        with pytest.raises(QuorumError, match="must open their shares"):
            run_round(local, silent_from)
        return False
    expected = sum((vector_of(s) for s, e in silent_from.items() if e > UPLOAD), np.zeros(6, np.uint32))
    assert np.array_equal(run_round(local, silent_from), expected)
    return True


def check_all(sites: int, colluding: int, quorum: int, patterns) -> None:
    settings = SecAggConfig(least=min(3, sites), threshold=quorum, colluding=colluding)
    sums = [check_pattern(dict(zip(site_names(sites), pattern, strict=True)), settings) for pattern in patterns]
    print(f"silence: {sites} sites, quorum {quorum}: {len(sums)} patterns, {sum(sums)} sums")
    assert 0 < sum(sums) < len(sums)


def up_to_names(sites: int) -> list[tuple[int, ...]]:
    """Return all patterns up to renaming the sites, each with its names in another order."""
    rng = random.Random(sites)
    return [tuple(rng.sample(pattern, sites)) for pattern in itertools.combinations_with_replacement(range(4), sites)]


def test_all_patterns_of_three_sites():
    check_all(3, 1, 3, itertools.product(range(4), repeat=3))


@pytest.mark.parametrize(
    ("sites", "colluding", "quorum"), [(4, 1, 3), (5, 1, 4), pytest.param(5, 0, 3, marks=pytest.mark.long)]
)
def test_all_patterns_up_to_names(sites, colluding, quorum):
    check_all(sites, colluding, quorum, up_to_names(sites))


@pytest.mark.long
@pytest.mark.parametrize(("sites", "colluding", "quorum"), [(6, 1, 4), (6, 2, 5)])
def test_all_patterns_of_six_sites(sites, colluding, quorum):
    check_all(sites, colluding, quorum, up_to_names(sites))


@pytest.mark.long
def test_all_patterns_of_four_sites_by_name():
    check_all(4, 1, 3, itertools.product(range(4), repeat=4))


@pytest.mark.parametrize("games", [3, pytest.param(20, marks=pytest.mark.long)])
def test_neighbors_of_twelve_sites_over_random_lists(games):
    rng, sums = random.Random(games), 0
    settings = SecAggConfig(least=3, threshold=7, colluding=1, neighbours=6)
    for _ in range(games):
        silent_from = {site: rng.choice((NEVER, NEVER, NEVER, UPLOAD, OPEN)) for site in site_names(12)}
        silent_from |= dict.fromkeys(rng.sample(site_names(12), 8), NEVER)
        local = InProcessSecureSums(RUN, settings, site_names(12), SiteRequirements(3, 2))
        try:
            total = run_round(local, silent_from)
        except QuorumError:  # too few holders of a site are left
            assert local.last is not None
            closed = local.last.in_sum
            assert not closed or local.last.wanting
            continue
        expected = sum((vector_of(s) for s, e in silent_from.items() if e > UPLOAD), np.zeros(6, np.uint32))
        assert np.array_equal(total, expected)
        sums += 1
    print(f"neighbors: {sums} sums of {games} rounds")
    assert sums >= games // 2


def test_a_site_that_missed_the_agreement_opens():
    local = InProcessSecureSums(RUN, SecAggConfig(least=3, threshold=3, colluding=0), site_names(5))
    silent_from = dict(zip(site_names(5), (UPLOAD, AGREE, NEVER, NEVER, NEVER), strict=True))
    attempt = local.begin(0, 0, site_names(5))
    for site in site_names(5)[1:]:
        vector = vector_of(site)
        attempt.add(site, vector, local.mask(site, attempt.plan, vector))
    attempt.close()
    for site, request in attempt.agree_requests().items():
        if silent_from[site] > AGREE:
            attempt.take_agreement(site, local.sites[site].agree(request))
    wanted = attempt.open_requests()
    for site in ("s01", "s03", "s04"):
        attempt.take_opening(site, local.sites[site].open(wanted[site]))
    assert np.array_equal(attempt.total(), sum((vector_of(s) for s in site_names(5)[1:]), np.zeros(6, np.uint32)))


def test_an_attempt_without_enough_uploads_is_repeated_with_the_same_sites():
    local = InProcessSecureSums(RUN, SecAggConfig(), site_names(4))
    attempt = local.begin(0, 0, site_names(4))
    for site in site_names(2):
        vector = vector_of(site)
        upload = local.mask(site, attempt.plan, vector)
        attempt.add(site, vector, upload)
        local.coordinator.keep(site, attempt.plan, upload.next)
    with pytest.raises(QuorumError):
        attempt.close()
    again = local.begin(0, local.coordinator.next_attempt(0, site_names(2)), site_names(4))
    assert again.plan.attempt == 1
    for site in site_names(4):
        vector = vector_of(site)
        again.add(site, vector, local.mask(site, again.plan, vector))
    local.unmask(again)
    assert np.array_equal(again.total(), sum((vector_of(s) for s in site_names(4)), np.zeros(6, np.uint32)))
