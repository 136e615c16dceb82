"""Canaries: their rows, and how much runs with known privacy reveal about their coins."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism

from fedveil.attacks.base import AdversaryKnowledge
from fedveil.attacks.canaries.one_run import EpsilonLowerBound
from fedveil.attacks.canaries.pairs import bound_from_audit, canary_coins, describe_bound, plant_canaries
from fedveil.contract.privacy import Adjacency, PrivacyBudget
from fedveil.contract.task import Example
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import ConfigError, StateError
from tests.attacks.toy import Descent, Linear

PAIRS, DELTA = 60, 1e-5
WIDE, CLASSES, RANK = 600, 4, 4  # gradients of different rows are nearly orthogonal
NOISE = torch.Generator().manual_seed(11)


class Task(Linear):
    """Wider than the toy, and reads rows {"x": numbers, "y": class} of a file."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(141421)
        self.base = torch.randn(CLASSES, WIDE, generator=generator) / WIDE**0.5
        shapes = {"m.lora_A": (RANK, WIDE), "m.lora_B": (CLASSES, RANK)}  # away from B = 0, where A has no gradient
        self._initial = {n: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for n, shape in shapes.items()}
        self.trained = {n: torch.nn.Parameter(w.clone()) for n, w in self._initial.items()}

    def examples(self, file, split):
        return [Example(json.loads(line)) for line in file.read_text().splitlines()]

    def encode(self, examples):
        return [(torch.tensor(e.values["x"]), e.values["y"]) for e in examples]


class Noisy(Descent):
    """One step along the mean of the rows' gradients, clipped to 1, with noise of std `noise` on their sum."""

    noise = 4.0

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        self.task.put(weights)
        total = [torch.zeros_like(p) for p in self.task.trained.values()]
        for row in self.rows:
            gradients = torch.autograd.grad(
                self.task.loss_sum(self.task.collate([row])), list(self.task.trained.values())
            )
            norm = float(torch.cat([g.flatten() for g in gradients]).norm())
            for t, g in zip(total, gradients, strict=True):
                t += g / max(1.0, norm)
        moved = [t + self.noise * torch.randn(t.shape, generator=NOISE) for t in total]
        return TrainingResult({n: weights[n] - m / len(self.rows) for n, m in zip(weights, moved, strict=True)}, {})


class Plain(Noisy):
    noise = 0.0


class Untrained(Descent):
    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        return TrainingResult({n: w.clone() for n, w in weights.items()}, {})


def rows_of(count: int, seed: int = 0) -> list[dict]:
    """Labels are drawn apart from the inputs: only a row's own training can teach it."""
    drawn = np.random.default_rng(seed)
    return [
        {"x": x.astype(np.float32).tolist(), "y": int(drawn.integers(CLASSES)), "number": i}
        for i, x in enumerate(drawn.normal(size=(count, WIDE)))
    ]


def written(folder, rows, seed: int = 1) -> np.ndarray:
    """A folder of canaries as the command writes it; returns the coins."""
    coins = np.random.default_rng(seed).random(PAIRS) < 0.5
    made = plant_canaries(rows, "y", coins, random.Random(seed))
    for name, of in (("data/train", made.train), ("secret/first", made.first), ("secret/second", made.second)):
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in of))
    (folder / "secret" / "coins.json").write_text(json.dumps({"coins": "".join(str(int(c)) for c in coins)}))
    return coins


@pytest.fixture
def run(tmp_path, federate):
    """A federation of one site that trains on the canaries, and one that does not: view and knowledge."""

    def make(kind, rounds: int = 1, seed: int = 1):
        task, folder = Task(), tmp_path / f"{kind.__name__}{seed}"
        written(folder, rows_of(2 * PAIRS + 20, seed), seed)
        own = task.encode(task.examples(folder / "data" / "train.jsonl", "train"))
        locals_ = {"a": kind(task, own), "b": Untrained(task, own[:5])}
        start = task.initial()
        federation, view = federate(
            "fedavg", task.spec, start, lambda s, ctx: locals_[s], sites="ab", rounds=rounds, seed=seed
        )
        federation.run()
        return folder, view, AdversaryKnowledge(task, start, federation.models()["server"])

    return make


def test_each_place_holds_one_of_a_pair_and_its_target_is_another_row_s():
    rows = rows_of(200)
    coins = np.random.default_rng(3).random(PAIRS) < 0.5
    made = plant_canaries(rows, "y", coins, random.Random(3))
    other = plant_canaries(rows, "y", ~coins, random.Random(3))
    assert len(made.train) == 200 - PAIRS
    assert made.first == other.first
    assert made.second == other.second
    put = [row for row in made.train if row in made.first or row in made.second]
    assert len(put) == PAIRS
    for coin, first, second in zip(coins, made.first, made.second, strict=True):
        assert (first in made.train, second in made.train) == (coin, not coin)
    numbers = {row["number"] for row in made.first} | {row["number"] for row in made.second}
    assert len(numbers) == 2 * PAIRS
    assert sum(row["y"] != rows[row["number"]]["y"] for row in (*made.first, *made.second)) > PAIRS, "3 of 4 by chance"
    assert sorted(row["y"] for row in (*made.first, *made.second)) == sorted(rows[i]["y"] for i in numbers)
    assert all(row == rows[row["number"]] for row in made.train if row["number"] not in numbers)


