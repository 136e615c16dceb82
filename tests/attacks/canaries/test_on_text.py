"""Canaries in a text data set: what plain training, noisy steps and no training show of their coins."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from fedveil import places, rng, strategies, tasks
from fedveil.attacks.base import Knowledge, View
from fedveil.attacks.canaries.one_run import Bound
from fedveil.attacks.canaries.pairs import bound_of, planted
from fedveil.config import parse
from fedveil.contract.budget import Neighbours, Plan
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.privacy import accounting
from fedveil.privacy.dp_sgd import DpSgd, NoisyTrainer
from fedveil.rows import reading
from fedveil.wire.tap import Tap

pytestmark = pytest.mark.slow
PAIRS, ROUNDS, BATCH, DELTA = 60, 2, 16, 1e-5
E2E = places.folder("data") / "e2e"
NOISY = DpSgd(clip=1.0, noise=1.0, learning_rate=0.5)


def bound(folder: Path, epochs: int, noisy: bool = False, asked: str = "a") -> Bound:
    """Of FedAvg of two sites: "a" has the canaries, "b" has other rows."""
    config = parse({
        "method.name": "fedavg", "method.fields": "adapter = {rank = 8}", "task.max-tokens": 64, "train.score-rows": 0,
        "train.batch-size": BATCH, "train.epochs": epochs, "train.learning-rate": 5e-3, "run.rounds": ROUNDS,
        "run.deterministic": True,
    })  # fmt: skip
    method = strategies.create("fedavg", config.method.fields)
    task = tasks.load(config, method.adapter, "cpu")
    rows = list(reading.read(E2E / "train.jsonl", ("ref",)))[: 2 * PAIRS + 20]
    coins = np.random.default_rng(7).random(PAIRS) < 0.5
    made = planted(rows, "ref", coins, random.Random(0))
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

    exchange, initial = Exchange(method, "fedavg", task.spec), task.initial(rng.initial(0, "weights"))
    state = method.init(task.spec, initial, rng.initial(0, "method init"))
    federation = Federation(exchange, config, trainer_for, list(parts), state, tap=Tap(folder / "tap"))
    federation.run()
    server = federation.deployed()["server"] if asked == "a" else initial
    knowledge = Knowledge(task, initial, server)
    return bound_of(folder, asked, View.server(Tap(folder / "tap"), exchange), knowledge, DELTA)


def test_plain_training_shows_a_large_epsilon(tmp_path):
    found = bound(tmp_path, epochs=6)
    assert found.epsilon > 1.0, found


def test_noisy_steps_show_less_than_they_cost(tmp_path):
    found = bound(tmp_path, epochs=1, noisy=True)
    rows = PAIRS + 20
    spent = NOISY.privacy_spent(Plan(ROUNDS, -(-rows // BATCH), BATCH, rows, Neighbours.REPLACE_ONE))
    assert found.epsilon <= accounting.epsilon(spent, DELTA, Neighbours.REPLACE_ONE), found


def test_a_base_that_nobody_taught_and_a_site_without_the_canaries_show_none(tmp_path):
    assert bound(tmp_path, epochs=1, asked="b").epsilon == 0.0
