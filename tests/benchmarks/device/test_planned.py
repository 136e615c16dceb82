"""The plan of memory beside what was taken: the bound's words by hand, and one turn of a tiny base."""

from __future__ import annotations

import tomllib

import pytest

from fedveil.benchmarks.device import planned
from fedveil.benchmarks.run import Options
from tests.conftest import ROOT

PRESET = tomllib.loads((ROOT / "benchmarks/presets/core/planned.toml").read_text())["settings"]


@pytest.mark.parametrize(("mb", "word"), [(860, "held"), (849, "NOT HELD"), (1140, "held"), (1151, "NOT HELD")])
def test_the_bound_is_on_both_sides(mb, word):
    found = {"planned MB": float(mb), "compared MB": 1000.0, "planned by measured": mb / 1000}
    assert planned._verdict("x", found, 0.15) == (
        f"x: planned {mb:,} MB, took 1,000 MB: {mb / 1000:.2f} (asked: within 15%, {word})."
    )


def test_every_row_of_the_preset_is_of_a_plan():
    """What is not planned, as dp.clip, would be an error after minutes of loading."""
    for settings in (PRESET, PRESET | PRESET["cpu"]):
        for keys in settings["runs"].values():
            assert set(keys) <= {
                "adapter", "train.precision", "train.checkpointing", "train.quantized-base", "train.optimiser",
            }  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_turn_of_a_tiny_base_is_measured_in_a_process_of_its_own():
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 400, "n_positions": 64}
    small = {
        "shape": shape,
        "kind": "gpt2",
        "rows": 6,
        "config": {"task.max-tokens": 16, "train.batch-size": 2},
        "runs": {"fp32": {}, "all": {"adapter": "all"}},
    }
    said: list[str] = []
    found = planned.run(PRESET | {"cpu": small, "steps": 2}, Options(device="cpu", say=said.append))
    assert [row["name"] for row in found.rows] == ["fp32", "all"]
    for row in found.rows:
        means = {name: of["mean"] for name, of in row["metrics"].items()}
        assert 200 < means["compared MB"] < 4000  # Python and its libraries, for the base has a MB
        assert means["planned by measured"] == pytest.approx(means["planned MB"] / means["compared MB"])
        assert means["tokens a second"] > 0
    assert len(found.verdicts) == len(said) == 2
