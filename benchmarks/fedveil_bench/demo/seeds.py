"""Measure how the demo's figures and claims vary over seeds: members, initial weights, batches, masks and noise.

Each row is an arm. Each metric has a 95% interval for the mean over seeds, and every seed's value:

| metric | meaning |
|---|---|
| worst | how many of 100 pairs the attack orders correctly at the worst site |
| mean | the same number, averaged over the sites |
| less wrong | the mean minus the result for the same examples on another site's upload |
| loss | loss of the server's model on test examples |
| MB | sent by all sites |

Each verdict is a claim that the demo's page may print, with the number of seeds for which it held. The arm "again" is
the plain run with only the batches changed: any difference that the test reports there is a false alarm.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedveil.attacks.statistics import confidence_interval
from fedveil.testing.demo import TradeoffRun, decide_differences, run_demo_arms
from fedveil_bench.common import seeds
from fedveil_bench.runner import BenchOptions, BenchOutcome

_ALPHA = 0.01
AGAIN = "again"


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure a row for each arm, and a verdict for each claim."""
    answers = seeds.run_seeds(__name__, settings, options)
    rows = []
    for arm in answers[0]["arms"]:
        of_arm = [answer["arms"][arm] for answer in answers]
        metrics = {
            name: confidence_interval(values) | {"seeds": values}
            for name in of_arm[0]
            if None not in (values := [figures[name] for figures in of_arm])
        }
        rows.append({"name": arm, "metrics": metrics})
    verdicts = []
    for claim in answers[0]["claims"]:
        held = [answer["claims"][claim] for answer in answers]
        verdicts.append(f"{claim}: on {sum(held)} of {len(held)} seeds.")
    return BenchOutcome(rows, verdicts, [f"this run: {len(answers)} seeds from {settings['first_seed']}"])


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, Any]:
    """Return one seed's figures and claims for `run_benchmark`."""
    arms = {name: (arm["method"], arm["defense"]) for name, arm in settings["arms"].items()}
    runs = run_demo_arms(arms, seed, settings.get("config", {}))
    figures = {run.name: measure_arm(run) for run in runs}
    for name, of_arm in figures.items():
        options.say(f"seed {seed}: {name} " + ", ".join(f"{k} {v:.2f}" for k, v in of_arm.items() if v is not None))
    return {"arms": figures, "claims": check_claims(runs)}


def measure_arm(run: TradeoffRun) -> dict[str, float | None]:
    """Return one arm's metrics."""
    assert run.worst is not None
    assert run.mean is not None
    wrong = [site.auroc - site.wrong for site in run.sites if site.wrong is not None]
    return {
        "worst": 100 * run.worst.auroc, "mean": 100 * run.mean.value,
        "less wrong": 100 * statistics.mean(wrong) if wrong else None, "loss": run.after, "MB": run.sent / 1e6,
    }  # fmt: skip


def check_claims(runs: Sequence[TradeoffRun]) -> dict[str, bool]:
    """Return, for each claim in the demo's sentence and for a false alarm of the test, whether these runs show it."""
    by_name = {run.name: run for run in runs}
    less = decide_differences([run for run in runs if run.name != AGAIN])
    claims = {f"{name} reveals less than {other}": held for (name, other), held in less.items()}
    plain = by_name["fedavg"]
    for run in runs:
        if run.name == AGAIN:
            false = decide_differences([plain, run]) | decide_differences([run, plain])
            difference = next(d for d in run.differences if d.base == plain.name)
            claims["two plain runs of one seed are told apart"] = any(false.values())
            claims["two plain runs of one seed have a p-value of at most 1 %"] = difference.less.p <= _ALPHA
        elif run.mean is not None and run.method == "fedavg" and not run.noise:
            bound = 70 if run.secure else 85
            claims[f"{run.name}: lower bound of the mean above {bound}"] = run.mean.lower_bound(_ALPHA) > bound / 100
        if run.noise and run.after is not None and plain.after is not None:
            claims[f"{run.name}: test loss above that of fedavg"] = run.after > plain.after
    return claims
