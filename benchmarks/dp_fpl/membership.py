"""Membership in DP-FPL: shadow federations against each site's own model, the loss beside them, and controls.

A seed parts every site's rows, class by class, into members (trained on), others (held out, same source) and the
adversary's pool. A shadow is a whole federation of the same sites and settings on half of the pool. An attack sees,
for a row, the softmax vector of the model of the site that has the row's class.

| row | what |
|---|---|
| zero-shot | the CLIP as it is: attacks must lose |
| <row>, noise only | gradients of zero, noise alone: attacks must lose |
| <row> with `control = "win"` | undefended, known by heart: attacks must win |

With `together` all rows of such a control are one site's: three classes, as a site has here, are told apart without
learning a row by heart.

| metric | what |
|---|---|
| balanced accuracy, per class | of one net a class, at the threshold 0; mean over classes |
| AUROC, per class; AUROC, global | pooled over rows; of a net a class, and of one net for all |
| TPR at 1 % FPR, global | pooled over rows |
| AUROC, loss | minus the loss of the row, no shadows |

Of the nets' figures a seed has its own 95 % interval; over seeds values and ends are averaged, which is no narrower
than the truth. The loss has the paired intervals of `resampling`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedveil.attacks.membership import shadow
from fedveil.attacks.statistics import Estimate
from fedveil.benchmarks.common import resampling, seeds
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.dp_fpl import federated_prompts
from fedveil.benchmarks.dp_fpl.accuracy import ZERO
from fedveil.benchmarks.dp_fpl.federated_prompts import Federated, Sites
from fedveil.benchmarks.run import Options, Outcome
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows
from fedveil.models.clip_towers import EncodedImage

LOSS = "AUROC, loss"
_MEMBERS, _OTHERS = 20, 21  # names of draws
_ALL = "all"  # the site of a row with `together`
_PARTS = ("members", "others", "pool")


def run(settings: dict[str, Any], options: Options) -> Outcome:
    """Every target, one run for each seed."""
    answers: list[dict[str, Any]] = seeds.run(__name__, settings, options)
    rows = []
    for name in answers[0]:
        of_seeds = [answer[name] for answer in answers]
        loss = resampling.over_seeds([Figure.from_json(found) for found in (each["loss"] for each in of_seeds)])
        metrics: dict[str, Any] = {
            metric: {
                **dict(zip(("mean", "low", "high"), map(statistics.fmean, zip(*values, strict=True)), strict=True)),
                "n": of_seeds[0]["rows"] * len(of_seeds),
            }
            for metric in of_seeds[0]["nets"]
            if (values := [each["nets"][metric] for each in of_seeds])
        }
        metrics[LOSS] = resampling.interval(loss)
        costs = {k: max(each["costs"][k] for each in of_seeds) for k in of_seeds[0]["costs"]}
        metrics |= {k: resampling.interval(resampling.fixed(v)) for k, v in costs.items() if v < math.inf}
        rows.append({"name": name, "metrics": metrics, "privacy": of_seeds[0]["privacy"]})
    done = f"this run: {settings['clients']} sites, {settings['shadows']} shadows a target, {len(answers)} seeds"
    return Outcome(rows, verdicts(rows, settings), [done])


def verdicts(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Sentences on where each target stands, and on whether the controls hold."""
    blind = {federated_prompts.blind(name) for name in settings["rows"]} | {ZERO}
    won = {name for name, row in settings["rows"].items() if row.get("control") == "win"}
    said = []
    for row in rows:
        for metric in ("AUROC, per class", "AUROC, global", LOSS):
            i = row["metrics"][metric]
            side = "above" if i["low"] > 0.5 else "below" if i["high"] < 0.5 else "not told from"
            text = f"{row['name']}, {metric}: {resampling.shown(i)}, {side} 0.5"
            if row["name"] in won:
                text += f"; the control to win: {'held' if side == 'above' else 'NOT HELD'}"
            elif row["name"] in blind:
                text += f"; a control to lose: {'held' if side != 'above' else 'NOT HELD'}"
            said.append(text + ".")
    return said


def of_seed(settings: dict[str, Any], seed: int, options: Options) -> Any:
    """What `run` asks of each seed."""
    sites = federated_prompts.load(settings, seed, options)
    parts = parted(sites.rows, np.random.default_rng(seed))
    said: dict[str, Any] = {ZERO: _attacked(settings, sites, parts, None, False, options)}
    for name, chosen in settings["rows"].items():
        if chosen.get("together", False):
            joined = {
                part: {_ALL: [row for rows in of_site.values() for row in rows]} for part, of_site in parts.items()
            }
            said[name] = _attacked(settings, _together(sites), joined, chosen, False, options)
        else:
            said[name] = _attacked(settings, sites, parts, chosen, False, options)
        if chosen.get("control") is True:
            said[federated_prompts.blind(name)] = _attacked(settings, sites, parts, chosen, True, options)
    return said


