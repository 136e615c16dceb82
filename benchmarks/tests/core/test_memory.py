"""The memory plan compared with the measurements of core/memory."""

from __future__ import annotations

import json
import tomllib

import pytest

from fedveil import strategies
from fedveil.config import parse
from fedveil.models.planning.model_config import ModelConfig
from fedveil.testing.planner import plan_memory
from tests.conftest import ROOT

PRESET = tomllib.loads((ROOT / "benchmarks/presets/core/memory.toml").read_text())["settings"]
RESULTS = json.loads((ROOT / "benchmarks/results/core_memory.json").read_text())["rows"]
ROWS = [row for row in RESULTS if not row["name"].startswith(("before", "half way"))]  # of the code as it is


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_estimate_is_within_15_per_cent_of_each_worker_that_was_measured(row):
    """fedveil bench core/memory, over gRPC, on a CPU in fp32."""
    shape = next(name for name in PRESET["bases"] if name in row["name"])
    about = next(run["config"] for name, run in PRESET["runs"].items() if row["name"].startswith(name))
    optimizer = "adamw-8bit" if "adamw-8bit" in row["name"] else "adamw"
    config = parse(PRESET["config"] | about | {"train.optimizer": optimizer})
    method = strategies.create_method(config.method.name, config.method.params)
    plan = plan_memory(ModelConfig("gpt2", PRESET["bases"][shape], 2), config, method.adapter, on_gpu=False)
    assert plan.peak == ("loading" if "LoRA" in row["name"] else "training")
    assert plan.needed / 1e6 == pytest.approx(row["metrics"]["worker MB"]["mean"], rel=0.15)


def test_six_workers_were_measured():
    assert len(ROWS) == 6
