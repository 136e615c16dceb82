from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from fedveil.console.main import main
from fedveil.console.runs import privacy_statements
from fedveil.console.runs.run_reader import RunView
from fedveil.contract.privacy import UNTIMED, Adjacency, Step
from fedveil.privacy import accounting

PLAN = ["privacy", "plan", "--rounds", "20", "--batch", "8", "--sites", "40", "240"]
DP_FPL = ["--set", "method.name=dp_fpl"]
WHOLE = ["privacy", "plan", "--rounds", "10", "--batch", "40", "--sites", "40"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")


def epsilons(text: str) -> list[float]:
    return [float(e) for e in re.findall(r"epsilon ([\d.]+) at", text)]


def planned(capsys, *arguments: str) -> tuple[list[float], str]:
    """The epsilons of the plan's table, and all of its output."""
    assert main([*arguments]) == 0
    stdout = capsys.readouterr().out
    return epsilons(stdout.partition("In this run alone")[0]), stdout


def test_a_plan_there_and_back(capsys):
    (worst, better), there = planned(capsys, *PLAN, *DP_FPL, "--sampling", "disjoint", "--epsilon", "2")
    assert "does not time the site" not in there
    assert "for the site with the highest cost (40 examples" in there
    assert better < worst <= 2
    assert worst > 1.98
    z = re.search(r"noise_local = ([\d.]+)", there)[1]
    back, _ = planned(capsys, *PLAN, "--sampling", "disjoint", "--noise-local", z, "--noise-global", z)
    assert back == pytest.approx([worst, better])


@pytest.mark.long
def test_a_plan_of_dp_sgd_there_and_back(capsys):
    there, stdout = planned(capsys, *PLAN, "--steps", "3", "--epsilon", "2")
    assert "noise_local" not in stdout
    z = re.search(r"^dp.noise-multiplier = ([\d.]+)", stdout, re.MULTILINE)[1]
    back, _ = planned(capsys, *PLAN, "--steps", "3", "--noise-multiplier", z)
    assert back == pytest.approx(there, rel=1e-3)
    assert max(back) <= 2


def test_a_plan_reads_the_run_config_as_every_other_command_does(capsys, tmp_path):
    """By an FFT accountant, n 100, b 10, z 1.5, T 50 costs 4.1602 under replace-one and 2.5302 under zero-out."""
    file = tmp_path / "run.toml"
    file.write_text("[run]\nrounds = 5\n[train]\nbatch-size = 10\n[dp]\nnoise-multiplier = 1.5\ndelta = 1e-5\n")
    plan = ["privacy", "plan", "--config", str(file), "--sites", "100"]
    (epsilon,), stdout = planned(capsys, *plan)
    assert epsilon == pytest.approx(4.1602, rel=0.01)
    assert stdout.splitlines()[-1].startswith("In this run alone, for the site with the highest cost (100 examples")
    for words in (
        f"epsilon {epsilon:g} at delta 1e-05 (replace-one) against the server, other sites and all of them together",
        "unit: one example of one site's data set",
        "relation: the example is replaced by any other one (replace-one)",
        "sampling: Poisson batches",
        "accountant: privacy loss distributions",
        "provided that the server does not time the site",
    ):
        assert words in stdout.splitlines()[-1]
    (zeroed,), stdout = planned(capsys, *plan, "--set", "dp.adjacency=zero-out")
    assert zeroed == pytest.approx(2.5302, rel=0.01)
    assert "the number of examples is public" in stdout
    (stepped,), _ = planned(capsys, *plan, "--set", "train.max-steps=1")
    assert stepped < epsilon


@pytest.mark.parametrize(
    "option", [("--rounds", "6"), ("--batch", "12"), ("--delta", "1e-6"), ("--noise-multiplier", "2"),
               ("--adjacency", "zero-out"), ("--steps", "3"), ("--honest", "2")],
)  # fmt: skip
def test_an_option_that_contradicts_the_run_config_is_refused(capsys, option):
    config = [
        "run.rounds=5", "train.batch-size=10", "dp.delta=1e-5", "dp.noise-multiplier=1.5", "dp.adjacency=replace-one",
        "train.max-steps=2", "secure.min-sites=5",
    ]  # fmt: skip
    given = [word for pair in config for word in ("--set", pair)]
    assert main(["privacy", "plan", *given, *option, "--sites", "100"]) == 2
    assert f"{option[0]}: expected" in capsys.readouterr().err


def test_noise_is_computed_for_the_epsilon_of_the_run_config(capsys):
    plan = ["privacy", "plan", "--sites", "100", "--set", "train.batch-size=10", "--set", "dp.epsilon=3"]
    (epsilon,), stdout = planned(capsys, *plan)
    assert 2.9 < epsilon <= 3
    assert "needs dp.noise-multiplier" in stdout
    assert main([*plan, "--noise-multiplier", "0.6"]) == 0
    assert "a site's ledger stops this run early, at the run's own limit of 3" in capsys.readouterr().err


def test_a_plan_of_noise_in_the_sum_has_both_figures(capsys):
    """Against all others together dp.noise-multiplier is a third of itself, of private and shared part the latter."""
    (counted, alone), stdout = planned(capsys, *WHOLE, "--noise-multiplier", "6", "--honest", "9")
    assert "noise_local" not in stdout
    assert (
        f"epsilon {counted:g} at delta 1e-05 (replace-one) against the server, other sites and the server with 1 other "
        f"site; epsilon {alone:g} at delta 1e-05 (replace-one) against all of them together"
    ) in stdout
    assert "provided that 9 sites in every sum keep their share of the noise secret" in stdout
    of_one, of_one_alone = planned(capsys, *WHOLE, "--noise-multiplier", "2", "--honest", "1")[0]
    assert of_one == of_one_alone <= alone < 1.1 * of_one  # equal where one site's noise is too coarse as well
    assert 0 < counted < alone
    (_, alone), _ = planned(capsys, *WHOLE, "--noise-local", "6", "--noise-global", "6", "--honest", "9")
    assert alone == pytest.approx(
        accounting.compute_epsilon(
            {Step("summed", 0, 0, (1 / 36 + 9 / 36) ** -0.5, 1.0): 10}, 1e-5, Adjacency.REPLACE_ONE
        ),
        rel=1e-3,
    )


def test_without_colluders_another_site_still_knows_its_own_share(capsys):
    """h = 4 sites with c = 0: against another site the noise of three counts, z sqrt(3 / 4)."""
    config = ["--set", "secure.max-colluders=0", "--noise-multiplier", "6"]
    _, stdout = planned(capsys, *WHOLE, *config, "--honest", "4")
    (three, _), _ = planned(capsys, *WHOLE, "--noise-multiplier", f"{6 * math.sqrt(3 / 4)!r}", "--honest", "3")
    assert f"epsilon {three:g} at delta 1e-05 (replace-one) against another site" in stdout


@pytest.mark.parametrize(
    "extra, named",
    [
        (["--epsilon", "1", "--honest", "0"], "--honest"),
        (["--epsilon", "1", "--honest", "2", "--steps", "3"], "steps"),
        ([*DP_FPL, "--epsilon", "1", "--honest", "2", "--sampling", "fixed"], "sampling"),
        (["--epsilon", "0"], "epsilon"),
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "1", "--delta", "0"], "delta"),
        (["--epsilon", "1", "--noise-local", "2"], "--noise-local"),
        (["--epsilon", "1", "--noise-local", "2", "--noise-global", "2"], "--epsilon"),
        (["--noise-local", "2"], "--noise-local"),
        (["--noise-multiplier", "2", "--epsilon", "1"], "--epsilon"),
        (["--noise-multiplier", "-2"], "noise-multiplier"),
        (["--noise-local", "-2", "--noise-global", "2"], "noise_local"),
        ([*DP_FPL, "--noise-multiplier", "2"], "--noise-multiplier"),
        ([*DP_FPL, "--epsilon", "1", "--steps", "3"], "--steps"),
        (["--epsilon", "1", "--set", "train.max-steps=1", "--set", "train.epochs=0"], "steps"),
        ([*DP_FPL, "--epsilon", "1", "--sampling", "fixed", "--adjacency", "zero-out"], "sampling"),
        (["--epsilon", "1", "--sampling", "disjoint"], "--sampling"),
        (["--epsilon", "1", "--exchange", "epoch"], "--exchange"),
        (["--set", "run.rounds=20"], "--epsilon"),
    ],
)
def test_bad_plans_are_refused(capsys, extra, named):
    assert main([*PLAN, *extra]) == 2
    assert named in capsys.readouterr().err


