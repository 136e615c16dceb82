"""Infer, from what the server observed in a run, which sites have more rows with a property, for each table row.

Sites have equal row counts, and evenly spaced shares of rows with the property. The attacker has as many rows with the
property as without it, from no site. "meaningless" in a row of the preset uses a different property: the parity of a
hash of the row, which no model can learn; there the attack must fail.

| column | meaning |
|---|---|
| concordance | fraction of pairs of sites with different shares that are ordered correctly; 0.5 is a guess |
| of the first round | concordance from one round's messages |
| members | AUROC of `alignment` on a site's rows versus rows of the same kind from no site; mean over kinds and sites |
| loss, loss of round 0 | of the server's final and initial models, on rows that no site has, in nats |
| epsilon at delta ..., were its noise not seeded | per record, as sites' ledgers would have it; none without noise |
"""

from __future__ import annotations

import hashlib
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership.alignment import AlignmentAttack
from fedveil.attacks.membership.gradient_attacks import SharedGradientScorer
from fedveil.attacks.secagg_views import SecureSumView
from fedveil.attacks.sites import property_inference as inference
from fedveil.attacks.statistics import area_under_roc
from fedveil.config import RunConfig, parse
from fedveil.contract.task import Example, Examples, Rows
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy.dp_sgd import DpSgdConfig
from fedveil.tasks.text_generation import TextGeneration
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import data, noise_tables, seeds
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.lora import tables
from fedveil_bench.runner import BenchOptions, BenchOutcome


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row of the table for each of `settings["rows"]`."""
    answers = seeds.run_seeds(__name__, settings, options)
    return tables.build_outcome(answers, settings)


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: rows for the sites and the attacker, and the base."""
    return [data.DataRequirement(settings["data"], ("train", "test")), *data.list_base_requirements(settings)]


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, dict[str, float]]:
    """Return one seed's results for `run_benchmark`: the metrics of each row of the table."""
    cuts: dict[bool, _Cut] = {}
    found = {}
    for name, row in settings["rows"].items():
        config = parse(settings["config"] | row.get("config", {}) | _method(row) | {"run.seed": seed, **_SEEDED})
        task = task_of(TextGeneration, config, options)
        meaningless = row.get("meaningless", False)
        if meaningless not in cuts:
            examples = task.examples(data.find_data_folder(settings["data"]), "train")
            cuts[meaningless] = _Cut.of(examples, settings, seed, meaningless)
        found[name] = _measured(task, config, cuts[meaningless], row.get("sees", "uploads"), settings)
        options.say(f"seed {seed}: {name}: " + ", ".join(f"{m} {value:.3f}" for m, value in found[name].items()))
    return found


_SEEDED = {"run.deterministic": True}
_FEWEST, _ASKED = 3, 16  # minimum and maximum rows of a kind for the membership attack


def _method(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"method.name": row["name"], "method.params": row.get("fields", "")}


@dataclass(frozen=True)
class _Cut:
    """The rows of the sites and the attacker, all distinct.

    Attributes:
        shares: the fraction of each site's rows that have the property.
        having, lacking: the attacker's rows with and without the property.
    """

    sites: Mapping[str, Examples]
    shares: Mapping[str, float]
    having: Examples
    lacking: Examples

    @classmethod
    def of(cls, examples: Examples, settings: Mapping[str, Any], seed: int, meaningless: bool) -> _Cut:
        """Assign evenly spaced shares from s to 1 - s to the sites, in random order; s = `settings["least_share"]`."""
        count, size = settings["clients"], settings["rows_a_site"]
        stream = rng.RandomStream.derive(bytes(32), seed, "", "sites")
        pools: dict[bool, list[Example]] = {True: [], False: []}
        for number in stream.choice(len(examples), len(examples)):
            example = examples[number]
            if re.search(settings["pool"], str(example.values[settings["column"]])):
                pools[_has(example, settings, meaningless)].append(example)
        least = settings["least_share"]
        spread = np.linspace(least, 1 - least, count)
        shares = {f"site-{i:02d}": float(spread[k]) for i, k in enumerate(stream.choice(count, count))}
        sites, taken = {}, {True: settings["rows_known"], False: settings["rows_known"]}
        for site, share in shares.items():
            parts = {True: round(share * size), False: size - round(share * size)}
            sites[site] = [row for has, n in parts.items() for row in pools[has][taken[has] : taken[has] + n]]
            taken = {has: taken[has] + n for has, n in parts.items()}
            if len(sites[site]) < size:
                raise ConfigError(f"rows_a_site: expected {size} for each of {count} sites, found too few; lower it")
        known = settings["rows_known"]
        return cls(sites, shares, pools[True][:known], pools[False][:known])


