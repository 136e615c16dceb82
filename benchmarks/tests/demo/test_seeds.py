"""The demo over seeds: a small seed runs in process, and claims and figures agree with its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil.attacks.audit.delong import NormalEstimate, RunDifference
from fedveil.console import demo_settings
from fedveil.console.commands.getting_started.demo import DemoRun
from fedveil.console.web.report.tradeoff import AttackedSite, TradeoffRun
from fedveil_bench import runner
from fedveil_bench.demo import seeds
from fedveil_bench.runner import BenchOptions

SETTINGS = runner.read_preset("demo/seeds", "full")["settings"]


def test_the_preset_has_the_arms_of_the_demo():
    arms = {DemoRun(arm["method"], arm["defense"]).name for arm in SETTINGS["arms"].values()}
    default = {DemoRun(*name.partition("+")[::2]).name for name in demo_settings.METHODS.split(",")}
    assert default <= arms
    assert [name for name, arm in SETTINGS["arms"].items() if name != seeds.AGAIN
            and name != DemoRun(arm["method"], arm["defense"]).name] == []  # fmt: skip


@pytest.mark.long
def test_a_small_seed_has_figures_of_each_arm():
    arms = {name: SETTINGS["arms"][name] for name in ("fedavg", "fedavg-secure", "fedavg-dp")}
    changes = {"task.examples-per-site": 24, "train.epochs": 1, "run.rounds": 1}
    answer = seeds.of_seed({"arms": arms, "config": changes}, 7, BenchOptions())
    assert answer["arms"].keys() == arms.keys()
    for name, figures in answer["arms"].items():
        assert 0 < figures["mean"] <= figures["worst"] <= 100
        assert (figures["less wrong"] is None) is (name == "fedavg-secure")
        assert 1 < figures["loss"] < 3
        assert figures["MB"] > 0.4
    assert answer["arms"]["fedavg"]["worst"] > answer["arms"]["fedavg-dp"]["mean"]
    assert answer["claims"].keys() == {
        "fedavg: lower bound of the mean above 85", "fedavg-secure: lower bound of the mean above 70",
        "fedavg-secure reveals less than fedavg", "fedavg-dp reveals less than fedavg",
        "fedavg-dp reveals less than fedavg-secure", "fedavg-dp: test loss above that of fedavg",
    }  # fmt: skip


def run_of(name: str, value: float, *less: tuple[str, float], **fields) -> TradeoffRun:
    sites = [AttackedSite("site-0", value, 0.5, 0.02, 64, 64), AttackedSite("site-1", value - 0.02, 0.52, 0.02, 64, 64)]
    differences = [RunDifference(base, NormalEstimate(by, 0.01)) for base, by in less]
    mean = NormalEstimate(value - 0.01, 0.01)
    return TradeoffRun(name, "fedavg", 2.2, 1.9, 2_000_000, attack="alignment", sites=sites, mean=mean,
                       differences=differences, digest=name, **fields)  # fmt: skip


def test_claims_are_those_of_the_runs():
    plain = run_of("fedavg", 0.98)
    sums = run_of("fedavg-secure", 0.9, ("fedavg", 0.08), secure=True)
    noise = run_of("fedavg-dp", 0.6, ("fedavg", 0.38), ("fedavg-secure", 0.02), noise="noise")
    again = run_of("again", 0.97, ("fedavg", 0.01))
    claims = seeds.check_claims([plain, sums, replace(noise, after=2.0), again])
    assert claims == {
        "fedavg: lower bound of the mean above 85": True, "fedavg-secure: lower bound of the mean above 70": True,
        "fedavg-secure reveals less than fedavg": True, "fedavg-dp reveals less than fedavg": True,
        "fedavg-dp reveals less than fedavg-secure": False, "fedavg-dp: test loss above that of fedavg": True,
        "two plain runs of one seed are told apart": False,
        "two plain runs of one seed have a p-value of at most 1 %": False,
    }  # fmt: skip
    loud = run_of("again", 0.9, ("fedavg", 0.08))
    assert seeds.check_claims([plain, loud])["two plain runs of one seed are told apart"] is True
    assert seeds.check_claims([plain, run_of("fedavg-secure", 0.7, secure=True)])[
        "fedavg-secure: lower bound of the mean above 70"
    ] is False  # fmt: skip


def test_rows_have_each_seed_and_verdicts_count_them(monkeypatch):
    answers = [
        {"arms": {"fedavg": seeds.measure_arm(run_of("fedavg", value))}, "claims": {"c": value > 0.9}}
        for value in (0.9, 0.98)
    ]
    monkeypatch.setattr(seeds.seeds, "run_seeds", lambda *_: answers)
    done = seeds.run_benchmark({"first_seed": 5}, BenchOptions())
    (row,) = done.rows
    assert row["metrics"]["worst"]["seeds"] == pytest.approx([90, 98])
    assert row["metrics"]["worst"]["mean"] == pytest.approx(94)
    assert row["metrics"]["less wrong"]["mean"] == pytest.approx(42)
    assert done.verdicts == ["c: on 1 of 2 seeds."]
    assert done.differences == ["this run: 2 seeds from 5"]
