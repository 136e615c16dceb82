"""Gaps minus those of their controls, on made-up figures."""

from __future__ import annotations

import pytest

from benchmarks.tests.dp_fpl.small import around
from fedveil.errors import ConfigError
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedqsn import gaps, proxies
from fedveil_bench.runner import BenchOptions

CONTROLS = {"w = 2": "open"}


def of_seeds(*values: float) -> ResampledMetric:
    """Seeds that share their rows' noise, as the models of one table do."""
    return resampling.over_seeds([ResampledMetric(v, v - 0.5 + around(0.5, 0.02).replicates, 10) for v in values])


def table(mine: ResampledMetric, control: ResampledMetric) -> dict[str, dict[str, ResampledMetric]]:
    of_label = {"w = 2": mine, "open": control, "FedSP": mine}
    return {f"{label} {kind}": {"loss": gap} for label, gap in of_label.items() for kind in ("gap", "tuned gap")}


def test_the_control_s_gap_is_taken_off_seed_by_seed_and_row_by_row():
    """+0.101 beside +0.098 is next to nothing, however far seeds and rows lie apart."""
    rows = table(of_seeds(0.051, 0.101, 0.152), of_seeds(0.048, 0.098, 0.148))
    found = gaps.less_controls(rows, CONTROLS)
    assert set(found) == {"w = 2 gap less control", "w = 2 tuned gap less control"}
    interval = resampling.compute_interval(found["w = 2 tuned gap less control"]["loss"])
    assert interval["seeds"] == pytest.approx([0.003, 0.003, 0.004])
    assert 0.001 < interval["low"] < interval["mean"] < interval["high"] < 0.006


def test_a_gap_is_judged_beside_its_control_alone():
    same = of_seeds(0.09, 0.10, 0.11)
    for mine, word in (
        (same, "no gap can be told"), (of_seeds(0.29, 0.30, 0.31), "a gap"),
        (of_seeds(0.01, 0.02, 0.03), "less than where nothing is hidden"),
    ):  # fmt: skip
        rows = table(mine, same)
        said = gaps.judge_gaps(rows | gaps.less_controls(rows, CONTROLS), CONTROLS, 3)
        (judged,) = [text for text in said if text.startswith("w = 2 tuned gap less control, loss: ")]
        assert judged.endswith(f": {word}.")
        (control,) = [text for text in said if text.startswith("open tuned gap, loss: +0.100 [")]
        assert control.endswith("the control: nothing is hidden.")
        (alone,) = [text for text in said if text.startswith("FedSP tuned gap, loss: ")]
        assert alone.endswith("not judged, because it has no control.")
        assert not [text for text in said if text.startswith("w = 2 tuned gap, loss")]


@pytest.mark.parametrize("control", ["nobody", "w = 2"])
def test_a_control_that_is_no_other_method_is_refused_before_anything_is_trained(control):
    methods = {"w = 2": {"control": control}, "open": {}, "FedSP": {}}
    with pytest.raises(ConfigError, match=r"methods.w = 2.control: expected one of \['open', 'FedSP'\], found"):
        proxies.run_benchmark({"methods": methods}, BenchOptions())
