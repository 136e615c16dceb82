"""Run the demo's arms in one process, without Flower and without controls, to compute its figures over many seeds.

Not covered by the compatibility promise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedveil import rng
from fedveil.attacks.audit.compare_runs import draw_compared_samples
from fedveil.attacks.audit.delong import NormalEstimate, Sides, SiteAveragedAuroc, SitePlacements
from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.membership.alignment import AlignmentAttack
from fedveil.attacks.membership.gradient_attacks import SharedGradientScorer
from fedveil.attacks.samples import AuditDataSource
from fedveil.attacks.secagg_views import secagg_views
from fedveil.console.demo_settings import ATTACKED, DATA, DEFENSES, ROUNDS, SETTINGS, SITES
from fedveil.console.runs.summary import BASELINE
from fedveil.console.web.report.tradeoff import AttackedSite, TradeoffRun, decide_differences, worst_by_chance
from fedveil.local import LocalFederation
from fedveil.wire.capture import MessageCapture

__all__ = [
    "ATTACKED",
    "DATA",
    "SITES",
    "NormalEstimate",
    "TradeoffRun",
    "decide_differences",
    "run_demo_arms",
    "worst_by_chance",
]

# Keys that have no effect in an in-process run, and dp.epsilon, which such a run refuses because no ledger enforces it.
_OF_A_SERVER = ("task.evaluation", "run.capture-messages", "dp.epsilon")


def run_demo_arms(arms: Mapping[str, tuple[str, str]], seed: int, changes: Mapping[str, Any]) -> list[TradeoffRun]:
    """Train and attack each arm, a (method, defense) pair, on the same examples; return the runs to compare.

    Args:
        arms: method and defense by run name.
        seed: the run seed, which determines members, initial weights and random draws.
        changes: run config settings that replace the demo's.
    """
    runs, bases = list[TradeoffRun](), dict[str, SitePlacements]()
    for name, (method, defense) in arms.items():
        defended = DEFENSES[defense]
        flat = {key: value for key, value in {**SETTINGS, **defended}.items() if key not in _OF_A_SERVER}
        flat |= {"method.name": method, "run.rounds": ROUNDS, "run.seed": seed, **changes}
        with tempfile.TemporaryDirectory() as folder:
            tap = MessageCapture(Path(folder))
            local = LocalFederation.from_config(flat, {f"site-{i}": DATA for i in range(SITES)}, tap=tap)
            tests = list(local.task.examples(DATA, "test"))[: int(SETTINGS["evaluate.eval-examples"])]
            before = _loss(local, tests)
            local.run()
            own, wrong = _scores(local, tap)
        placed = SitePlacements.from_scores(own, wrong)
        over = SiteAveragedAuroc.from_placements("alignment", placed, bases if method == BASELINE else {})
        if method == BASELINE:
            bases[name] = placed
        sites = [
            AttackedSite(
                s.site, s.auroc.value, s.auroc.value - s.less_wrong.value if s.less_wrong else None,
                s.auroc.standard_error, s.members, s.non_members,
            )
            for s in over.sites
        ]  # fmt: skip
        runs.append(
            TradeoffRun(
                name, method, before, _loss(local, tests), local.federation.upload_bytes, secure=defense == "secure",
                noise=f"noise with epsilon {defended['dp.epsilon']:g}" if defense == "dp" else "", attack="alignment",
                sites=sites, mean=over.mean, differences=over.differences, digest=name,
            )
        )  # fmt: skip
    return runs


def _loss(local: LocalFederation, tests: Sequence[Any]) -> float:
    weights = local.federation.models()["server"]
    return float(local.task.evaluate({name: weights[name] for name in local.task.spec}, tests, False)["loss"])


def _scores(local: LocalFederation, tap: MessageCapture) -> tuple[dict[str, Sides], dict[str, Sides]]:
    """Return the scores of each site's examples on the server's view of the site, and on another site's upload."""
    config, task, sites = local.config, local.task, list(local.federation.sites)
    server = local.federation.models()["server"]
    view, sums, _ = secagg_views(tap, local.federation.exchange, config, server)
    knowledge = AdversaryKnowledge(task, task.initial(rng.initial_stream(config.run.seed, "weights")), server)
    members, rest, _ = draw_compared_samples(AuditDataSource(DATA, most=2 * ATTACKED), config, task, sites)
    attack = AlignmentAttack()
    ask = partial(SharedGradientScorer([attack]).scores, attack)
    own, wrong = dict[str, Sides](), dict[str, Sides]()
    for place, site in enumerate(sites):
        rows = members[site].rows, rest.rows
        mine, others = (ask(sums or view, site, knowledge, of)["alignment"] for of in rows)
        own[site] = mine, others
        if sums is None:
            mine, others = (ask(view, sites[place - 1], knowledge, of)["alignment"] for of in rows)
            wrong[site] = mine, others
    return own, wrong
