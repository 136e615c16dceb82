"""Canaries in a text data set: how much plain training, noisy steps and no training reveal about their coins."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from fedveil import paths, rng, strategies, tasks
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.canaries.one_run import EpsilonLowerBound
from fedveil.attacks.canaries.pairs import bound_from_audit, plant_canaries
from fedveil.config import parse
from fedveil.contract.privacy import Adjacency, SamplingPlan
from fedveil.data import tables
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.wire.capture import MessageCapture

pytestmark = pytest.mark.slow
PAIRS, ROUNDS, BATCH, DELTA = 60, 2, 16, 1e-5
E2E = paths.find_folder("data") / "e2e"
NOISY = DpSgdConfig(clip=1.0, noise=1.0, learning_rate=0.5)


def bound(folder: Path, epochs: int, noisy: bool = False, asked: str = "a") -> EpsilonLowerBound:
    """Of FedAvg of two sites: "a" has the canaries, "b" has other rows."""
    config = parse({
        "method.name": "fedavg", "method.params": "adapter = {rank = 8}", "task.max-tokens": 64,
        "train.received-loss-examples": 0, "train.batch-size": BATCH, "train.epochs": epochs,
        "train.learning-rate": 5e-3, "run.rounds": ROUNDS,
        "run.deterministic": True,
    })  # fmt: skip
    method = strategies.create_method("fedavg", config.method.params)
    task = tasks.load_task(config, method.adapter, "cpu")
    rows = list(tables.read_table(E2E / "train.jsonl", ("ref",)))[: 2 * PAIRS + 20]
    coins = np.random.default_rng(7).random(PAIRS) < 0.5
    made = plant_canaries(rows, "ref", coins, random.Random(0))
    for name, of in (("data/train", made.train), ("secret/first", made.first), ("secret/second", made.second)):
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in of))
    (folder / "secret" / "coins.json").write_text(json.dumps({"coins": "".join(str(int(c)) for c in coins)}))
    others = task.examples(E2E / "test.jsonl", "test")[:40]
    parts = {"a": task.encode(task.examples(folder / "data" / "train.jsonl", "train")), "b": task.encode(others)}

    def trainer_for(site, ctx):
        plain = task.trainer(parts[site], ctx.rng("batches"), round_=ctx.round)
        return NoisyTrainer(task.spec, plain.rows, NOISY, ctx) if noisy else plain

    exchange, initial = MessageExchange(method, "fedavg", task.spec), task.initial(rng.initial_stream(0, "weights"))
    state = method.init(task.spec, initial, rng.initial_stream(0, "method init"))
    federation = InProcessFederation(
        exchange, config, trainer_for, list(parts), state, tap=MessageCapture(folder / "tap")
    )
    federation.run()
    server = federation.models()["server"] if asked == "a" else initial
    knowledge = AdversaryKnowledge(task, initial, server)
    return bound_from_audit(
        folder, asked, AdversaryView.server(MessageCapture(folder / "tap"), exchange), knowledge, DELTA
    )


def test_plain_training_shows_a_large_epsilon(tmp_path):
    lower_bound = bound(tmp_path, epochs=6)
    assert lower_bound.epsilon > 1.0, lower_bound


def test_noisy_steps_show_less_than_they_cost(tmp_path):
    lower_bound = bound(tmp_path, epochs=1, noisy=True)
    rows = PAIRS + 20
    spent = NOISY.privacy_spent(SamplingPlan(ROUNDS, -(-rows // BATCH), BATCH, rows, Adjacency.REPLACE_ONE))
    assert lower_bound.epsilon <= accounting.compute_epsilon(spent, DELTA, Adjacency.REPLACE_ONE), lower_bound


def test_a_base_that_nobody_taught_and_a_site_without_the_canaries_show_none(tmp_path):
    assert bound(tmp_path, epochs=1, asked="b").epsilon == 0.0