def _has(example: Example, settings: Mapping[str, Any], meaningless: bool) -> bool:
    text = str(sorted(example.values.items()))
    if meaningless:
        return hashlib.sha256(text.encode()).digest()[0] % 2 == 0
    return bool(re.search(settings["property"], str(example.values[settings["column"]])))


def _measured(
    task: TextGeneration, config: RunConfig, cut: _Cut, sees: str, settings: Mapping[str, Any]
) -> dict[str, float]:
    method = strategies.create_method(config.method.name, config.method.params)
    exchange = MessageExchange(method, config.method.name, task.spec)
    initial = task.initial(rng.initial_stream(config.run.seed, "weights"))
    rows = {site: task.encode(of) for site, of in cut.sites.items()}
    having, lacking = list(task.encode(cut.having)), list(task.encode(cut.lacking))
    with tempfile.TemporaryDirectory() as scratch:
        tap = MessageCapture(Path(scratch))
        run = create_federation(exchange, config, task, rows, initial, tap)
        run.run()
        knowledge = AdversaryKnowledge(task, initial, run.models()["server"])
        view = (
            AdversaryView.server(tap, exchange)
            if sees == "uploads"
            else SecureSumView.from_capture(tap, exchange, knowledge.server or {})
        )
        if view is None:
            raise ConfigError(f"rows: expected a method whose broadcasts show the sums, found {exchange.name}")
        found = inference.property_scores(view, knowledge, having, lacking)
        metrics = {
            "concordance": _ordered(found, cut.shares, sees),
            "of the first round": _ordered([each for each in found if each.round == 0], cut.shares, sees),
            "members": _members(view, knowledge, rows, (having, lacking), cut),
        }
    for name, weights in (("loss", knowledge.server or {}), ("loss of round 0", initial)):
        metrics[name] = task.evaluate(weights, [*cut.having, *cut.lacking], generate=False)["loss"]
    if dp := DpSgdConfig.from_config(config.dp):
        metrics[noise_tables.name_epsilon_column(config.dp)] = noise_tables.epsilon_of(
            dp, config, settings["rows_a_site"]
        )
    return metrics


def _ordered(found: Sequence[inference.PropertyScore], shares: Mapping[str, float], sees: str) -> float:
    guessed = inference.estimate_from_sums(found) if sees == "sums" else inference.estimate_from_uploads(found)
    return inference.pairwise_concordance(guessed, shares)


def _members(
    view: AdversaryView, knowledge: AdversaryKnowledge, rows: Mapping[str, Rows], known: tuple[Rows, Rows], cut: _Cut
) -> float:
    """Score membership. A site's rows with the property come first. A kind with fewer than three rows is skipped."""
    attack = AlignmentAttack()
    shared, areas = SharedGradientScorer([attack]), []
    for site in view.sites:
        first = round(cut.shares[site] * len(rows[site]))
        held = list(rows[site])  # the same objects for each query
        for mine, others in zip((held[:first][:_ASKED], held[first:][:_ASKED]), known, strict=True):
            if len(mine) >= _FEWEST:
                scores = [
                    shared.scores(attack, view, site, knowledge, of)["alignment"] for of in (mine, others[:_ASKED])
                ]
                areas.append(area_under_roc(*scores))
    return statistics.fmean(areas)