def test_a_batch_larger_than_a_site_is_refused(capsys):
    assert main(["privacy", "plan", "--sites", "40", "240", "--epsilon", "1", "--batch", "41"]) == 2
    assert "batch-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra, warning",
    [
        (["--noise-multiplier", "3", "--delta", "0.5"], "delta 0.5 is at least 0.01"),
        (["--noise-multiplier", "3", "--delta", "0.005"], "delta 0.005 is above 1 / 240"),
        (["--noise-multiplier", "1e-9"], "a noise multiplier of 1e-09 hides nothing"),
        (["--noise-multiplier", "3"], ""),
    ],
)
def test_settings_that_promise_nothing_are_warned_of(capsys, extra, warning):
    assert main([*PLAN, *extra]) == 0
    stderr = capsys.readouterr().err
    assert warning in stderr
    assert bool(stderr) == bool(warning)


def run_of(method: str = "dp_fpl", deterministic: bool = False, **fields) -> RunView:
    config = {"run.deterministic": deterministic, "train.batch-size": 8}
    attempts = [
        {"round": r, "cohort": ["a", "b"], "reports": {"a": {"num_examples": 40, "steps": 1.0}}, "weights": "x"}
        for r in (0, 1, 1, 2)
    ]
    return RunView(Path("run"), {"config": config, "method": {"name": method, "fields": fields}}, {}, attempts, {}, [])


