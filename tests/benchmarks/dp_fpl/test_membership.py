"""Membership in prompts: how rows are parted, how controls are judged, and a small whole table."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.dp_fpl import membership
from fedveil.benchmarks.run import Options
from tests.benchmarks.dp_fpl.small import around, needs_data
from tests.benchmarks.dp_fpl.small import settings as small


def test_members_others_and_pool_share_no_row_and_have_the_same_classes():
    rows = {s: [SimpleNamespace(label=k % 2, number=(s, k)) for k in range(23)] for s in "ab"}
    parts = membership.parted(rows, np.random.default_rng(0))
    numbers = [row.number for part in parts.values() for of_site in part.values() for row in of_site]
    assert len(numbers) == len(set(numbers)) == 46
    for site in "ab":
        members, others, pool = (sorted(r.label for r in parts[p][site]) for p in ("members", "others", "pool"))
        assert members == others == [0] * 4 + [1] * 3
        assert len(pool) == 9


@pytest.mark.parametrize(("value", "held"), [(0.9, "held"), (0.5, "NOT HELD")])
def test_controls_of_membership_are_judged(value, held):
    shown = {m: resampling.interval(around(value, 0.01)) for m in ("AUROC, per class", "AUROC, global", "AUROC, loss")}
    settings = {"rows": {"a": {"control": "win"}, "b": {"control": True}}}
    won, lost, plain = (
        membership.verdicts([{"name": n, "metrics": shown}], settings)[0] for n in ("a", "b, noise only", "b")
    )
    assert won.endswith(f"the control to win: {held}.")
    assert lost.endswith(f"a control to lose: {'NOT HELD' if held == 'held' else 'held'}.")
    assert "control" not in plain


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
