"""Code shared by tables that compare noise at the site with noise in the sum: rows, run config keys, and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedveil.config import DpConfig, RunConfig
from fedveil.contract.privacy import Adjacency, SamplingPlan, Spent
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.training import per_example
from fedveil_bench.common import resampling, verdicts
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence

CLEAR, SITE, SUM, ONLY = "no noise", "at the site", "in the sum", "noise only"


def name_row(count: int, name: str) -> str:
    """Return a row's name."""
    return f"{count} sites, {name}"


def rows_of(
    answers: Sequence[Mapping[str, Any]], score: str
) -> tuple[dict[str, ResampledMetric], list[dict[str, Any]]]:
    """Return the scores over all seeds, by row, and the result's rows: scores, and the first seed's costs."""
    figures = {
        name: resampling.over_seeds([ResampledMetric.from_json(answer[name][score]) for answer in answers])
        for name in answers[0]
    }
    rows = []
    for name, figure in figures.items():
        costs = {key: value for key, value in answers[0][name].items() if key != score}
        metrics = {key: resampling.compute_interval(resampling.from_constant(value)) for key, value in costs.items()}
        rows.append({"name": name, "metrics": {score: resampling.compute_interval(figure)} | metrics})
    return figures, rows


def said_of(
    found: Sequence[tuple[str, ClaimSentence]], sites: Sequence[int], won: str, side: str, seeds: int
) -> list[str]:
    """Return the sentences for a table.

    Args:
        found: for each number in `sites`, four verdicts with their texts: CLEAR, SITE and SUM compared with their
            controls, and SUM compared with SITE.
        won: the verdict for a row that is on the expected `side` of its controls.
    """
    *sentences, how = verdicts.list_verdicts(found, seeds)
    words = verdicts.decide_words([each for _, each in found])
    said, private = [], False
    for i, count in enumerate(sites):
        at = slice(4 * i, 4 * i + 4)
        clear, *noisy = (word == won for word in words[at][:3])
        private = private or (clear and any(noisy))
        said += sentences[at][: 4 if clear else 3]
        if not clear:
            said.append(
                f"{count} sites: noise is not compared, for the row without it does not stand {side} its controls."
            )
    last = f"A private row stands {side} its controls."
    return [*said, how, last if private else f"Not decided: no private row stands {side} its controls."]


def count_honest(count: int, where: str) -> int:
    """Return the number of sites that keep their noise secret: two thirds, rounded up, for noise in a sum, else 1."""
    return math.ceil(2 * count / 3) if where == SUM else 1


def build_secure_keys(count: int, where: str) -> dict[str, Any]:
    """Return the run config keys that put the noise into the sum of `count` sites."""
    if where != SUM:
        return {}
    secure = {"enabled": True, "noise": "sum", "min-sites": count, "max-colluders": count - count_honest(count, where)}
    return {f"secure.{key}": value for key, value in secure.items()}


def name_epsilon_column(dp: DpConfig) -> str:
    """Return the column name for `epsilon_of`: a benchmark's noise comes from a seed and protects nothing."""
    return f"epsilon at delta {dp.delta:g} ({dp.adjacency}), were its noise not seeded"


def epsilon_of(dp: DpSgdConfig, config: RunConfig, rows: int) -> float:
    """Return the epsilon of one row at a site with `rows` rows that takes part in every round."""
    train, budget = config.train, dp.budget
    steps = per_example.count_steps(rows, train.batch_size, train.epochs, train.max_steps)
    plan = SamplingPlan(config.run.rounds, steps, train.batch_size, rows, budget.neighbours)
    return accounting.compute_epsilon(dp.privacy_spent(plan), budget.delta, budget.neighbours)


def compute_noise_costs(
    charges: Callable[[float], Spent], epsilon: float, delta: float, neighbours: Adjacency
) -> dict[str, float]:
    """Return the noise multiplier z for an epsilon, and both epsilons of the resulting charge."""
    z = accounting.noise_multiplier_for(charges, epsilon, delta, neighbours)
    spent = charges(z)
    found = {"z": z, "epsilon": accounting.compute_epsilon(spent, delta, neighbours)}
    alone = accounting.compute_epsilon(accounting.epsilon_against_all(spent), delta, neighbours)
    return found | ({"epsilon against all": alone} if alone < math.inf else {})


def on_the_mean(z: float, entries: int, count: int, where: str) -> float:
    """Return the norm of the noise on the mean over sites, relative to the bound on an example's part in an upload."""
    return z * math.sqrt(entries / count / count_honest(count, where))