def _together(sites: Sites) -> Sites:
    """One site of everything."""
    rows = {_ALL: [row for of_site in sites.rows.values() for row in of_site]}
    return replace(sites, rows=rows, classes={_ALL: frozenset[int]().union(*sites.classes.values())})


def parted(
    rows: Mapping[str, Sequence[EncodedImage]], generator: np.random.Generator
) -> dict[str, dict[str, list[EncodedImage]]]:
    """Members, others and pool of each site: of every class a third each, what is left over to the pool."""
    found: dict[str, dict[str, list[EncodedImage]]] = {part: {} for part in _PARTS}
    for site, of_site in rows.items():
        sides: tuple[list[EncodedImage], ...] = ([], [], [])
        for label in sorted({row.label for row in of_site}):
            alike = [row for row in of_site if row.label == label]
            order = [alike[i] for i in generator.permutation(len(alike))]
            third = len(order) // 3
            for side, chosen in zip(sides, (order[:third], order[third : 2 * third], order[2 * third :]), strict=True):
                side += chosen
        for part, side in zip(_PARTS, sides, strict=True):
            found[part][site] = side
    return found


def _attacked(
    settings: Mapping[str, Any],
    sites: Sites,
    parts: Mapping[str, Mapping[str, list[EncodedImage]]],
    chosen: Mapping[str, Any] | None,
    dark: bool,
    options: Options,
) -> dict[str, Any]:
    """One target and its shadows; without `chosen` the CLIP as it is."""
    started = time.perf_counter()
    generator = np.random.default_rng(sites.seed)
    site_of = {label: site for site, labels in sites.classes.items() for label in labels}
    federated: list[Federated] = []

    def trained(rows: Mapping[str, Sequence[EncodedImage]]) -> Weights:
        if chosen is None:
            return {}
        federated.append(federated_prompts.federate(sites, chosen, rows, dark))
        return {f"{site}/{n}": w for site, model in federated[-1].models.items() for n, w in model.items()}

    def like_target(rows: Rows, number: int) -> Weights:
        return trained({site: [row for row in rows if site_of[row.label] == site] for site in sites.names})

    def says(weights: Weights, rows: Rows) -> shadow.Vectors:
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
    at = shadow.target(says, weights, members, _labelled(members), _labelled(others), pool)
    how = shadow.Settings(shadows=(chosen or {}).get("shadows", settings["shadows"]))
    found = shadow.records(like_target, says, pool, _labelled(pool)[1], how, generator)
    outcome = shadow.attack(found, at, how, generator)
    mine, theirs = (_confidence(v, ls) for v, ls in ((at.members, at.member_labels), (at.others, at.other_labels)))
    loss = resampling.auroc(mine, theirs, (_MEMBERS, sites.seed), (_OTHERS, sites.seed))
    per_class, whole = outcome["per class"], outcome["global"]
    nets = {
        "balanced accuracy, per class": per_class.accuracy,
        "AUROC, per class": per_class.pooled_auroc,
        "AUROC, global": whole.pooled_auroc,
        "TPR at 1 % FPR, global": whole.pooled_tpr_at_1,
    }
    options.say(
        f"seed {sites.seed}: {'zero-shot' if chosen is None else chosen['name']}{', noise only' if dark else ''}: "
        f"global AUROC {whole.pooled_auroc.value:.3f}, loss {loss.value:.3f}, {time.perf_counter() - started:.0f} s"
    )
    return {
        "nets": {metric: _triple(e) for metric, e in nets.items()},
        "loss": loss.to_json(),
        "rows": whole.rows,
        "costs": federated[0].costs if federated else {},
        "privacy": federated[0].privacy if federated else "no row was seen",
    }


def _labelled(rows: Rows) -> tuple[Rows, list[int]]:
    return rows, [row.label for row in rows]


def _confidence(vectors: shadow.Vectors, labels: shadow.Labels) -> resampling.Numbers:
    return np.asarray(np.log(vectors[np.arange(len(labels)), labels]))


def _triple(found: Estimate) -> list[float]:
    return [found.value, found.low, found.high]
