"""Test whether a DP prompt beats three baselines: noise only, zero-shot CLIP, and the most frequent class.

A seed partitions the training images over the sites, and each site sets `validation` of its rows aside. Every row of
the table is run once with each of `learning_rates`, which are the same for all rows, and the run that is best on the
sites' validation rows is scored. A model is the mean over its last `averaged` rounds: the mean is computed after the
noise, so averaging costs no epsilon. A row with `sites` has that many sites instead of `clients`, each with the rows of
several clients, so all rows of the table have the same images. Rows in a result:

| row | model |
|---|---|
| zero-shot | the unchanged CLIP model, with "a photo of a" before the names: no training |
| most frequent class | every site predicts its most frequent class for every image |
| <row> | each site's own model; the mean over sites |
| <row>, noise only | the same run with all gradients set to zero, at its own best learning rate |

| metric | meaning |
|---|---|
| right | percentage correct on test images of a site's own classes; all classes compete |
| right, last round | "right" without averaging |
| nominal epsilon | the epsilon that sets the noise |
| epsilon, <relation> | the accountant's epsilon for the scored run alone |
| epsilon with the search | the accountant's epsilon for the runs at all learning rates together |

Accuracies have 95% intervals over test images and seeds, paired between rows (see `resampling`). A row's
`learning_rates` are the chosen ones, by seed. Noise and private batches come from the operating system, so a second run
differs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fedveil.contract.param_spec import Weights
from fedveil.errors import ConfigError
from fedveil.models.clip import EncodedImage
from fedveil_bench.common import resampling, seeds
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.resampling import Numbers, ResampledMetric
from fedveil_bench.dp_fpl import accuracy, federated_prompts
from fedveil_bench.dp_fpl.accuracy import ZERO
from fedveil_bench.dp_fpl.federated_prompts import FederatedPrompts, PromptSites
from fedveil_bench.runner import BenchOptions, BenchOutcome

FREQUENT = "most frequent class"
RIGHT, LAST = "right", "right, last round"
Rows = Mapping[str, Sequence[EncodedImage]]
_Row = TypeVar("_Row")


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return all rows of the preset, each at its best learning rate, with one run per seed."""
    answers: list[dict[str, Any]] = seeds.run_seeds(__name__, settings, options)
    figures: dict[str, dict[str, ResampledMetric]] = {}
    rows = []
    for name, first in answers[0].items():
        of_seeds = [answer[name] for answer in answers]
        figures[name] = {
            metric: resampling.over_seeds([ResampledMetric.from_json(each["figures"][metric]) for each in of_seeds])
            for metric in first["figures"]
        }
        metrics = {metric: resampling.compute_interval(figure) for metric, figure in figures[name].items()}
        costs = {k: max(each["costs"][k] for each in of_seeds) for k in first["costs"]}
        metrics |= {
            k: resampling.compute_interval(resampling.from_constant(v)) for k, v in costs.items() if np.isfinite(v)
        }
        row: dict[str, Any] = {"name": name, "metrics": metrics}
        if "privacy" in first:
            row |= {key: first[key] for key in ("privacy", "upload_bytes")}
            row["learning_rates"] = [each["learning_rate"] for each in of_seeds]
            row["seconds"] = round(statistics.fmean(each["seconds"] for each in of_seeds), 1)
        rows.append(row)
    config = settings["config"]
    done = (
        f"this run: {settings['clients']} sites, each with {settings['validation']} rows to choose the learning "
        f"rate, {config['run.rounds']} rounds of {config['train.max-steps']} steps of {config['train.batch-size']} "
        f"rows, the last {settings['averaged']} rounds averaged; {len(answers)} seeds"
    )
    said = common.list_verdicts(common.judge_claims(figures, common.claims_of(settings), "+.1f"), len(answers))
    return BenchOutcome(rows, said, [done])


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    loaded = federated_prompts.load_sites(settings, seed, options)
    train, validation = split_rows(loaded.rows, settings["validation"], seed)
    sites = replace(loaded, rows=train)
    always = [mark_most_frequent(train[site], sites.test) for site in sites.names]
    rows: dict[str, Any] = {
        ZERO: {"figures": {RIGHT: _figure([sites.zero_shot()] * len(sites.names), sites)}, "costs": {}},
        FREQUENT: {"figures": {RIGHT: _figure(always, sites)}, "costs": {}},
    }
    for name, chosen in settings["rows"].items():
        count = chosen.get("sites", len(train))
        fewer, kept = merge_sites(sites, count), merge_rows(validation, count)
        rows[name] = _best(fewer, kept, name, chosen, False)
        if chosen.get("control", False):
            rows[federated_prompts.name_noise_control(name)] = _best(fewer, kept, name, chosen, True)
    return rows


