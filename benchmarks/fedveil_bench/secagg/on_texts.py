"""Infer membership from one site's upload: alignment with it, and the calibrated loss of the client rebuilt from it.

A site's examples are compared with held-out examples from the same distribution. Figures are AUROC, averaged over the
sites.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.alignment import alignment_scores
from fedveil.attacks.membership.loss import CalibratedLossAttack
from fedveil.attacks.membership.model_scores import PublicBaseScores
from fedveil.attacks.model_extraction import factor_pairing
from fedveil.attacks.statistics import Scores
from fedveil.config import parse
from fedveil.contract.task import Rows
from fedveil.federation.exchange import MessageExchange
from fedveil.tasks.text_generation import TextGeneration
from fedveil_bench.common import data, resampling
from fedveil_bench.common.federations import task_of
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.runner import BenchOptions
from fedveil_bench.secagg.paired_federations import run_pair

WRONG = "clear, wrong site"
_MEMBERS, _HELD_OUT = 1, 2  # name the random draws; for a site's members, its number is added


def measure_alignment(
    settings: Mapping[str, Any], seed: int, options: BenchOptions
) -> dict[str, dict[str, ResampledMetric]]:
    """Return the figures "alignment" and "calibrated", by view, with WRONG for the wrong site."""
    config = parse(settings["config"] | {"run.seed": seed, "run.deterministic": True})
    task = task_of(TextGeneration, config, options)
    examples = task.examples(data.find_data_folder(settings["data"]), "train")
    count, sites = settings["rows"], [f"site-{i}" for i in range(settings["sites"])]
    drawn = random.Random(seed).sample(range(len(examples)), count * len(sites) + settings["held_out"])
    rows = task.encode([examples[i] for i in drawn])
    members = {site: rows[i * count : (i + 1) * count] for i, site in enumerate(sites)}
    adversary = _Adversary(task, config.run.seed, members, rows[count * len(sites) :])
    exchange = MessageExchange(
        strategies.create_method(config.method.name, config.method.params), config.method.name, task.spec
    )
    with tempfile.TemporaryDirectory() as folder:
        guesses = dict.fromkeys(sites, rows[count * len(sites) :][:count])
        views = run_pair(exchange, config, task, members, adversary.knowledge.initial, Path(folder), guesses)
        found: dict[str, dict[str, ResampledMetric]] = {name: adversary.attacked(view) for name, view in views.items()}
        return found | {WRONG: adversary.attacked(views["clear"], other=1)}


class _Adversary:
    """An adversary that knows the base model, the initial weights, and examples without their sites."""

    def __init__(self, task: TextGeneration, seed: int, members: Mapping[str, Rows], held_out: Rows) -> None:
        self.knowledge = AdversaryKnowledge(task, task.initial(rng.initial_stream(seed, "weights")))
        self._base = PublicBaseScores(task, self.knowledge.initial)
        self._members, self._held_out = members, held_out

    def attacked(self, view: AdversaryView, other: int = 0) -> dict[str, ResampledMetric]:
        """Run both attacks on each site's examples.

        With `other`, each attack is run on the upload of the site that comes `other` places later.
        """
        sites, each = list(self._members), dict[str, list[ResampledMetric]]()
        for i, site in enumerate(sites):
            target = sites[(i + other) % len(sites)]
            mine, theirs = (self._scores(view, target, rows) for rows in (self._members[site], self._held_out))
            for name in mine:
                names = (_MEMBERS, i), (_HELD_OUT,)
                each.setdefault(name, []).append(resampling.resample_auroc(mine[name], theirs[name], *names))
        return {name: resampling.average_metrics(found) for name, found in each.items()}

    def _scores(self, view: AdversaryView, site: str, rows: Rows) -> dict[str, Scores]:
        rebuilt = factor_pairing.latest_factors(view, site, self.knowledge.initial)
        scores = self._base.scores([CalibratedLossAttack()], self._base.task, rebuilt.weights, rows)
        return {"alignment": alignment_scores(view, site, self.knowledge, rows), **scores}