@pytest.mark.long
def test_the_report_states_the_honest_epsilon_of_every_site():
    first, a, b = privacy_statements.privacy_statements(run_of(noise_local=4.0, noise_global=4.0))
    assert first.endswith(UNTIMED)
    assert "trusted" not in first
    assert "nominal" not in first
    assert "a: 40 examples, 4 participations of 1 steps: at most epsilon" in a
    assert "(replace-one)" in a
    assert "the server does not know the site's number of examples" in b
    mean = privacy_statements.privacy_statements(run_of(mode="code", epsilon=0.1, sampling="disjoint", rounds=3))
    assert UNTIMED not in mean[0]
    assert "nominal epsilon was 0.1" in mean[0]
    assert "except the server" in mean[0]
    assert epsilons(mean[1])[0] > 1  # a batch of 8, clipped as a whole
    assert "all of them together, this run only" in " ".join(privacy_statements.privacy_statements(run_of()))


def test_a_repeated_round_is_charged_twice():
    from fedveil.contract.privacy import Adjacency
    from fedveil.privacy import accounting

    (epsilon,) = epsilons(
        privacy_statements.privacy_statements(run_of(sampling="disjoint", noise_local=9.0, noise_global=9.0))[1]
    )
    # 5 batches an epoch: rounds 0 to 2 meet a row once, the repetition once more
    charges = {Step("gaussian", 0, 0, 9 / math.sqrt(2)): 2}
    assert epsilon == pytest.approx(accounting.compute_epsilon(charges, 1e-5, Adjacency.REPLACE_ONE), rel=1e-3)


def test_seeded_noise_and_methods_without_a_claim_say_so():
    assert privacy_statements.privacy_statements(run_of(deterministic=True)) == [
        "Not private: seeded noise (run.deterministic = true). Epsilon is infinite."
    ]
    assert "no claim" in privacy_statements.privacy_statements(run_of("fedavg"))[0]
    assert "rho" in privacy_statements.privacy_statements(run_of("fedavg", rho=1))[0]


def test_the_end_of_a_private_run_says_its_epsilon_with_all_that_it_means():
    run = run_of(sampling="disjoint", noise_local=9.0, noise_global=9.0, epsilon=3.0)
    first, of_a, _ = privacy_statements.privacy_statements(run)
    assert "unit: one example of one site's data set; relation: the example is replaced by any other one" in first
    assert "sampling: no gain from sampling" in first
    assert "accountant: the analytic Gaussian mechanism (exact" in first
    assert "No site's ledger lets this run cost an example more than epsilon 3 at delta 1e-05 (replace-one)" in first
    assert "other runs on an example add to it" in first
    assert "against the server, other sites and all of them together, this run only." in of_a
    line = privacy_statements.privacy_summary(run)
    assert line.startswith(
        f"privacy: this run cost an example at a, the highest-cost site, at most epsilon {epsilons(of_a)[0]:g}"
    )
    assert "against the server, other sites and all of them together; unit: one example" in line
    assert "Unknown for 1 of 2 sites" in line


def test_the_end_of_other_runs_says_nothing_or_why_it_is_not_private():
    assert privacy_statements.privacy_summary(run_of("fedavg")) == ""
    assert privacy_statements.privacy_summary(run_of(deterministic=True)).startswith("privacy: not private: seeded")
    unreadable = privacy_statements.privacy_summary(run_of(rho=1))
    assert unreadable.startswith("privacy: unknown")
    assert "treat it as infinite" in unreadable
