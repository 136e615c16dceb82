"""Compare the empirical epsilon of one run with its upper bound, for each method, using canaries in one site's rows.

For each pair of canaries, a coin decides which one is added to the first site's rows (attacks/canaries/). The auditor
has the server's view and guesses the coins; under secure aggregation, it has only the sums that broadcasts show.

| column | meaning |
|---|---|
| shown | lower bound on epsilon, with 95% confidence, replace-one; a weak score gives a low bound, never a wrong one |
| at most | epsilon from the site's ledger, at the same delta and relation; none for runs without noise |
| at most, against all | the same bound against the server and all other sites together, if the noise is in the sum |
| other coins | "shown" for newly drawn coins that no model was trained on, so it must be 0 |
| right | fraction of correct guesses, for the best score |
| loss, loss of round 0 | of the server's final and initial models, on rows that no site has, in nats |

A seeded run is not private: an epsilon here applies to the same run with noise from the operating system.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng, strategies
from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.canaries import one_run, pairs
from fedveil.attacks.samples import encode_examples
from fedveil.attacks.secagg_views import secagg_views
from fedveil.config import RunConfig, parse
from fedveil.contract.privacy import SamplingPlan
from fedveil.contract.task import Example, Rows
from fedveil.federation.exchange import MessageExchange
from fedveil.privacy import accounting
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import per_example
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import data, seeds
from fedveil_bench.common.federations import create_federation, task_of
from fedveil_bench.lora import tables
from fedveil_bench.runner import BenchOptions, BenchOutcome


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Return a row for each of `settings["rows"]`, and whether any seed contradicts its upper bound."""
    answers = seeds.run_seeds(__name__, settings, options)
    return tables.build_outcome(answers, settings, _contradictions(answers))


def list_requirements(settings: Mapping[str, Any]) -> list[data.DataRequirement]:
    """Return the requirements: rows for the sites, and the base."""
    return [data.DataRequirement(settings["data"], ("train", "test")), *data.list_base_requirements(settings)]


def of_seed(settings: dict[str, Any], seed: int, options: BenchOptions) -> dict[str, dict[str, float]]:
    """Return one seed's results for `run_benchmark`: the metrics of each row of the table."""
    found = {}
    for name, row in settings["rows"].items():
        method = {"method.name": row["name"], "method.params": row.get("fields", "")}
        flat = settings["config"] | row.get("config", {}) | method | {"run.seed": seed, "run.deterministic": True}
        config = parse(flat)
        found[name] = _measured(task_of(TextGeneration, config, options), config, settings)
        options.say(f"seed {seed}: {name}: " + ", ".join(f"{m} {value:.3f}" for m, value in found[name].items()))
    return found


def _measured(task: TextGeneration, config: RunConfig, settings: Mapping[str, Any]) -> dict[str, float]:
    method, seed = strategies.create_method(config.method.name, config.method.params), config.run.seed
    initial = task.initial(rng.initial_stream(seed, "weights"))
    examples = task.examples(data.find_data_folder(settings["data"]), "train")
    size, count, canaries = settings["rows_a_site"] + settings["pairs"], settings["clients"], settings["pairs"]
    stream = rng.RandomStream.derive(bytes(32), seed, "", "canaries")
    drawn = [dict(examples[int(i)].values) for i in stream.choice(len(examples), (count + 1) * size)]
    coins, other = (np.array([stream.choice(2, 1) == [1] for _ in range(canaries)]) for _ in range(2))
    planted = pairs.plant_canaries(drawn[:size], settings["column"], coins, random.Random(seed))
    rows: dict[str, Rows] = {
        f"site-{i}": task.encode(Example.from_columns(of))
        for i, of in enumerate([planted.train, *(drawn[i * size : (i + 1) * size - canaries] for i in range(1, count))])
    }
    with tempfile.TemporaryDirectory() as scratch:
        tap, exchange = MessageCapture(Path(scratch)), MessageExchange(method, config.method.name, task.spec)
        trained = create_federation(exchange, config, task, rows, initial, tap)
        trained.run()
        server = trained.models()["server"]
        view, sums, _ = secagg_views(tap, exchange, config, server)
        sides = (encode_examples(task, list(Example.from_columns(of))) for of in (planted.first, planted.second))
        scores = pairs.canary_scores("site-0", sums or view, AdversaryKnowledge(task, initial, server), *sides)
    claim = guarantee_of(method, config)
    delta = claim.budget.delta if claim else pairs.DELTA
    shown, control = (one_run.best_epsilon_bound(scores, of, delta) for of in (coins, other))
    metrics = {"shown": shown.epsilon, "other coins": control.epsilon, "right": shown.correct / shown.guesses}
    metrics |= _at_most(config, method, len(rows["site-0"]))
    absent = Example.from_columns(drawn[count * size :])
    for name, weights in (("loss", server), ("loss of round 0", initial)):
        metrics[name] = task.evaluate(weights, absent, generate=False)["loss"]
    return metrics


def _at_most(config: RunConfig, method: Any, rows: int) -> dict[str, float]:
    """Return the charge for a site with `rows` rows in every round; {} for a run without a guarantee or noise."""
    claim, train = guarantee_of(method, config), config.train
    if claim is None:
        return {}
    steps = per_example.count_steps(rows, train.batch_size, train.epochs, train.max_steps)
    budget = claim.budget
    spent = claim.privacy_spent(SamplingPlan(config.run.rounds, steps, train.batch_size, rows, budget.neighbours))
    if (most := accounting.compute_epsilon(spent, budget.delta, budget.neighbours)) == math.inf:
        return {}
    found = {"at most": most}
    alone = accounting.compute_epsilon(accounting.epsilon_against_all(spent), budget.delta, budget.neighbours)
    return found | ({"at most, against all": alone} if alone < math.inf and alone != most else {})


def _contradictions(answers: list[dict[str, dict[str, float]]]) -> list[str]:
    """Return, for each row, a sentence on whether any seed showed more than its upper bound."""
    said = []
    for name, metrics in answers[0].items():
        if "at most" in metrics:
            over = sum(answer[name]["shown"] > answer[name]["at most"] for answer in answers)
            word = f"CONTRADICTED on {over} of {len(answers)} seeds: do not rely on it" if over else "not contradicted"
            most = max(answer[name]["shown"] for answer in answers)
            said.append(f"{name}: epsilon at most {metrics['at most']:.2f}; shown {most:.2f} at most: {word}.")
    return said