def test_data_sets_of_different_coins_differ_in_the_rows_of_these_coins_alone():
    rows, coins = rows_of(200), np.ones(PAIRS, dtype=bool)
    changed = coins.copy()
    changed[7] = False
    one, two = (plant_canaries(rows, "y", c, random.Random(3)).train for c in (coins, changed))
    assert sum(a != b for a, b in zip(one, two, strict=True)) == 1


def test_an_undefended_run_shows_a_large_epsilon_an_untrained_one_none(run):
    folder, view, knowledge = run(Plain)
    lower_bound = bound_from_audit(folder, "a", view, knowledge, DELTA)
    assert lower_bound.epsilon > 1.0, lower_bound
    assert lower_bound.canaries == PAIRS
    assert bound_from_audit(folder, "b", view, replace(knowledge, server=knowledge.initial), DELTA).epsilon == 0.0
    untrained = run(Untrained, seed=2)
    assert bound_from_audit(untrained[0], "a", *untrained[1:], DELTA).epsilon == 0.0


@pytest.mark.long
def test_a_private_run_shows_less_than_its_epsilon(run):
    """Replacing a row moves the sum by 2 at most, the noise is 4: N(0, 1) against N(1 / 2, 1)."""
    truth = gaussian_mechanism.get_epsilon_gaussian(Noisy.noise / 2, DELTA)
    epsilons = [
        bound_from_audit(*(parts := run(Noisy, seed=seed))[:1], "a", *parts[1:], DELTA).epsilon for seed in range(1, 7)
    ]
    assert max(epsilons) <= truth, (epsilons, truth)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"coins": "01"}', '{"coins": 7}', '{"coins": "%s"}' % ("2" * 30), "[" * 9999]
)
def test_what_holds_no_coins_is_refused(tmp_path, text):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "coins.json").write_text(text)
    with pytest.raises(StateError, match=r"coins\.json: not a coin file that fedveil canaries wrote"):
        canary_coins(tmp_path)
    with pytest.raises(StateError, match="give the folder that it created"):
        canary_coins(tmp_path / "nowhere")


def test_pairs_that_do_not_fit_are_refused(run, tmp_path):
    for rows, coins in ((30, 20), (100, 19), (0, 0)):
        with pytest.raises(
            ConfigError, match=f"--pairs: expected 20 to 20000, and at most half of the {rows} examples"
        ):
            plant_canaries(rows_of(rows), "y", np.ones(coins, dtype=bool), random.Random(0))
    folder, view, knowledge = run(Untrained)
    with pytest.raises(ConfigError, match="--canaries: c is not a site of the run; its sites are a, b"):
        bound_from_audit(folder, "c", view, knowledge, DELTA)
    (folder / "secret" / "first.jsonl").write_text((folder / "data" / "train.jsonl").read_text())
    with pytest.raises(ConfigError, match="expected 60 rows, one per coin, found"):
        bound_from_audit(folder, "a", view, knowledge, DELTA)
    (folder / "secret" / "first.parquet").write_text("")
    with pytest.raises(StateError, match="expected one file first"):
        bound_from_audit(folder, "a", view, knowledge, DELTA)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (None, "claimed: nothing."),
        (PrivacyBudget(float("inf"), DELTA, Adjacency.REPLACE_ONE), "claimed: nothing."),
        (PrivacyBudget(3.0, DELTA, Adjacency.REPLACE_ONE), "claimed: at most 3 at delta 1e-05, replace-one."),
        (PrivacyBudget(2.0, DELTA, Adjacency.REPLACE_ONE), "The claim is CONTRADICTED"),
        (PrivacyBudget(2.0, DELTA, Adjacency.ZERO_OUT), "another adjacency or delta and is not compared."),
        (PrivacyBudget(2.0, 1e-6, Adjacency.REPLACE_ONE), "another adjacency or delta and is not compared."),
        (PrivacyBudget(2.0, DELTA, Adjacency.REPLACE_ONE, server_trusted=True), "nothing against the server"),
    ],
)
def test_it_stands_beside_the_claim(claim, said):
    text = describe_bound(EpsilonLowerBound(2.5, DELTA, 0.95, "loss", 200, 100, 97), "north", claim)
    assert text.startswith(
        "north, one run with 200 pairs of canaries: epsilon at least 2.50 at delta 1e-05, replace-one, with 95 % "
        "confidence (97 of 100 guesses right, by loss); "
    )
    assert said in text
