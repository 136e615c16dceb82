"""Membership inference against DP-FPL: shadow federations against each site's own model, a loss attack, and controls.

A seed divides every site's rows, class by class, into members (trained on), others (held out, same source) and the
adversary's pool: a quarter, a quarter and a half. A shadow is a complete federation with the same sites and settings,
trained on half of the pool and thus on as many rows as the target. For each row, an attack sees the softmax vector from
the model of the site that has the row's class.

| row | target |
|---|---|
| zero-shot | the unchanged CLIP model: attacks must fail |
| <row>, noise only | zero gradients, only noise: attacks must fail |
| <row> with `control = "win"` | undefended and overfitted: attacks must succeed |

With `together`, all rows belong to one site: the three classes of a site here can be distinguished without
memorizing any row. `members_a_class` limits how many rows per class are trained on; the pool has twice as many. With
`shadows = 0`, a row has only the loss attack; with `nets = false`, it has no attack networks.

| metric | meaning |
|---|---|
| balanced accuracy, per class | one network per class, at threshold 0; mean over classes |
| AUROC, per class; AUROC, global | pooled over rows; one network per class, and one network for all |
| TPR at 1 % FPR, global | pooled over rows |
| AUROC, loss | the score is minus the row's loss; no shadows |
| AUROC, LiRA | the loss compared with the row's loss in shadows that were not trained on it (offline) |
| right, held out | percentage of the others whose class the model predicts |

The networks' figures have a separate 95% interval per seed; values and interval endpoints are averaged over seeds,
which is conservative. The loss has the paired intervals from `resampling`.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedveil.attacks.membership import lira, shadow_models
from fedveil.attacks.statistics import IntervalEstimate
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows
from fedveil.models.clip import EncodedImage
from fedveil_bench.common import resampling, seeds
from fedveil_bench.common import verdicts as common
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence, Must
from fedveil_bench.dp_fpl import federated_prompts
from fedveil_bench.dp_fpl.accuracy import ZERO
from fedveil_bench.dp_fpl.federated_prompts import FederatedPrompts, PromptSites
from fedveil_bench.runner import BenchOptions, BenchOutcome

LOSS, LIRA, RIGHT = "AUROC, loss", "AUROC, LiRA", "right, held out"
_MEMBERS, _OTHERS = 20, 21  # name the random draws
_ALL = "all"  # the site in a row with `together`
_PARTS = ("members", "others", "pool")


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return all targets, with one run per seed."""
    answers: list[dict[str, Any]] = seeds.run_seeds(__name__, settings, options)
    rows, figures = [], dict[str, dict[str, ResampledMetric]]()
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        figures[name] = {
            metric: resampling.over_seeds([from_estimate(each["nets"][metric], each["rows"]) for each in of_seeds])
            for metric in of_seeds[0]["nets"]
        }
        for metric in (m for m in (LOSS, LIRA, RIGHT) if m in of_seeds[0]):
            figures[name][metric] = resampling.over_seeds(
                [ResampledMetric.from_json(each[metric]) for each in of_seeds]
            )
        metrics = {metric: resampling.compute_interval(figure) for metric, figure in figures[name].items()}
        costs = {k: max(each["costs"][k] for each in of_seeds) for k in of_seeds[0]["costs"]}
        metrics |= {
            k: resampling.compute_interval(resampling.from_constant(v)) for k, v in costs.items() if v < math.inf
        }
        rows.append({"name": name, "metrics": metrics, "privacy": of_seeds[0]["privacy"]})
    done = f"this run: {settings['clients']} sites, {settings['shadows']} shadows a target, {len(answers)} seeds"
    return BenchOutcome(rows, list_verdicts(figures, settings), [done])


def from_estimate(estimate: Sequence[float], rows: int) -> ResampledMetric:
    """Return a metric with the value and 95% interval in [value, low, high], assuming normal tails on each side.

    The replicates of several such metrics vary together, so the interval of their mean is as wide as their own
    intervals.
    """
    value, low, high = estimate
    normal, steps = statistics.NormalDist(), resampling.REPLICATES
    z = np.array([normal.inv_cdf((i + 0.5) / steps) for i in range(steps)]) / normal.inv_cdf(0.975)
    return ResampledMetric(value, value + z * np.where(z < 0, value - low, high - value), rows)


