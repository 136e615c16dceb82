"""Two runs' scores of the same rows: parts of the area by hand, and how often equal runs are told apart."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from fedveil.attacks.audit.delong import (
    ALPHA,
    NormalEstimate,
    PlacementValues,
    SiteAveragedAuroc,
    SitePlacements,
    placement_values,
)
from fedveil.attacks.statistics import area_under_roc, holm_correction
from tests.attacks.standard_error import hanley_mcneil


def test_the_parts_by_hand():
    first = np.array([3.0, 1.0]), np.array([2.0, 1.0])
    second = np.array([5.0, 6.0, 7.0]), np.array([0.0, 9.0])
    parts = placement_values([first, second])
    assert [site.tolist() for site in parts.of_members] == [[1.0, 0.25], [0.5, 0.5, 0.5]]
    assert parts.of_others.tolist() == [(0.5 + 1.0) / 2, (0.75 + 0.0) / 2]
    assert parts.value == pytest.approx((area_under_roc(*first) + area_under_roc(*second)) / 2)
    assert parts.standard_error == pytest.approx((0.28125 / 2 / 4 + 0.0703125 / 2) ** 0.5)


def test_one_site_has_the_interval_of_hanley_and_mcneil_nearly():
    rng = np.random.default_rng(3)
    parts = placement_values([(rng.normal(1.0, 1.0, 2000), rng.normal(0.0, 1.0, 1500))])
    assert parts.standard_error == pytest.approx(hanley_mcneil(parts.value, 2000, 1500), rel=0.1)


def test_rows_that_are_hard_in_both_runs_do_not_widen_the_difference():
    rng = np.random.default_rng(4)
    rows = rng.normal(0.0, 1.0, 60), rng.normal(0.0, 1.0, 60)
    base = placement_values([(rows[0] + 1.3, rows[1])])
    mine = placement_values([(rows[0] + 1.0, rows[1])])
    difference = base.less(mine)
    assert difference.value == pytest.approx(base.value - mine.value)
    assert difference.standard_error < 0.5 * base.standard_error
    assert difference.estimate.p < 0.01
    assert base.estimate.interval(0.05)[0] < mine.estimate.interval(0.05)[1]  # side by side the intervals say nothing


def test_a_certain_attack_beside_a_blind_one_has_an_interval_all_the_same():
    certain, blind = (placement_values([(np.full(30, top), np.zeros(30))]) for top in (1.0, 0.0))
    difference = certain.less(blind)
    assert (difference.value, difference.standard_error) == (0.5, 1 / 30)
    assert certain.estimate.interval(0.05, 0.0)[1] == 1.0


def alike(rng: np.random.Generator, noise: float, sites: int = 3, rows: int = 60) -> list[PlacementValues]:
    """Three runs of one method: each row's own signal, and a run's own noise on it."""
    shift = rng.uniform(0.0, 2.0)  # attacks from a coin's to nearly certain ones
    own = [(rng.normal(shift, 1.0, rows), rng.normal(0.0, 1.0, rows)) for _ in range(sites)]
    runs = []
    for _ in range(3):
        noisy = [tuple(side + rng.normal(0.0, noise, rows) for side in sides) for sides in own]
        runs.append(placement_values([(members, others) for members, others in noisy]))
    return runs


def told_apart(runs: list[PlacementValues]) -> bool:
    return min(holm_correction([runs[0].less(run).estimate.p for run in runs[1:]])) <= ALPHA


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.2, 1.0])
@pytest.mark.parametrize("rows", [20, 64])
def test_alike_runs_are_told_apart_in_fewer_than_one_demo_of_fifty(noise, rows):
    rng = np.random.default_rng(20261123)
    false = sum(told_apart(alike(rng, noise, rows=rows)) for _ in range(1500))
    assert 0 < false < 0.02 * 1500  # a test that never errs would be blind


def test_a_run_that_gives_away_less_is_told_apart():
    rng = np.random.default_rng(7)
    num_significant = 0
    for _ in range(100):
        own = [(rng.normal(0.0, 1.0, 60), rng.normal(0.0, 1.0, 60)) for _ in range(3)]
        base = placement_values([(m + 1.2 + rng.normal(0, 0.3, 60), n) for m, n in own])
        mine = placement_values([(m + 0.8 + rng.normal(0, 0.3, 60), n) for m, n in own])
        num_significant += base.less(mine).estimate.p <= ALPHA
    assert num_significant > 60


@pytest.mark.parametrize(
    "sites",
    [
        [],
        [(np.ones(1), np.ones(9))],
        [(np.ones(9), np.ones(9)), (np.ones(9), np.ones(8))],
        [(np.ones(9), np.full(9, np.nan))],
    ],
)
def test_scores_that_cannot_be_paired_are_refused(sites):
    with pytest.raises(ValueError, match="each side needs at least two|some scores are NaN"):
        placement_values(sites)


def test_other_rows_are_refused():
    nine, eight = (placement_values([(np.arange(n, dtype=float), np.arange(9.0))]) for n in (9, 8))
    with pytest.raises(ValueError, match=r"the runs have different numbers of scores: \[9, 9\] and \[8, 9\]"):
        nine.less(eight)


def test_intervals_and_bounds_are_those_of_a_normal_variable():
    estimate = NormalEstimate(0.9, 0.05)
    assert estimate.interval(0.05) == pytest.approx((0.9 - 1.959964 * 0.05, 0.9 + 1.959964 * 0.05))
    assert estimate.interval(0.01)[1] == 1.0
    assert estimate.lower_bound(0.01) == pytest.approx(0.9 - 2.326348 * 0.05)
    assert estimate.p == pytest.approx(0.0, abs=1e-60)


def across() -> SiteAveragedAuroc:
    """One attack on three sites, of which two have an upload to be mistaken for; beside one other run."""
    rng = np.random.default_rng(5)
    own = {f"site-{i}": (rng.normal(1.0, 1.0, 60), rng.normal(0.0, 1.0, 60)) for i in range(3)}
    wrong = {site: (members - 1.0, others) for site, (members, others) in own.items() if site != "site-2"}
    base = SitePlacements.from_scores({s: (members + 1.0, others) for s, (members, others) in own.items()}, {})
    return SiteAveragedAuroc.from_placements("alignment", SitePlacements.from_scores(own, wrong), {"a" * 64: base})


def test_sites_have_their_own_values_and_their_base_line():
    over = across()
    assert over.mean.value == pytest.approx(np.mean([site.auroc.value for site in over.sites]))
    assert [site.site for site in over.sites] == ["site-0", "site-1", "site-2"]
    assert [site.less_wrong is None for site in over.sites] == [False, False, True]
    assert all(site.less_wrong.value > 0.1 for site in over.sites[:2])
    (difference,) = over.differences
    assert difference.base == "a" * 64
    assert difference.less.value > 0.05  # the other run reveals more


def test_what_is_written_is_read():
    assert SiteAveragedAuroc.read(json.loads(json.dumps(asdict(across())))) == across()


BAD_ESTIMATES = [
    {"value": 1.1, "standard_error": 0.1}, {"value": -0.1, "standard_error": 0.1}, {"value": 0.5},
    {"value": float("nan"), "standard_error": 0.1}, {"value": 0.5, "standard_error": 0.0},
    {"value": 0.5, "standard_error": float("nan")},
]  # fmt: skip


@pytest.mark.parametrize("change", [{"mean": bad} for bad in BAD_ESTIMATES] + [{"sites": []}])
def test_a_changed_file_is_refused(change):
    with pytest.raises((ValueError, KeyError)):
        SiteAveragedAuroc.read(asdict(across()) | change)


@pytest.mark.parametrize(
    ("part", "change"),
    [("sites", {"auroc": bad}) for bad in BAD_ESTIMATES]
    + [("sites", {"members": 0}), ("sites", {"less_wrong": {"value": -2.0, "standard_error": 0.1}})]
    + [("differences", {"base": "short"}), ("differences", {"less": {"value": 2.0, "standard_error": 0.1}})],
)
def test_a_changed_part_of_a_file_is_refused(part, change):
    content = asdict(across())
    content[part][0] |= change
    with pytest.raises((ValueError, KeyError)):
        SiteAveragedAuroc.read(content)
