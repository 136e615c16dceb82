"""A demo on own rows says what it trains on, keeps rows apart for the attack, and plans its noise."""

from __future__ import annotations

import json

import pytest

from fedveil.console import demo_plan
from fedveil.console.demo_settings import SETTINGS


def rows(folder, train: int, test: int = 0):
    folder.mkdir()
    for split, count in (("train", train), ("test", test)):
        if count:
            lines = (json.dumps({"mr": f"row {split} {i}", "ref": f"text {i}"}) for i in range(count))
            (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def planned(data, sites=3, rounds=2, noise=False, **given):
    given = {"task.data": str(data), **{key.replace("__", ".").replace("_", "-"): v for key, v in given.items()}}
    return demo_plan.plan_demo(given, {**SETTINGS, **given}, "fedavg", sites, rounds, noise)


@pytest.mark.parametrize(("count", "kept"), [(515, 103), (320, 64), (200, 64), (128, 64), (127, 63), (3, 1), (1, 0)])
def test_a_fifth_is_kept_apart_and_at_least_as_many_as_are_attacked(count, kept):
    assert demo_plan._kept_apart(count) == kept


def test_all_rows_of_own_data_are_used_but_those_kept_apart(tmp_path):
    plan = planned(rows(tmp_path / "mine", 1545, 20))
    assert plan.settings["task.examples-per-site"] == 412
    assert (
        plan.lines[0]
        == "site-0: trains on 412 of 515 rows, holds out 103 for the attack, which gets 64 members and 64 non-members"
    )
    assert len([line for line in plan.lines if ": trains on " in line]) == 3
    assert f"The server scores the model on the test split of {tmp_path / 'mine'}" in plan.lines
    assert plan.settings["task.evaluation"] == str(tmp_path / "mine")
    assert "Each method takes 612 steps of 8 rows in total, at train.learning-rate = 0.003" in plan.lines[-1]
    assert plan.noise == {}


def test_a_limit_of_the_user_is_kept_and_named_and_missing_test_rows_are_said(tmp_path):
    plan = planned(rows(tmp_path / "mine", 300), task__examples_per_site=50)
    assert plan.settings["task.examples-per-site"] == 50
    assert plan.lines[0].startswith("site-0: trains on 50 of 100 rows (task.examples-per-site), holds out 50")
    assert plan.lines[1].startswith("site-0: intervals are meaningless with fewer than 128 rows")
    assert any(line.startswith("The server scores nothing: ") for line in plan.lines)
    assert plan.settings["task.evaluation"] == ""
    given = planned(rows(tmp_path / "other", 300), task__evaluation="/elsewhere")
    assert given.settings["task.evaluation"] == "/elsewhere"


def test_a_single_file_has_no_test_rows_of_its_own(tmp_path):
    plan = planned(rows(tmp_path / "mine", 400) / "train.jsonl")
    assert plan.settings["task.evaluation"] == ""


def test_noise_is_planned_for_the_smallest_site(tmp_path):
    own = demo_plan.plan_demo({}, dict(SETTINGS), "fedavg", 3, 2, True)
    assert own.noise["dp.noise-multiplier"] == pytest.approx(0.935, abs=0.002)  # the demo's own 0.94, a little above
    assert [line.split(",")[0] for line in own.lines] == [
        f"site-{i} with +dp: epsilon 7.99 at delta 1e-05" for i in range(3)
    ]
    more = planned(rows(tmp_path / "mine", 1545), noise=True)
    assert more.noise["dp.noise-multiplier"] < 0.7
    assert "dp.noise-multiplier" not in planned(tmp_path / "mine", noise=True, dp__noise_multiplier=2.0).noise