def list_verdicts(figures: Mapping[str, Mapping[str, ResampledMetric]], settings: Mapping[str, Any]) -> list[str]:
    """Return sentences about each target's figures, whether the controls hold, and the preset's claims."""
    blind = {federated_prompts.name_noise_control(name) for name in settings["rows"]} | {ZERO}
    winners = {name for name, row in settings["rows"].items() if row.get("control") == "win"}
    margin = settings.get("control_margin", common.CONTROL_MARGIN)
    controls, found = list[tuple[str, ClaimSentence]](), list[tuple[str, ClaimSentence]]()
    for name, of_row in figures.items():
        for metric in ("AUROC, per class", "AUROC, global", LOSS, LIRA):
            if (figure := of_row.get(metric)) is None:  # a row without shadows
                continue
            i = resampling.compute_interval(resampling.of_rows(figure) if name in blind else figure)
            text = f"{name}, {metric}: {resampling.format_interval(i)}"
            if name in winners or name in blind:
                must: Must = "won" if name in winners else "lost"
                text += f"; a control, expected {common.describe_control_range(must, margin)}"
                controls.append((text, common.judge_control(figure, must, margin)))
            else:
                sides = ("below 0.5", "above 0.5", "not told from 0.5")
                found.append(
                    (
                        text,
                        common.judge_sign(resampling.subtract_metrics(figure, resampling.from_constant(0.5)), *sides),
                    )
                )
    found += common.judge_claims(figures, common.claims_of(settings))
    said = common.list_verdicts(found, max(len(of_row[LOSS].seeds) for of_row in figures.values()))
    return [*common.list_control_verdicts(controls), *said]


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> Any:
    """Return one seed's results for `run_benchmark`."""
    sites = federated_prompts.load_sites(settings, seed, options)
    parts = split_members(sites.rows, np.random.default_rng(seed), settings.get("members_a_class"))
    joined = {part: {_ALL: [row for rows in of_site.values() for row in rows]} for part, of_site in parts.items()}
    said: dict[str, Any] = {ZERO: _attacked(settings, sites, parts, None, False, options)}
    for name, chosen in settings["rows"].items():
        at = (_together(sites), joined) if chosen.get("together", False) else (sites, parts)
        said[name] = _attacked(settings, *at, chosen, False, options)
        if chosen.get("control") is True:
            said[federated_prompts.name_noise_control(name)] = _attacked(settings, *at, chosen, True, options)
    return said


def _together(sites: PromptSites) -> PromptSites:
    """Return a single site with all rows."""
    rows = {_ALL: [row for of_site in sites.rows.values() for row in of_site]}
    return replace(sites, rows=rows, classes={_ALL: frozenset[int]().union(*sites.classes.values())})


def split_members(
    rows: Mapping[str, Sequence[EncodedImage]], generator: np.random.Generator, most: int | None = None
) -> dict[str, dict[str, list[EncodedImage]]]:
    """Split each site's rows of every class into members (a quarter), others (a quarter) and pool (a half).

    Up to three rows per class are omitted, so that half of the pool has as many rows as the members. A site with more
    than `most` members in a class omits the rest, and the same fraction of the pool.
    """
    found: dict[str, dict[str, list[EncodedImage]]] = {part: {} for part in _PARTS}
    for site, of_site in rows.items():
        sides: tuple[list[EncodedImage], ...] = ([], [], [])
        for label in sorted({row.label for row in of_site}):
            alike = [row for row in of_site if row.label == label]
            order = [alike[i] for i in generator.permutation(len(alike))]
            quarter = len(order) // 4
            ends, kept = (0, quarter, 2 * quarter, 4 * quarter), quarter if most is None else min(most, quarter)
            bounds = (kept, quarter, 2 * kept)
            for side, (start, end), bound in zip(sides, itertools.pairwise(ends), bounds, strict=True):
                side += order[start : min(end, start + bound)]
        for part, side in zip(_PARTS, sides, strict=True):
            found[part][site] = side
    return found


