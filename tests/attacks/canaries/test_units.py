"""Canaries that are whole units, and the three controls of an audit by units on the product's own steps."""

from __future__ import annotations

import json
import math
import random
from statistics import NormalDist

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism
from torch import nn

from fedveil.attacks.canaries import one_run
from fedveil.attacks.canaries.pairs import describe_bound, plant_canaries
from fedveil.config import parse
from fedveil.console.main import main
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.privacy import Adjacency, PrivacyBudget
from fedveil.privacy.dp_sgd import DpSgdConfig, NoisyTrainer
from fedveil.training.per_example import LocalGradientSource
from fedveil.training.unit_gradients import UnitGradientSource

PAIRS, DELTA, WIDE = 200, 1e-5, 1200


def table_of(units: int, k: int) -> list[dict]:
    return [{"ref": f"text {u} {i}", "mr": f"{u} {i}", "patient": f"p{u}"} for i in range(k) for u in range(units)]


def test_a_canary_is_a_whole_unit_and_a_coin_replaces_it():
    rows, k = table_of(100, 5), 3
    units = [tuple(range(u, 500, 100)) for u in range(100)]
    coins = np.random.default_rng(3).random(40) < 0.5
    made, other = (plant_canaries(rows, "ref", c, random.Random(3), units, k) for c in (coins, ~coins))
    assert (len(made.first), len(made.second), len(made.train)) == (120, 120, 20 * 5 + 40 * 3)
    assert (made.first, made.second) == (other.first, other.second)
    for i, coin in enumerate(coins):
        of_first, of_second = (side[i * k : i * k + k] for side in (made.first, made.second))
        assert len({row["patient"] for row in of_first}) == len({row["patient"] for row in of_second}) == 1
        assert [row in made.train for row in of_first] == [coin] * k
        assert [row in made.train for row in of_second] == [not coin] * k
        sources = {row["ref"].split()[1] for row in of_first}
        assert len(sources) == 1  # all targets are one other unit's
        assert f"p{sources.pop()}" != of_first[0]["patient"]
    changed = coins.copy()
    changed[7] = not changed[7]
    train = plant_canaries(rows, "ref", changed, random.Random(3), units, k).train
    assert sum(a != b for a, b in zip(made.train, train, strict=True)) == k


def test_the_command_writes_units_and_refuses_too_few(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table_of(60, 4)))
    asked = ["canaries", str(tmp_path), str(tmp_path / "out"), "--unit-column", "patient", "--unit-rows", "4"]
    assert main([*asked, "--pairs", "31"]) == 2
    assert "at most half of the 60 units with 4 rows or more, found 31" in capsys.readouterr().err
    assert main([*asked, "--pairs", "30"]) == 0
    assert len((tmp_path / "out" / "secret" / "first.jsonl").read_text().splitlines()) == 120
    assert json.loads((tmp_path / "out" / "secret" / "coins.json").read_text())["rows"] == 4


@pytest.mark.parametrize(
    ("unit_rows", "by_units", "said"),
    [(4, True, "CONTRADICTED"), (4, False, "for one row, which is not compared."), (1, True, "CONTRADICTED")],
)
def test_a_bound_by_units_is_compared_with_a_claim_for_units_alone(unit_rows, by_units, said):
    bound = one_run.EpsilonLowerBound(2.5, DELTA, 0.95, "loss", 200, 100, 97)
    text = describe_bound(bound, "north", PrivacyBudget(2.0, DELTA, Adjacency.REPLACE_ONE), unit_rows, by_units)
    assert said in text
    assert ("units of 4 rows" in text) == (unit_rows == 4)


class Classifier:
    """A linear classifier in two classes. The rows of a unit are alike, and those of different units are not."""

    def __init__(self, batch: int, k: int) -> None:
        self.spec = {"w": ParamSpec((WIDE,))}
        keys = {"dp.unit-column": "patient", "dp.unit-rows": k} if k else {}
        self.config = parse({"train.batch-size": batch, "train.max-steps": 1, **keys})

    def samples(self, rows):
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])

    def sample_loss(self, weights, x, y):
        return nn.functional.softplus(-(2 * y - 1) * (x @ weights["w"]) / WIDE**0.5)


