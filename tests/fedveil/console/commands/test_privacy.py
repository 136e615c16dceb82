from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from fedveil.console.main import main
from fedveil.console.runs.run_reader import RunView
from fedveil.console.web.report import privacy_section
from fedveil.console.web.report import run_page as report
from fedveil.contract.privacy import UNTIMED, Adjacency, Step
from fedveil.privacy import accounting

PLAN = ["privacy", "plan", "--rounds", "20", "--batch", "8", "--sites", "40", "240"]


def epsilons(text: str) -> list[float]:
    return [float(e) for e in re.findall(r"epsilon ([\d.]+) at", text)]


def test_a_plan_there_and_back(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main([*PLAN, "--sampling", "disjoint", "--epsilon", "2"]) == 0
    there = capsys.readouterr().out
    assert UNTIMED not in there
    assert there.count("(replace-one)") == 2
    worst, better = epsilons(there)
    assert better < worst <= 2
    assert worst > 1.98
    z = re.search(r"noise_local = ([\d.]+)", there)[1]
    assert main([*PLAN, "--sampling", "disjoint", "--noise-local", z, "--noise-global", z]) == 0
    assert epsilons(capsys.readouterr().out) == pytest.approx([worst, better])


@pytest.mark.long
def test_a_plan_of_dp_sgd_there_and_back(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    steps = ["--exchange", "epoch", "--steps", "3"]
    assert main([*PLAN, *steps, "--epsilon", "2"]) == 0
    there = capsys.readouterr().out
    z = re.search(r"noisy steps, .*: dp.noise-multiplier = ([\d.]+)", there)[1]
    assert main([*PLAN, *steps, "--noise-multiplier", z]) == 0
    back = capsys.readouterr().out
    assert epsilons(back) == pytest.approx(epsilons(there), rel=1e-3)
    assert max(epsilons(back)) <= 2


def test_a_plan_of_noise_in_the_sum_has_both_figures(capsys, monkeypatch):
    """Against all others together dp.noise-multiplier is a third of itself, of private and shared part the latter."""
    monkeypatch.setenv("COLUMNS", "220")
    whole = ["privacy", "plan", "--rounds", "10", "--batch", "40", "--sites", "40"]
    assert main([*whole, "--noise-multiplier", "6", "--honest", "9", "--exchange", "epoch"]) == 0
    stdout = capsys.readouterr().out
    assert UNTIMED in stdout
    counted, alone = epsilons(stdout)
    assert main([*whole, "--noise-multiplier", "2", "--honest", "1", "--exchange", "epoch"]) == 0
    assert epsilons(capsys.readouterr().out)[1] == alone
    assert 0 < counted < alone
    assert main([*whole, "--noise-local", "6", "--noise-global", "6", "--honest", "9"]) == 0
    assert epsilons(capsys.readouterr().out)[1] == pytest.approx(
        accounting.compute_epsilon(
            {Step("summed", 0, 0, (1 / 36 + 9 / 36) ** -0.5, 1.0): 10}, 1e-5, Adjacency.REPLACE_ONE
        ),
        rel=1e-3,
    )


@pytest.mark.parametrize(
    "extra, named",
    [
        (["--epsilon", "1", "--honest", "0"], "--honest"),
        (["--epsilon", "1", "--honest", "2", "--exchange", "epoch", "--steps", "3"], "--honest"),
        (["--epsilon", "1", "--honest", "2", "--sampling", "fixed"], "--honest"),
        (["--epsilon", "0"], "epsilon"),
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "1", "--delta", "0"], "delta"),
        (["--epsilon", "1", "--noise-local", "2"], "--epsilon"),
        (["--noise-local", "2"], "--epsilon"),
        (["--noise-multiplier", "2", "--epsilon", "1"], "--epsilon"),
        (["--noise-multiplier", "-2"], "--noise-local"),
        (["--noise-local", "-2", "--noise-global", "2"], "--noise-local"),
        (["--epsilon", "1", "--steps", "3"], "--steps"),
        (["--epsilon", "1", "--batch", "41"], "batch-size"),
        (["--epsilon", "1", "--sampling", "fixed", "--adjacency", "zero-out"], "sampling"),
    ],
)
def test_bad_plans_are_refused(capsys, extra, named):
    assert main([*PLAN, *extra]) == 2
    assert named in capsys.readouterr().err


def run_of(method: str = "dp_fpl", deterministic: bool = False, **fields) -> RunView:
    config = {"run.deterministic": deterministic, "train.batch-size": 8}
    attempts = [
        {"round": r, "cohort": ["a", "b"], "reports": {"a": {"num_examples": 40, "steps": 1.0}}, "weights": "x"}
        for r in (0, 1, 1, 2)
    ]
    return RunView(Path("run"), {"config": config, "method": {"name": method, "fields": fields}}, {}, attempts, {}, [])


@pytest.mark.long
def test_the_report_states_the_honest_epsilon_of_every_site():
    first, a, b = privacy_section.privacy_statements(run_of(noise_local=4.0, noise_global=4.0))
    assert first.endswith(UNTIMED)
    assert "trusted" not in first
    assert "nominal" not in first
    assert "a: 40 examples, 4 participations of 1 steps: at most epsilon" in a
    assert "(replace-one)" in a
    assert "the server does not know the site's number of examples" in b
    mean = privacy_section.privacy_statements(run_of(mode="code", epsilon=0.1, sampling="disjoint", rounds=3))
    assert UNTIMED not in mean[0]
    assert "nominal epsilon was 0.1" in mean[0]
    assert "except the server" in mean[0]
    assert epsilons(mean[1])[0] > 1  # a batch of 8, clipped as a whole
    assert "(replace-one), this run only" in report._privacy(run_of())


def test_a_repeated_round_is_charged_twice():
    from fedveil.contract.privacy import Adjacency
    from fedveil.privacy import accounting

    (epsilon,) = epsilons(
        privacy_section.privacy_statements(run_of(sampling="disjoint", noise_local=9.0, noise_global=9.0))[1]
    )
    # 5 batches an epoch: rounds 0 to 2 meet a row once, the repetition once more
    charges = {Step("gaussian", 0, 0, 9 / math.sqrt(2)): 2}
    assert epsilon == pytest.approx(accounting.compute_epsilon(charges, 1e-5, Adjacency.REPLACE_ONE), rel=1e-3)


def test_seeded_noise_and_methods_without_a_claim_say_so():
    assert privacy_section.privacy_statements(run_of(deterministic=True)) == [
        "Not private: seeded noise (run.deterministic = true). Epsilon infinite."
    ]
    assert "no claim" in privacy_section.privacy_statements(run_of("fedavg"))[0]
    assert "rho" in privacy_section.privacy_statements(run_of("fedavg", rho=1))[0]