def _attacked(
    settings: Mapping[str, Any],
    sites: PromptSites,
    parts: Mapping[str, Mapping[str, list[EncodedImage]]],
    chosen: Mapping[str, Any] | None,
    dark: bool,
    options: BenchOptions,
) -> dict[str, Any]:
    """Attack one target with its shadows; without `chosen`, the target is the unchanged CLIP model."""
    started = time.perf_counter()
    generator = np.random.default_rng(sites.seed)
    site_of = {label: site for site, labels in sites.classes.items() for label in labels}
    federated: list[FederatedPrompts] = []
    models: list[Weights] = []

    def trained(rows: Mapping[str, Sequence[EncodedImage]]) -> Weights:
        if chosen is None:
            return {}
        federated.append(federated_prompts.federate_prompts(sites, chosen, rows, dark))
        models.append({f"{site}/{n}": w for site, model in federated[-1].models.items() for n, w in model.items()})
        return models[-1]

    def like_target(rows: Rows, number: int) -> Weights:
        return trained({site: [row for row in rows if site_of[row.label] == site] for site in sites.names})

    def says(weights: Weights, rows: Rows) -> shadow_models.Vectors:
        if chosen is None:
            return np.asarray(sites.task.zero_shot_logits(rows).double().softmax(-1).numpy())
        vectors: dict[int, torch.Tensor] = {}
        for site in sites.names:
            own = {n.removeprefix(f"{site}/"): w for n, w in weights.items() if n.startswith(f"{site}/")}
            mine = [i for i, row in enumerate(rows) if site_of[row.label] == site]
            answers = federated[0].task.predict(own, [rows[i] for i in mine])
            vectors |= {i: p.logits["target"][0] for i, p in zip(mine, answers, strict=True)}
        return np.asarray(torch.stack([vectors[i] for i in range(len(rows))]).double().softmax(-1).numpy())

    members, others, pool = ([row for of_site in parts[part].values() for row in of_site] for part in _PARTS)
    weights = trained(parts["members"])
    at = shadow_models.target_outputs(says, weights, members, _labelled(members), _labelled(others), pool)
    nets, count = dict[str, IntervalEstimate](), len(members)
    if shadows := (chosen or {}).get("shadows", settings["shadows"]):
        how = shadow_models.ShadowAttackConfig(shadows=shadows)
        found = shadow_models.train_shadows(like_target, says, pool, _labelled(pool)[1], how, generator)
        if settings.get("nets", True):
            nets, count = _of_nets(shadow_models.run_shadow_attack(found, at, how, generator))
    of_shadows = [(says(model, members), says(model, others)) for model in models[1:]]
    attacked = _of_losses(at, of_shadows)
    right = resampling.resample_mean(100.0 * (at.others.argmax(-1) == np.asarray(at.other_labels)), _OTHERS)
    name = f"{'zero-shot' if chosen is None else chosen['name']}{', noise only' if dark else ''}"
    found_here = ", ".join(f"{metric} {figure.value:.3f}" for metric, figure in attacked.items())
    seconds = time.perf_counter() - started
    options.say(f"seed {sites.seed}: {name}: {found_here}, right {right.value:.1f} %, {seconds:.0f} s")
    return {
        "nets": {metric: _triple(e) for metric, e in nets.items()},
        **{m: figure.to_json() for m, figure in attacked.items()},
        RIGHT: right.to_json(),
        "rows": count,
        "costs": federated[0].costs if federated else {},
        "privacy": federated[0].privacy if federated else "no row was seen",
    }


def _of_nets(outcome: Mapping[str, shadow_models.ShadowAttackResult]) -> tuple[dict[str, IntervalEstimate], int]:
    """Return the attack networks' metrics, and the number of rows behind them."""
    per_class, whole = outcome["per class"], outcome["global"]
    nets = {
        "balanced accuracy, per class": per_class.accuracy,
        "AUROC, per class": per_class.pooled_auroc,
        "AUROC, global": whole.pooled_auroc,
        "TPR at 1 % FPR, global": whole.pooled_tpr_at_1,
    }
    return nets, whole.rows


def _labelled(rows: Rows) -> tuple[Rows, list[int]]:
    return rows, [row.label for row in rows]


def _of_losses(
    at: shadow_models.TargetOutputs, of_shadows: Sequence[tuple[shadow_models.Vectors, shadow_models.Vectors]]
) -> dict[str, resampling.ResampledMetric]:
    """Return figures for the loss and, with shadows, LiRA, for rows that no shadow had: members, then others."""
    mine, theirs = _confidence(at.members, at.member_labels), _confidence(at.others, at.other_labels)
    scores = {LOSS: (mine, theirs)}
    if of_shadows:
        on_mine = [_confidence(vectors, at.member_labels) for vectors, _ in of_shadows]
        on_theirs = [_confidence(vectors, at.other_labels) for _, vectors in of_shadows]
        scores[LIRA] = (_ratios(mine, on_mine), _ratios(theirs, on_theirs))
    return {metric: resampling.resample_auroc(*pair, (_MEMBERS,), (_OTHERS,)) for metric, pair in scores.items()}


def _ratios(of_target: resampling.Numbers, of_shadows: Sequence[resampling.Numbers]) -> resampling.Numbers:
    """Return LiRA's scores for rows that no shadow had, from the log probabilities of the rows' classes."""
    phi = np.array([lira.target_confidence(-of) for of in of_shadows])
    return lira.lira_scores(lira.target_confidence(-of_target), phi, np.zeros(phi.shape, dtype=bool))


def _confidence(vectors: shadow_models.Vectors, labels: shadow_models.Labels) -> resampling.Numbers:
    return np.asarray(np.log(vectors[np.arange(len(labels)), labels]))


def _triple(found: IntervalEstimate) -> list[float]:
    return [found.value, found.low, found.high]
