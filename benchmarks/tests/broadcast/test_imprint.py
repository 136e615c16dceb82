"""The preset's runner, on one batch."""

from __future__ import annotations

import tomllib

import pytest

from fedveil_bench import folders
from fedveil_bench.broadcast import imprint
from fedveil_bench.runner import BenchOptions

PRESET = tomllib.loads((folders.presets_folder() / "broadcast/imprint.toml").read_text())["settings"]


@pytest.fixture(scope="module")
def found():
    rows = {
        name: PRESET["rows"][name] for name in ("honest broadcast", "crafted, after a ramp of 1", "crafted, within 1")
    }
    settings = {**PRESET, "rows": rows, "batches": 1}
    return imprint.of_seed(settings, 0, BenchOptions())


@pytest.mark.long
def test_the_controls_stand(found):
    assert found["crafted, after a ramp of 1"][0]["rows"] == 1.0  # the ramp ends at the crafted pair
    assert found["honest broadcast"][0] == {"rows": 0.0, "false": 0.0, "change": 0.0, "norm": 1.0}


@pytest.mark.long
def test_a_change_is_as_large_as_asked_and_a_ramp_takes_rounds(found):
    assert found["crafted, within 1"][0]["change"] == pytest.approx(1.0, rel=1e-3)
    assert found["crafted, after a ramp of 1"][0]["ramp rounds"] > 1


def test_controls_that_fail_are_said():
    metrics = {name: {"rows": {"mean": 0.5}, "change": {"mean": 1.0}} for name in ("crafted", "honest broadcast")}
    assert "DO NOT STAND" in imprint._verdicts(metrics, PRESET)[0]


def test_claims_are_over_seeds_and_the_file_keeps_their_values(monkeypatch):
    """A share that no batch of any seed has moved is within every margin."""
    rows = PRESET["rows"]
    shares = dict.fromkeys(rows, 0.0) | {"crafted": 0.9, "crafted, after a ramp of 0.25": 0.9}
    answers = [
        {name: [{"rows": share * (1 - 0.02 * i), "change": 1.0}] * 2 for name, share in shares.items()}
        for i in range(5)
    ]
    monkeypatch.setattr(imprint.seeds, "run_seeds", lambda *_: answers)
    found = imprint.run_benchmark(dict(PRESET), BenchOptions())
    words = [said.rpartition(": ")[2] for said in found.verdicts if "the claim has" in said]
    assert words == ["holds here."] * 6
    crafted = next(row for row in found.rows if row["name"] == "crafted")
    assert crafted["metrics"]["rows"]["seeds"] == pytest.approx([0.9, 0.882, 0.864, 0.846, 0.828])
    for answer in answers:
        answer["crafted, within 1"] = [{"rows": 0.5, "change": 1.0}] * 2
    said = imprint.run_benchmark(dict(PRESET), BenchOptions()).verdicts
    assert any(s.startswith("rows of crafted, within 1 ") and s.endswith("does not hold here.") for s in said)
