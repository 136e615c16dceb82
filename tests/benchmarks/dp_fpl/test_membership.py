"""Membership in prompts: how rows are parted, how controls are judged, and a small whole table."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedveil.attacks.membership import lira
from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.dp_fpl import membership
from fedveil.benchmarks.run import Options
from tests.benchmarks.dp_fpl.small import around, needs_data
from tests.benchmarks.dp_fpl.small import settings as small


def test_members_others_and_pool_share_no_row_and_have_the_same_classes():
    rows = {s: [SimpleNamespace(label=k % 2, number=(s, k)) for k in range(23)] for s in "ab"}
    parts = membership.parted(rows, np.random.default_rng(0))
    numbers = [row.number for part in parts.values() for of_site in part.values() for row in of_site]
    assert len(numbers) == len(set(numbers)) == 40  # of 12 and 11 rows of a class, 12 and 8
    for site in "ab":
        members, others, pool = (sorted(r.label for r in parts[p][site]) for p in ("members", "others", "pool"))
        assert members == others == [0] * 3 + [1] * 2
        assert pool == sorted(members + others)


@pytest.mark.parametrize("count", [16, 17, 18, 19])
def test_a_shadow_is_trained_on_as_many_rows_as_the_target(count):
    """One of 10 rows learns less of each by heart than a target of 18, and the nets learn from it what "in" is."""
    rows = {s: [SimpleNamespace(label=k % 3) for k in range(3 * count)] for s in "ab"}
    parts = membership.parted(rows, np.random.default_rng(0))
    pool = sum(map(len, parts["pool"].values()))
    taught = lira.train_shadows(lambda rows_, _: {"n": len(rows_)}, pool, 4, np.random.default_rng(0))
    assert {w["n"] for w in taught.weights} == {sum(map(len, parts["members"].values()))} == {2 * 3 * (count // 4)}


@pytest.mark.parametrize(("value", "held"), [(0.9, "held"), (0.5, "NOT HELD")])
def test_controls_of_membership_are_judged(value, held):
    figures = dict.fromkeys(("AUROC, per class", "AUROC, global", "AUROC, loss"), around(value, 0.01))
    settings = {"rows": {"a": {"control": "win"}, "b": {"control": True}}}
    won, lost, plain = (membership.verdicts({n: figures}, settings)[0] for n in ("a", "b, noise only", "b"))
    assert won.endswith(f"the control to win: {held}.")
    assert lost.endswith(f"a control to lose: {'NOT HELD' if held == 'held' else 'held'}.")
    assert plain.endswith(f": {'above' if held == 'held' else 'not told from'} 0.5.")


def test_a_control_to_win_does_so_over_the_seeds_and_one_to_lose_fails_by_its_rows():
    figures = dict.fromkeys(
        ("AUROC, per class", "AUROC, global", "AUROC, loss"),
        resampling.over_seeds([around(v, 0.001) for v in (0.51, 0.7, 0.95)]),
    )
    settings = {"rows": {"a": {"control": "win"}, "b": {"control": True}}}
    won, lost, plain = (membership.verdicts({n: figures}, settings)[0] for n in ("a", "b, noise only", "b"))
    assert won.endswith("the control to win: NOT HELD.")
    assert lost.endswith("a control to lose: NOT HELD.")
    assert plain.endswith(": not told from 0.5.")


def test_a_control_to_lose_fails_on_either_side():
    """Where nobody trained on them, rows that score lower are of another distribution too."""
    figures = dict.fromkeys(("AUROC, per class", "AUROC, global", "AUROC, loss"), around(0.3, 0.01))
    assert membership.verdicts({"zero-shot": figures}, {"rows": {}})[0].endswith("a control to lose: NOT HELD.")


def test_an_estimate_keeps_its_interval_and_several_are_as_wide():
    one = membership.estimated([0.6, 0.55, 0.7], 30)
    assert resampling.interval(one) == pytest.approx({"mean": 0.6, "low": 0.55, "high": 0.7, "n": 30}, abs=2e-3)
    both = resampling.over_seeds([one, one])
    assert both.replicates == pytest.approx(one.replicates)


@pytest.mark.slow
@needs_data
def test_a_whole_small_membership_table():
    rows = {"private": {"name": "dp_fpl", "fields": "clipped = 'texts'", "control": True}}
    settings = small(rows)
    settings["rows_read"] = 180  # every shadow's half of a site's pool fills a batch
    settings["config"]["train.batch-size"] = 2
    found = membership.of_seed(settings, 0, Options())
    assert list(found) == ["zero-shot", "private", "private, noise only"]
    for row in found.values():
        assert all(0 <= low <= value <= high <= 1 for value, low, high in row["nets"].values())
    assert found["zero-shot"]["costs"] == {}
    assert found["private"]["costs"]["epsilon, replace-one"] < math.inf
