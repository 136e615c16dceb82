"""Multi-Krum against a slow twin, and the bounds that its docstring states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.contract.contributions import ClientContributions, Contribution, weighted_contributions
from fedveil.errors import ConfigError
from fedveil.ops import krum
from fedveil.ops.krum import MultiKrumAggregator


def summed(uploads, hostile: int = 1, best: int = 0) -> MultiKrumAggregator:
    sums = MultiKrumAggregator(hostile, best)
    for client, tensors in uploads.items():
        sums.add(client, 3, weighted_contributions(tensors, 7.0))
    return sums


def drawn(seed: int, n: int, spread: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"v": (3, 4), "w": (5,)}
    return {
        f"site{i}": {name: spread * torch.randn(size, generator=generator) for name, size in sizes.items()}
        for i in range(n)
    }


def distance(a, b) -> float:
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in a))


def naive(uploads, hostile: int, best: int) -> list[str]:
    """Blanchard et al. 2017, by loops over pairs and numbers."""
    score = {}
    for one in uploads:
        squares = []
        for other in uploads:
            if other != one:
                pairs = zip(
                    torch.cat([t.flatten() for t in uploads[one].values()]).tolist(),
                    torch.cat([t.flatten() for t in uploads[other].values()]).tolist(),
                    strict=True,
                )
                squares.append(math.fsum((x - y) ** 2 for x, y in pairs))
        score[one] = math.fsum(sorted(squares)[: len(uploads) - hostile - 2])
    return sorted(sorted(uploads, key=lambda name: (score[name], name))[:best])


@given(seed=st.integers(0, 10**6), hostile=st.integers(1, 3), more=st.integers(0, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_it_chooses_as_the_slow_twin_does(seed, hostile, more, data):
    uploads = drawn(seed, 2 * hostile + 3 + more)
    most = len(uploads) - hostile - 2
    best = data.draw(st.integers(1, most))
    sums = summed(uploads, hostile, best)
    assert sums.chosen == naive(uploads, hostile, best)
    assert summed(uploads, hostile).chosen == naive(uploads, hostile, most)
    for name in ("v", "w"):
        expected = torch.stack([uploads[c][name] for c in sums.chosen]).double().mean(0)
        torch.testing.assert_close(sums.mean(name).double(), expected, rtol=1e-5, atol=1e-6)
        assert sums.moved(name).all()


def test_distances_over_more_than_a_block_are_those_of_the_whole(monkeypatch):
    uploads = list(drawn(3, 6).values())
    whole = krum.squared_distances(uploads)
    monkeypatch.setattr(krum, "_BLOCK", 5)
    torch.testing.assert_close(krum.squared_distances(uploads), whole)
    assert float(whole[2, 4]) == pytest.approx(distance(uploads[2], uploads[4]) ** 2)
    assert torch.equal(whole, whole.T)


def test_scores_by_hand():
    """n = 5, f = 1: the two nearest others count. At 0, 1, 3, 7 and 100 on a line."""
    places = torch.tensor([0.0, 1.0, 3.0, 7.0, 100.0])
    scores = krum.krum_scores((places[:, None] - places).double().square(), 1)
    assert scores.tolist() == [1 + 9, 1 + 4, 4 + 9, 16 + 36, 93**2 + 97**2]
    uploads = {name: {"w": torch.tensor([place])} for name, place in zip("abcde", places.tolist(), strict=True)}
    sums = summed(uploads)
    assert (sums.chosen, sums.mean("w").tolist()) == (["a", "b"], [0.5])
    assert summed(uploads, best=1).chosen == ["b"]


@given(seed=st.integers(0, 10**6), order=st.permutations(range(7)))
@settings(max_examples=40, deadline=None)
def test_the_order_of_arrival_changes_nothing_not_even_where_scores_are_equal(seed, order):
    uploads = drawn(seed, 7)
    uploads["site5"] = uploads["site2"]  # the same upload from two sites: the same score
    shuffled = {f"site{i}": uploads[f"site{i}"] for i in order}
    for best in (0, 1, 2):
        one, other = summed(uploads, 2, best), summed(shuffled, 2, best)
        assert one.chosen == other.chosen
        assert all(torch.equal(one.mean(name), other.mean(name)) for name in ("v", "w"))


@given(
    seed=st.integers(0, 10**6), hostile=st.integers(1, 3), more=st.integers(0, 3), far=st.floats(1.01, 1e6),
    agree=st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_colluders_beyond_the_stated_distance_are_never_averaged(seed, hostile, more, far, agree):
    n = 2 * hostile + 3 + more
    honest = drawn(seed, n - hostile)
    widest = max(distance(a, b) for a in honest.values() for b in honest.values())
    bound = widest * math.sqrt((n - hostile - 2) / (n - 2 * hostile - 1))
    ways = drawn(seed + 1, hostile)
    colluders = {}
    for i in range(hostile):
        way = ways["site0" if agree else f"site{i}"]
        length = distance(way, {name: torch.zeros_like(t) for name, t in way.items()})
        # As far from every honest upload: the honest ones lie within `widest` of the first of them.
        colluders[f"a{i}"] = {
            name: honest["site0"][name] + t * ((far * bound + widest) / length) for name, t in way.items()
        }
    sums = summed(honest | colluders, hostile)
    assert len(sums.chosen) == n - hostile - 2
    assert set(sums.chosen) <= set(honest)


def test_whoever_is_chosen_lies_within_the_stated_distance_of_an_honest_upload():
    """Colluders who agree, from inside the honest range outwards: they are chosen at first, and never beyond it."""
    honest, inside = drawn(11, 5), 0
    widest = max(distance(a, b) for a in honest.values() for b in honest.values())
    centre = {name: sum(t[name] for t in honest.values()) / 5 for name in ("v", "w")}
    for step in torch.linspace(0, 3 * widest, 60).tolist():
        colluder = {"v": centre["v"] + step / math.sqrt(12), "w": centre["w"]}
        sums = summed(honest | {"a0": colluder, "a1": colluder}, 2)
        if "a0" in sums.chosen:
            inside += 1
            assert min(distance(colluder, h) for h in honest.values()) <= widest * math.sqrt(3 / 2)
    assert 0 < inside < 60


def test_equal_uploads_are_the_result_bit_for_bit_and_halves_are_widened():
    value = torch.tensor([0.1, -3.3, 60000.0], dtype=torch.float16)
    sums = summed({str(i): {"w": value} for i in range(7)}, 1)
    assert torch.equal(sums.mean("w"), value.float())
    assert sums.means({"w": value, "v": value})["w"].dtype == torch.float16
    assert sums.means({"v": value})["v"] is value


def test_what_is_not_used_is_still_told():
    sums = summed(drawn(1, 5))
    assert (sums.weight("w"), sums.weight("x"), sums.examples, "w" in sums, "x" in sums) == (35.0, 0.0, 15, True, False)
    assert list(sums.clear) == [f"site{i}" for i in range(5)]


def test_too_few_uploads_are_refused():
    with pytest.raises(ConfigError, match=r"aggregate\.num-byzantine: expected at least 7 uploads, found 6"):
        _ = summed(drawn(1, 6), 2).chosen
    with pytest.raises(ConfigError, match=r"expected at least 8 uploads, found 7"):
        summed(drawn(1, 7), 2, 4).mean("w")
    assert len(summed(drawn(1, 8), 2, 4).chosen) == 4


def test_uploads_that_cannot_be_compared_are_refused():
    masked = ClientContributions([Contribution("w", torch.ones(2), 1.0, torch.tensor([True, False]))])
    with pytest.raises(ConfigError, match=r"same entries.*found a mask on w"):
        MultiKrumAggregator(1).add("a", 1, masked)
    sums = MultiKrumAggregator(1)
    sums.add("a", 1, weighted_contributions({"w": torch.ones(2)}, 1.0))
    for other in ({"v": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(1)}, {}):
        with pytest.raises(ConfigError, match=r"found \['w'\] and \["):
            sums.add("b", 1, weighted_contributions(other, 1.0))
