"""Six points of core/faults: real runs in which one process is killed end like undisturbed runs."""

from __future__ import annotations

import tomllib

import pytest

from fedveil.console.flower import local_deployment
from fedveil_bench.core import faults
from fedveil_bench.runner import BenchOptions
from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_six_runs_of_which_a_process_is_killed_end_as_undisturbed_ones_do():
    settings = tomllib.loads((ROOT / "benchmarks/presets/core/faults.toml").read_text())["settings"]
    outcome = faults.run_benchmark(settings | {"points": 6}, BenchOptions(launch=local_deployment))
    assert outcome.verdicts == ["6 of 6 points ended as the undisturbed run does."]
    assert sum(row["metrics"]["killed"]["mean"] for row in outcome.rows) >= 1
