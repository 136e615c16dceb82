"""The memory plan compared with measurements: the text of the bound, and one turn of a tiny base."""

from __future__ import annotations

import tomllib

import pytest

from fedveil.config import parse
from fedveil.models.planning import memory
from fedveil.models.planning.model_config import ModelConfig
from fedveil_bench.device import memory_plan
from fedveil_bench.runner import BenchOptions
from tests.conftest import ROOT

PRESET = tomllib.loads((ROOT / "benchmarks/presets/core/planned.toml").read_text())["settings"]


@pytest.mark.parametrize(("mb", "word"), [(860, "held"), (849, "NOT HELD"), (1140, "held"), (1151, "NOT HELD")])
def test_the_bound_is_on_both_sides(mb, word):
    found = {"planned MB": float(mb), "compared MB": 1000.0, "planned by measured": mb / 1000}
    assert memory_plan._verdict("x", found, 0.15) == (
        f"x: planned {mb:,} MB, took 1,000 MB: {mb / 1000:.2f} (asked: within 15%, {word})."
    )


@pytest.mark.parametrize("settings", [PRESET, PRESET | PRESET["cpu"]], ids=["GPU", "CPU"])
def test_every_row_of_the_preset_can_be_planned(settings):
    """What cannot would be an error after minutes of loading."""
    kind, shape = settings["kind"], {n: v for n, v in settings["shape"].items() if n != "tie_word_embeddings"}
    needed = {}
    for name, keys in settings["runs"].items():
        adapter, chosen = memory_plan.choose_adapter(keys)
        plan = memory.plan_memory(ModelConfig(kind, shape), parse(settings["config"] | chosen), adapter, on_gpu=False)
        needed[name] = plan.needs("training")
    assert len(set(needed.values())) == len(needed)  # no two rows ask for the same


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind,shape",
    [
        ("gpt2", {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 400, "n_positions": 64}),
        ("llama", {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 400, "max_position_embeddings": 64}),
    ],
)  # fmt: skip
def test_a_turn_of_a_tiny_base_is_measured_in_a_process_of_its_own(kind, shape):
    small = {
        "kind": kind,
        "shape": shape,
        "rows": 6,
        "config": {"task.max-tokens": 16, "train.batch-size": 2},
        "runs": {"fp32": {}, "all": {"adapter": "all"}},
    }
    said: list[str] = []
    found = memory_plan.run_benchmark(PRESET | {"cpu": small, "steps": 2}, BenchOptions(device="cpu", say=said.append))
    assert [row["name"] for row in found.rows] == ["fp32", "all"]
    for row in found.rows:
        means = {name: of["mean"] for name, of in row["metrics"].items()}
        assert 200 < means["compared MB"] < 4000  # Python and its libraries, for the base has a MB
        assert means["planned by measured"] == pytest.approx(means["planned MB"] / means["compared MB"])
        assert means["tokens a second"] > 0
    assert len(found.verdicts) == len(said) == 2