def merge_sites(sites: PromptSites, count: int) -> PromptSites:
    """Return `count` sites with the rows and classes of all sites. Raises ConfigError like `merge_rows`."""
    classes = merge_rows({site: sorted(own) for site, own in sites.classes.items()}, count)
    found = {site: frozenset(own) for site, own in classes.items()}
    return replace(sites, rows=merge_rows(sites.rows, count), classes=found)


def merge_rows(rows: Mapping[str, Sequence[_Row]], count: int) -> dict[str, list[_Row]]:
    """Merge the sites into `count` larger ones, each with the rows of the same number of sites.

    Raises:
        ConfigError: `count` does not divide the number of sites.
    """
    names = list(rows)
    if count < 1 or len(names) % count:
        raise ConfigError(
            f"sites: expected a number that divides {len(names)} (clients), found {count}; correct the row"
        )
    return {names[i]: [row for name in names[i::count] for row in rows[name]] for i in range(count)}


def split_rows(rows: Rows, kept_apart: int, seed: int) -> tuple[Rows, Rows]:
    """Return each site's training rows, and `kept_apart` randomly chosen rows for the selection."""
    train, validation = {}, {}
    for site, of_site in rows.items():
        drawn = random.Random(f"{seed} {site}").sample(list(of_site), len(of_site))
        validation[site], train[site] = drawn[:kept_apart], drawn[kept_apart:]
    return train, validation


def mark_most_frequent(train: Sequence[EncodedImage], test: Sequence[EncodedImage]) -> Numbers:
    """Return (test rows,): 1 if the row's class is the most frequent one in `train`, otherwise 0."""
    most = np.bincount([row.label for row in train]).argmax()
    return np.array([float(row.label == most) for row in test])


def with_rate(chosen: Mapping[str, Any], rate: float, averaged: int) -> dict[str, Any]:
    """Return a row of the preset with one learning rate for both prompts, and with averaging.

    A baseline's noisy steps get the learning rate if the row has `dp.clip-norm`, otherwise the optimizer gets it.
    """
    if chosen["name"] == "dp_fpl":
        both = f"learning_rate = {rate!r}\nlearning_rate_local = {rate!r}\n"
        return {**chosen, "averaged": averaged, "fields": chosen.get("fields", "") + "\n" + both}
    config = chosen.get("config", {})
    key = "dp.learning-rate" if "dp.clip-norm" in config else "train.learning-rate"
    return {**chosen, "averaged": averaged, "config": {**config, key: rate}}


def _best(sites: PromptSites, validation: Rows, name: str, chosen: Mapping[str, Any], dark: bool) -> dict[str, Any]:
    """Return the run with the best learning rate on validation rows (the lowest in a tie), scored on test rows."""
    settings, label = sites.settings, federated_prompts.name_noise_control(name) if dark else name
    started, tried = time.perf_counter(), list[tuple[float, float, FederatedPrompts]]()
    for rate in sorted(settings["learning_rates"]):
        done = federated_prompts.federate_prompts(
            sites, with_rate(chosen, rate, settings["averaged"]), sites.rows, dark
        )
        right = [federated_prompts.mark_correct(done.task, done.models[s], validation[s]).mean() for s in sites.names]
        tried.append((float(np.mean(right)), rate, done))
        sites.options.say(f"seed {sites.seed}: {label}: rate {rate:g}: {100 * tried[-1][0]:.1f} on validation rows")
    _, rate, best = max(tried, key=lambda each: each[0])
    models = {RIGHT: best.models, LAST: best.last}
    figures = {metric: _figure(_right(best, of_sites, sites), sites) for metric, of_sites in models.items()}
    costs = dict(best.costs)
    if costs:
        costs["epsilon with the search"] = federated_prompts.epsilon_of(best, len(tried))
    sites.options.say(
        f"seed {sites.seed}: {label}: rate {rate:g}: {figures[RIGHT][0]:.1f}, last round {figures[LAST][0]:.1f}; "
        f"{best.privacy}; {time.perf_counter() - started:.0f} s"
    )
    return {
        "figures": figures, "costs": costs, "learning_rate": rate, "privacy": best.privacy,
        "upload_bytes": best.upload_bytes, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _right(done: FederatedPrompts, models: Mapping[str, Weights], sites: PromptSites) -> list[Numbers]:
    return [federated_prompts.mark_correct(done.task, models[site], sites.test) for site in sites.names]


def _figure(right: Sequence[Numbers], sites: PromptSites) -> list[Any]:
    labels = [row.label for row in sites.test]
    return accuracy.compute_accuracy(right, labels, [sites.classes[site] for site in sites.names], True).to_json()
