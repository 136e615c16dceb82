"""Accuracy on a site's own classes and on its neighbors', with each row's actual privacy cost (DP-FPL's tables).

A seed partitions the training images over the sites; every row runs the same in-process federation from the same
shared prompt. All images' features are computed once. Rows in a result:

| row | model |
|---|---|
| zero-shot | the unchanged CLIP model, with "a photo of a" before the names: no training |
| <row> | each site's own final model; the mean over sites |
| <row>, noise only | the same run with all gradients set to zero: the effect of the noise alone |

| metric | meaning |
|---|---|
| local, neighbour | percentage correct on a site's own classes, and on all others; all classes compete |
| nominal epsilon | the epsilon that sets the noise |
| epsilon, <relation> | the accountant's epsilon for the most-charged record at any site; infinite without a guarantee |

Accuracies have 95% intervals over test images, paired between rows and averaged over seeds (see `resampling`). Noise
and private batches come from the operating system, so a second run differs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedveil_bench.common import resampling, seeds
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.resampling import Numbers, ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence
from fedveil_bench.dp_fpl import federated_prompts
from fedveil_bench.dp_fpl.federated_prompts import PromptSites
from fedveil_bench.runner import BenchOptions, BenchOutcome

_TEST = 8  # names the random draws
ZERO = "zero-shot"
SIDES = ("local", "neighbour")


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return all rows of the preset, with one run per seed."""
    answers: list[dict[str, Any]] = seeds.run_seeds(__name__, settings, options)
    figures: dict[str, dict[str, ResampledMetric]] = {}
    rows = []
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        figures[name] = {
            side: resampling.over_seeds(
                [ResampledMetric.from_json(found) for found in (each[side] for each in of_seeds)]
            )
            for side in SIDES
        }
        metrics = {side: resampling.compute_interval(f) for side, f in figures[name].items()}
        costs = {k: [each["costs"][k] for each in of_seeds] for k in of_seeds[0].get("costs", {})}
        metrics |= {
            k: resampling.compute_interval(resampling.from_constant(max(v)))
            for k, v in costs.items()
            if max(v) < math.inf
        }
        row: dict[str, Any] = {"name": name, "metrics": metrics}
        if "privacy" in of_seeds[0]:
            row["privacy"] = of_seeds[0]["privacy"]
            row["upload_bytes"] = round(statistics.fmean(each["upload_bytes"] for each in of_seeds))
            row["seconds"] = round(statistics.fmean(each["seconds"] for each in of_seeds), 1)
        rows.append(row)
    config = settings["config"]
    done = (
        f"this run: {settings['clients']} sites, {config['run.rounds']} rounds of at most "
        f"{config['train.max-steps'] or 'all'} steps of {config['train.batch-size']} rows; {len(answers)} seeds"
    )
    return BenchOutcome(rows, list_verdicts(figures, settings), [done])


def list_verdicts(figures: Mapping[str, Mapping[str, ResampledMetric]], settings: Mapping[str, Any]) -> list[str]:
    """Return sentences about what each row learned beyond its controls, and about the preset's claims."""
    found: list[tuple[str, ClaimSentence]] = []
    for name in settings["rows"]:
        for control in (ZERO, federated_prompts.name_noise_control(name)):
            if control in figures and settings["rows"][name].get("learns", True):
                text, d = _compared(figures, name, control, "local")
                found.append((text, common.judge_sign(d)))
    for claim in settings.get("claims", []):
        text, d = _compared(figures, claim["row"], claim["than"], claim["side"])
        found.append((f"{text}; the paper has {common.claim_in_words(claim)}", common.judge_claim(d, claim)))
    return common.list_verdicts(found, max(len(f.seeds) for of_row in figures.values() for f in of_row.values()))


def _compared(
    figures: Mapping[str, Mapping[str, ResampledMetric]], mine: str, other: str, side: str
) -> tuple[str, ResampledMetric]:
    d = resampling.subtract_metrics(figures[mine][side], figures[other][side])
    shown = resampling.format_interval(resampling.compute_interval(d), "+.1f")
    return f"{side.capitalize()} accuracy of {mine} less that of {other}: {shown} points", d


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    sites = federated_prompts.load_sites(settings, seed, options)
    rows: dict[str, Any] = {ZERO: _scored([sites.zero_shot()] * len(sites.names), sites)}
    for name, chosen in settings["rows"].items():
        for label, dark in ((name, False), (federated_prompts.name_noise_control(name), True)):
            if dark and not chosen.get("control", False):
                continue
            started = time.perf_counter()
            federated = federated_prompts.federate_prompts(sites, chosen, sites.rows, dark)
            right = [
                federated_prompts.mark_correct(federated.task, federated.models[site], sites.test)
                for site in sites.names
            ]
            rows[label] = _scored(right, sites) | {
                "costs": federated.costs,
                "privacy": federated.privacy,
                "upload_bytes": federated.upload_bytes,
                "seconds": time.perf_counter() - started,
            }
            found = ", ".join(f"{side} {rows[label][side][0]:.1f}" for side in SIDES)
            options.say(f"seed {seed}: {label}: {found}; {federated.privacy}; {rows[label]['seconds']:.0f} s")
    return rows


def _scored(right: Sequence[Numbers], sites: PromptSites) -> dict[str, Any]:
    labels = [row.label for row in sites.test]
    found = {
        side: compute_accuracy(right, labels, [sites.classes[site] for site in sites.names], side == "local")
        for side in SIDES
    }
    return {side: f.to_json() for side, f in found.items()}


def compute_accuracy(
    right: Sequence[Numbers], labels: Sequence[int], classes: Sequence[Collection[int]], local: bool
) -> ResampledMetric:
    """Return the percentage of correct test rows in each site's own classes, or in the others; the mean over sites.

    Args:
        right: one array of shape (rows,) per site: 1 if its model predicts the row's class, otherwise 0.
        labels: (rows,) the rows' classes.
        classes: each site's classes.
        local: whether to count rows in the site's own classes, rather than in the others.
    """
    drawn = resampling.draw_counts(len(labels), _TEST)
    values, replicates, seen = [], [], 0
    for said, own in zip(right, classes, strict=True):
        counted = np.array([(label in own) == local for label in labels], dtype=float)
        if counted.sum() == 0:
            continue
        values.append(100 * float(said @ counted / counted.sum()))
        weights = drawn @ counted
        replicates.append(100 * (drawn @ (said * counted)) / np.maximum(weights, 1))
        seen += int(counted.sum())
    return ResampledMetric(statistics.fmean(values), np.mean(replicates, axis=0), seen)
