"""Plan a demo with settings, sites or rounds other than the defaults: held-out examples, test data, and noise.

Non-members must be examples that no site trains on, and noise must fit the number of examples. So with the user's data,
each site holds out a fifth, and at least ATTACKED examples if it has twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import strategies, tasks
from fedveil.config import parse
from fedveil.console.demo_settings import ATTACKED, DATA, DEFENSES
from fedveil.console.runs.sampling_plan import plan_sampling
from fedveil.contract.privacy import Spent
from fedveil.contract.task import DatasetShard
from fedveil.errors import TaskError
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.training.per_example import count_steps

_LIMIT, _DATA, _EVALUATION, _NOISE = (
    "task.examples-per-site", "task.data", "task.evaluation", "dp.noise-multiplier",
)  # fmt: skip


@dataclass(frozen=True)
class DemoPlan:
    """A planned demo.

    Attributes:
        settings: the settings for all arms.
        noise: additional settings for the "+dp" arms.
        lines: what the user should know before the start.
    """

    settings: dict[str, Any]
    noise: dict[str, Any]
    lines: list[str]


def plan_demo(
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    method: str,
    sites: int,
    rounds: int,
    has_noise: bool,
) -> DemoPlan:
    """Plan a demo.

    Args:
        given: the settings that the user gave.
        settings: the demo's settings, overridden by `given`.
        method: one of the demo's methods, used to read the data.
        sites: number of sites.
        rounds: number of rounds.
        has_noise: whether any arm has the demo's noise.

    Raises:
        ConfigError, TaskError: the ServerApp would refuse the settings, or cannot read the data.
    """
    planned, lines = dict(settings), list[str]()
    data = Path(str(settings.get(_DATA) or DATA))
    counts = _count_examples(planned, method, data, sites)
    if given.get(_DATA) and _LIMIT not in given:
        planned[_LIMIT] = max(1, min(count - _kept_apart(count) for count in counts))
    limit = planned[_LIMIT] or max(counts)
    used = [min(limit, count) for count in counts]
    for i, (count, trained) in enumerate(zip(counts, used, strict=True)):
        if not given.get(_DATA):
            break
        asked = min(ATTACKED, trained), min(ATTACKED, (sum(counts) - sum(used)) // 2)
        lines.append(
            f"site-{i}: trains on {trained} of {count} rows{f' ({_LIMIT})' if _LIMIT in given else ''}, "
            f"holds out {count - trained} for the attack, which gets {asked[0]} members and {asked[1]} non-members"
        )
        if count < 2 * ATTACKED:
            lines.append(
                f"site-{i}: intervals are meaningless with fewer than {2 * ATTACKED} rows; the site is attacked anyway"
            )
    if given.get(_DATA) and _EVALUATION not in given:
        planned[_EVALUATION] = str(data) if _has_test_split(planned, method, data) else ""
        lines.append(
            f"The server scores the model on the test split of {data}"
            if planned[_EVALUATION]
            else f"The server scores nothing: {data} has no test split; name one with --set {_EVALUATION}=FOLDER"
        )
    train = parse(planned).train
    steps = count_steps(max(used), train.batch_size, train.epochs, train.max_steps)
    if given.get(_DATA):
        lines.append(
            f"Each method takes {sites * rounds * steps:,} steps of {train.batch_size} rows in total, at "
            f"train.learning-rate = {train.learning_rate:g}; with the tiny base, a step takes about a tenth of a second"
        )
    noise, told = _plan_noise(planned, method, used, rounds) if has_noise and _NOISE not in given else ({}, [])
    return DemoPlan(planned, noise, [*lines, *told])


def _kept_apart(count: int) -> int:
    """Return how many of a site's examples are held out: a fifth, at least ATTACKED, and at most half."""
    return min(max(ATTACKED, math.ceil(count / 5)), count // 2)


def _count_examples(settings: Mapping[str, Any], method: str, data: Path, sites: int) -> list[int]:
    config = parse({**settings, "method.name": method, _LIMIT: 0})
    task = tasks.load_task(config, strategies.create_method(method, config.method.params).adapter, "cpu")
    return [len(task.examples(data, "train", DatasetShard(i, sites))) for i in range(sites)]


def _has_test_split(settings: Mapping[str, Any], method: str, data: Path) -> bool:
    """Return whether a folder has a test split. A single file serves as every split, so its rows are training rows."""
    if data.is_file():
        return False
    config = parse({**settings, "method.name": method, _EVALUATION: ""})
    task = tasks.load_task(config, strategies.create_method(method, config.method.params).adapter, "cpu")
    try:
        return bool(len(task.examples(data, "test")))
    except TaskError:
        return False


def _plan_noise(
    settings: Mapping[str, Any], method: str, used: Sequence[int], rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the noise setting for the smallest site's examples, and a line with each site's epsilon."""
    own = {**DEFENSES["dp"], **settings, "method.name": method, "run.rounds": rounds}
    config, of = parse({**own, _NOISE: 1.0}), strategies.create_method(method, parse(own).method.params)
    claim = DpSgdConfig.from_config(config.dp)
    if claim is None or claim.epsilon is None:  # the user turned off the noise or its limit
        return {}, []
    delta, neighbours = claim.delta, claim.neighbours
    plans = [plan_sampling(of, config, neighbours, count) for count in used]
    smallest = plans[used.index(min(used))]

    def charged(z: float) -> Spent:
        return accounting.max_charged(z, "poisson", smallest, across_rounds=False)

    noise = math.ceil(1000 * accounting.noise_multiplier_for(charged, claim.epsilon, delta, neighbours)) / 1000
    lines = []
    for i, plan in enumerate(plans):
        spent = accounting.max_charged(noise, "poisson", plan, across_rounds=False)
        epsilon = accounting.compute_epsilon(spent, delta, neighbours)
        lines.append(f"site-{i} with +dp: epsilon {epsilon:.2f} at delta {delta:g}, noise multiplier {noise:g}")
    return {_NOISE: noise}, lines
