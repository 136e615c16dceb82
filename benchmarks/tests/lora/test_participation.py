"""The row split of lora/participation: one kind per candidate, and no row belongs to two parts."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.contract.task import Example
from fedveil.errors import ConfigError
from fedveil_bench import runner
from fedveil_bench.lora.participation import _area, _Cut

SETTINGS = runner.read_preset("lora/participation", "full")["settings"]
SMALL = SETTINGS | {"clients": 3, "absent": 2, "rows_a_site": 10, "rows_known": 5}
ROWS = Example.from_columns([{"mr": f"name[R{i % 8}], food[Any]", "ref": f"row {i}"} for i in range(240)])


def kinds(rows) -> set[str]:
    return {row.values["mr"] for row in rows}


def test_each_candidate_has_a_kind_of_its_own_and_no_row_is_twice_anywhere():
    cut = _Cut.of(ROWS, SMALL, 0, alike=False)
    assert list(cut.trained) == ["site-00", "site-01", "site-02"]
    assert list(cut.held) == [*cut.trained, "absent-00", "absent-01"]
    parts = [*cut.trained.values(), *cut.held.values(), cut.nobody]
    assert [len(part) for part in parts] == [10] * 3 + [5] * 6
    assert all(len(kinds(part)) == 1 for part in parts)
    assert all(kinds(cut.trained[site]) == kinds(cut.held[site]) for site in cut.trained)
    assert len({*(name for rows in cut.held.values() for name in kinds(rows)), *kinds(cut.nobody)}) == 6
    texts = [row.values["ref"] for part in parts for row in part]
    assert len(texts) == len(set(texts))


def test_sites_cut_by_chance_have_every_kind():
    cut = _Cut.of(ROWS, SMALL, 0, alike=True)
    parts = [*cut.trained.values(), *cut.held.values(), cut.nobody]
    assert [len(part) for part in parts] == [10] * 3 + [5] * 6
    assert all(len(kinds(part)) > 2 for part in parts)
    texts = [row.values["ref"] for part in parts for row in part]
    assert len(texts) == len(set(texts))


def test_too_few_kinds_are_refused():
    with pytest.raises(ConfigError, match="expected at most 7 together"):
        _Cut.of(ROWS, SMALL | {"absent": 6}, 0, alike=False)


def test_a_site_in_all_rounds_is_a_guess():
    scores, truth = np.array([[1.0, 2.0], [3.0, 0.0]]), np.array([[False, True], [True, False]])
    assert _area(scores, truth) == 1.0
    assert _area(scores, ~truth) == 0.0
    assert _area(scores, np.ones((2, 2), bool)) == 0.5


def test_claims_are_about_rows_of_the_table():
    for claim in SETTINGS["claims"]:
        assert {claim["row"], *([claim["than"]] if isinstance(claim["than"], str) else [])} <= set(SETTINGS["rows"])
