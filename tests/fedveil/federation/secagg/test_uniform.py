"""What the server sees of one site is uniform: chi-square of bytes, bits, and correlations, each at p > 1e-6.

With a true control for each: the vector without masks fails it. Some ten tests: one run in 100,000 is red by chance.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.federation.secagg import mask_streams
from fedveil.federation.secagg.derivations import own_mask
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.unmasking import negate_mask
from tests.fedveil.federation.secagg.sites import masked, names, run

P, LENGTH, SITES = 1e-6, 200_000, names(4)


def bytes_p(vector: np.ndarray) -> float:
    """Chi-square over the 256 values of a byte."""
    return float(stats.chisquare(np.bincount(vector.view(np.uint8), minlength=256)).pvalue)


def bits_p(vector: np.ndarray) -> float:
    """Ones among all bits, the least likely of the 32 places included."""
    bits = np.unpackbits(vector.view(np.uint8))
    by_place = [(bits.mean(), bits.size), *((bits[i::32].mean(), bits.size // 32) for i in range(32))]
    return float(min(2 * stats.norm.sf(abs(mean - 0.5) * 2 * np.sqrt(size)) for mean, size in by_place))


def correlation_p(one: np.ndarray, two: np.ndarray) -> float:
    """Of the entries, at lags 0 to 8, the least likely."""
    z_scores = []
    for lag in range(9):
        a, b = one[lag:].astype(np.float64), two[: len(two) - lag].astype(np.float64)
        z_scores.append(np.corrcoef(a, b)[0, 1] * np.sqrt(len(a)))
    return float(2 * stats.norm.sf(np.abs(z_scores).max()))


@pytest.fixture(scope="module")
def seen():
    """Two rounds of four sites that send much the same, as updates of one model are; clear and masked."""
    local = run(SITES, most_weight=3, bound=4.0)
    base = torch.randn(LENGTH, generator=torch.Generator().manual_seed(27)) * 0.05
    clear, hidden, plans = [], [], []
    for round_ in range(2):
        attempt = local.begin(round_, 0, SITES)
        vectors = {}
        for i, site in enumerate(SITES):
            noise = torch.randn(LENGTH, generator=torch.Generator().manual_seed(31 * round_ + i)) * 0.01
            vectors[site] = np.zeros(LENGTH, "<u4")
            FixedPointRing.from_plan(attempt.plan).encode(base + noise, 2, None, vectors[site])
        uploads = masked(local, attempt, vectors)
        clear.append(vectors)
        hidden.append({site: vector for site, (vector, _) in uploads.items()})
        plans.append(attempt.plan)
        for site, (_, attached) in uploads.items():
            local.coordinator.keep(site, attempt.plan, attached.next)
    return clear, hidden, plans


@pytest.mark.parametrize("test", [bytes_p, bits_p])
def test_a_masked_vector_is_uniform_and_a_clear_one_is_not(seen, test):
    clear, hidden, _ = seen
    for site in SITES[:2]:
        assert test(hidden[0][site]) > P
        assert test(clear[0][site]) < P


def test_a_vector_of_zeros_is_as_uniform(seen):
    """A site that has nothing to send under a name looks as all others."""
    local = run(SITES)
    attempt = local.begin(0, 0, SITES)
    (hidden, _) = masked(local, attempt, {"s00": np.zeros(LENGTH, "<u4")})["s00"]
    assert min(bytes_p(hidden), bits_p(hidden), correlation_p(hidden[1:], hidden[:-1])) > P
    assert bytes_p(np.zeros(LENGTH, "<u4")) < P


@pytest.mark.parametrize(
    ("one", "two"), [((0, "s00"), (1, "s00")), ((0, "s00"), (0, "s01"))], ids=["two rounds", "two sites"]
)
def test_two_masked_vectors_are_not_correlated_and_two_clear_ones_are(seen, one, two):
    clear, hidden, _ = seen
    for views, uniform in ((hidden, True), (clear, False)):
        a, b = views[one[0]][one[1]], views[two[0]][two[1]]
        assert (correlation_p(a, b) > P) == uniform
        assert (correlation_p(a.view("<i4"), b.view("<i4")) > P) == uniform
    difference = hidden[one[0]][one[1]] - hidden[two[0]][two[1]]
    assert bytes_p(difference) > P
    assert bytes_p(clear[one[0]][one[1]] - clear[two[0]][two[1]]) < P


def test_the_sum_of_some_sites_is_uniform_and_that_of_all_shows_the_clear_one_once_their_own_masks_are_off(seen):
    clear, hidden, plans = seen
    some = hidden[0]["s00"] + hidden[0]["s01"] + hidden[0]["s02"]
    assert min(bytes_p(some), bits_p(some)) > P
    total = some + hidden[0]["s03"]
    assert bytes_p(total) > P  # own masks of four sites
    wrong = total.copy()
    mask_streams.add_masks(wrong, [negate_mask(own_mask(bytes(16), plans[0].digest, site)) for site in SITES])
    assert bytes_p(wrong) > P
    assert bytes_p(sum(clear[0].values())) < P
