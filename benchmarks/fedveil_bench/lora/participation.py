"""Infer which sites took part in a round, from the observed uploads or only from sums.

All rows about a restaurant are at one site, so sites differ as institutions do; "alike" in a row of the preset
partitions the rows at random instead. Some candidates never take part. The attacker has rows that match each candidate,
and rows that match none.

| column | meaning |
|---|---|
| in a round | AUROC of rounds with a site versus rounds without it, over all sites; 0.5 is a guess |
| never took part | "in a round" for candidates that never took part, using a site's rounds: the control to lose |
| at all | AUROC of sites versus candidates that never took part, over all rounds |
| loss, loss of round 0 | of the server's final and initial models, on the attacker's rows, in nats |
| epsilon | per record, from the sites' ledgers; none for runs without noise |
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.secagg_views import SecureSumView
from fedveil.attacks.sites.participation import participation_scores
from fedveil.attacks.statistics import area_under_roc
from fedveil.config import RunConfig, parse
from fedveil.contract.task import Example, Examples
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.tasks.text_generation import TextGeneration
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import data, noise_tables, seeds
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.lora import tables
from fedveil_bench.runner import BenchOptions, BenchOutcome

_NOBODY = "nobody"


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row of the table for each of `settings["rows"]`."""
    answers = seeds.run_seeds(__name__, settings, options)
    return tables.build_outcome(answers, settings)


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: rows for the sites and the attacker, and the base."""
    return [data.DataRequirement(settings["data"], ("train", "test")), *data.list_base_requirements(settings)]


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, dict[str, float]]:
    """Return one seed's results for `run_benchmark`: the metrics of each row of the table."""
    found = {}
    for name, row in settings["rows"].items():
        method = {"method.name": row["name"], "method.params": row.get("fields", "")}
        flat = settings["config"] | row.get("config", {}) | method | {"run.seed": seed, "run.deterministic": True}
        config = parse(flat)
        task = task_of(TextGeneration, config, options)
        cut = _Cut.of(
            task.examples(data.find_data_folder(settings["data"]), "train"), settings, seed, row.get("alike", False)
        )
        found[name] = _measured(task, config, cut, row.get("sees", "uploads"), settings)
        options.say(f"seed {seed}: {name}: " + ", ".join(f"{m} {value:.3f}" for m, value in found[name].items()))
    return found


@dataclass(frozen=True)
class _Cut:
    """The rows of the sites and the attacker, all distinct.

    Attributes:
        trained: each site's rows.
        held: the attacker's rows for each candidate, including those that never take part.
        nobody: the attacker's rows that match no candidate.
    """

    trained: Mapping[str, Examples]
    held: Mapping[str, Examples]
    nobody: Examples

    @classmethod
    def of(cls, examples: Examples, settings: Mapping[str, Any], seed: int, alike: bool) -> _Cut:
        """Draw rows of one kind per candidate, and rows that match none; with `alike`, draw all rows at random."""
        sites = [f"site-{i:02d}" for i in range(settings["clients"])]
        names = [*sites, *(f"absent-{i:02d}" for i in range(settings["absent"])), _NOBODY]
        size, known = settings["rows_a_site"], settings["rows_known"]
        stream = rng.RandomStream.derive(bytes(32), seed, "", "sites")
        kinds: dict[str, list[Example]] = {}
        for number in stream.choice(len(examples), len(examples)):
            kind = re.search(settings["kind"], str(examples[number].values[settings["column"]]))
            kinds.setdefault(kind[1] if kind else "", []).append(examples[number])
        if alike:
            every = [row for rows in kinds.values() for row in rows]
            drawn = [every[i] for i in stream.choice(len(every), len(names) * (size + known))]
            pools = {name: drawn[i :: len(names)] for i, name in enumerate(names)}
        else:
            large = [rows for _, rows in sorted(kinds.items()) if len(rows) >= size + known]
            if len(large) < len(names):
                raise ConfigError(
                    f"clients, absent: expected at most {len(large) - 1} together, whose kinds have {size + known} "
                    f"rows, found {len(names) - 1}; lower rows_a_site"
                )
            places = stream.choice(len(large), len(names))
            pools = {name: large[int(place)] for name, place in zip(names, places, strict=True)}
        held = {name: rows[:known] for name, rows in pools.items()}
        nobody = held.pop(_NOBODY)
        return cls({site: pools[site][known : known + size] for site in sites}, held, nobody)


def _measured(
    task: TextGeneration, config: RunConfig, cut: _Cut, sees: str, settings: Mapping[str, Any]
) -> dict[str, float]:
    method = strategies.create_method(config.method.name, config.method.params)
    exchange = MessageExchange(method, config.method.name, task.spec)
    initial = task.initial(rng.initial_stream(config.run.seed, "weights"))
    with tempfile.TemporaryDirectory() as scratch:
        tap = MessageCapture(Path(scratch))
        run = create_federation(
            exchange, config, task, {s: task.encode(of) for s, of in cut.trained.items()}, initial, tap
        )
        run.run()
        knowledge = AdversaryKnowledge(task, initial, run.models()["server"])
        view = (
            AdversaryView.server(tap, exchange)
            if sees == "uploads"
            else SecureSumView.from_capture(tap, exchange, knowledge.server or {})
        )
        if view is None:
            raise ConfigError(f"rows: expected a method whose broadcasts show the sums, found {exchange.name}")
        held = {name: list(task.encode(of)) for name, of in cut.held.items()}
        found = participation_scores(view, knowledge, held, list(task.encode(cut.nobody)))
    scores, places = found.in_a_round(), {name: i for i, name in enumerate(found.candidates)}
    here = [places[name] for name in cut.trained]
    away = [i for name, i in places.items() if name not in cut.trained]
    truth = found.truth()[:, here]
    given = found.truth(dict(zip([found.candidates[i] for i in away], cut.trained, strict=False)))[:, away]
    at_all = found.at_all()
    metrics = {
        "in a round": _area(scores[:, here], truth),
        "never took part": _area(scores[:, away], given),
        "at all": area_under_roc(at_all[here], at_all[away]),
    }
    rows = [row for of in (*cut.held.values(), cut.nobody) for row in of]
    for name, weights in (("loss", knowledge.server or {}), ("loss of round 0", initial)):
        metrics[name] = task.evaluate(weights, rows, generate=False)["loss"]
    if dp := DpSgdConfig.from_config(config.dp):
        metrics["epsilon"] = noise_tables.epsilon_of(dp, config, settings["rows_a_site"])
    return metrics


def _area(scores: np.ndarray, truth: np.ndarray) -> float:
    """Return the AUROC for rounds with a site versus those without it; 0.5 if it was in all rounds."""
    return area_under_roc(scores[truth], scores[~truth]) if 0 < truth.sum() < truth.size else 0.5