def audit(seed: int, how: DpSgdConfig, k: int, by_units: bool, trains: bool = True) -> one_run.EpsilonLowerBound:
    """One step on all units, or all rows, of PAIRS canaries of k rows; score: fall of the mean loss over the rows."""
    drawn = np.random.default_rng(seed)
    coins = drawn.random(PAIRS) < 0.5
    points = drawn.normal(size=(2 * PAIRS, 1, WIDE)) + 0.1 * drawn.normal(size=(2 * PAIRS, k, WIDE))
    labels = drawn.integers(2, size=2 * PAIRS)
    canaries = [
        [(torch.tensor(x, dtype=torch.float32), float(y)) for x in of] for of, y in zip(points, labels, strict=True)
    ]
    rows = [row for i, coin in enumerate(coins) for row in canaries[i if coin else PAIRS + i]]
    task = Classifier(PAIRS if by_units else len(rows), k if by_units else 0)
    source = LocalGradientSource(task, rows)
    if by_units:
        source = UnitGradientSource(source, tuple(tuple(range(i, i + k)) for i in range(0, len(rows), k)), task.config)
    start = {"w": torch.zeros(WIDE)}
    ctx = RoundContext(0, "a", True, bytes([seed]) * 32, seeded=True)
    after = NoisyTrainer(task.spec, source, how, ctx).train(start).weights if trains else start
    falls = []
    for of_canary in canaries:
        x, y = task.samples(of_canary)
        losses = [torch.func.vmap(task.sample_loss, (None, 0, 0))(w, x, y).double().mean() for w in (start, after)]
        falls.append(float(losses[0] - losses[1]))
    scores = np.array(falls[:PAIRS]) - np.array(falls[PAIRS:])
    if not trains:
        scores = scores + 1e-9 * drawn.normal(size=PAIRS)  # otherwise all guesses would be the same
    return one_run.best_epsilon_bound({"loss": scores}, coins, DELTA)


def multiplier(epsilon: float) -> float:
    """z of one unsampled step with this epsilon for one replaced record."""
    low, high = 0.01, 1000.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        above = gaussian_mechanism.get_epsilon_gaussian(middle / 2, DELTA) > epsilon
        low, high = (middle, high) if above else (low, middle)
    return high


@pytest.mark.slow
def test_clipping_without_noise_is_shown_above_a_claim_of_two_and_noise_for_two_is_not():
    quiet = [audit(seed, DpSgdConfig(1.0, 0.0, 1.0), 4, True).epsilon for seed in range(1, 6)]
    noisy = [audit(seed, DpSgdConfig(1.0, multiplier(2.0), 1.0), 4, True).epsilon for seed in range(1, 6)]
    assert min(quiet) > 2.0, quiet
    assert max(noisy) <= 2.0, noisy


@pytest.mark.slow
def test_privacy_of_one_for_a_row_with_sixteen_rows_a_unit_shows_more_than_one_for_a_unit():
    """Sixteen rows that say the same move the sum sixteen times as far, so an audit that sees units sees it."""
    shown = [audit(seed, DpSgdConfig(1.0, multiplier(1.0), 1.0), 16, False).epsilon for seed in range(1, 4)]
    by_units = [audit(seed, DpSgdConfig(1.0, multiplier(1.0), 1.0), 16, True).epsilon for seed in range(1, 4)]
    assert min(shown) > 1.0, shown
    assert max(by_units) <= 1.0, by_units


@pytest.mark.slow
def test_a_run_that_never_trained_stays_at_zero_but_in_five_percent():
    shown = [audit(seed, DpSgdConfig(1.0, 0.0, 1.0), 2, True, trains=False).epsilon > 0 for seed in range(1, 41)]
    assert sum(shown) <= 40 * 0.05 + NormalDist().inv_cdf(0.999) * math.sqrt(40 * 0.05 * 0.95)
