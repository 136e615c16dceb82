"""All attacks in one pass: their names, their values on an arithmetic task, and the effect of centering."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from fedveil.attacks.base import ModelAttack
from fedveil.attacks.membership.loss import CalibratedLossAttack, LossAttack
from fedveil.attacks.membership.max_renyi import MaxRenyiAttack
from fedveil.attacks.membership.model_scores import PublicBaseScores, center_scores, target_loss
from fedveil.attacks.statistics import area_under_roc
from fedveil.contract.task import ExamplePrediction

ATTACKS: list[ModelAttack] = [MaxRenyiAttack(), LossAttack(), CalibratedLossAttack()]
SHARP = {"w": torch.tensor(3.0)}
BASE = {"w": torch.tensor(0.0)}


@dataclass(frozen=True)
class Row:
    """`length` positions, wanted class 0 of 4; `fit` is how far its logit rises with the weight."""

    name: str
    length: int = 2
    fit: float = 1.0


@dataclass
class Counting:
    """A task that counts what it is asked: the wanted class's logit is weight * fit, the others' are 0."""

    images: bool = True
    asked: list[tuple[float, str, bool]] = field(default_factory=list)

    def predict(self, weights, rows, generate=False):
        for row in rows:
            weight = float(weights["w"])
            self.asked.append((weight, row.name, generate))
            logits = torch.zeros(row.length, 4)
            logits[:, 0] = weight * row.fit
            slices = {"target": logits}
            if self.images:
                slices["image"] = logits.repeat(3, 1) / 2
            if generate:
                slices["generated"] = logits[:1] * 2
            yield ExamplePrediction(slices, torch.zeros(row.length, dtype=torch.int64))


def loss(logit: float) -> float:
    """-ln softmax of the first of (logit, 0, 0, 0)."""
    return math.log(math.exp(logit) + 3) - logit


def entropy(logit: float, alpha: float = 0.5) -> float:
    p = [math.exp(logit) / (math.exp(logit) + 3), *[1 / (math.exp(logit) + 3)] * 3]
    if math.isinf(alpha):
        return -math.log(max(p))
    return -sum(q * math.log(q) for q in p) if alpha == 1 else math.log(sum(q**alpha for q in p)) / (1 - alpha)


ROWS = [Row("a"), Row("b", length=3, fit=0.5), Row("c", length=1, fit=2.0)]
KINDS = ("0%", "10%", "100%")


def test_loss_is_the_mean_over_the_target():
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    mean_loss = target_loss(ExamplePrediction({"target": logits, "image": torch.zeros(9, 2)}, torch.tensor([1, 0])))
    assert mean_loss == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)


def test_scores_by_name_and_by_hand():
    task = Counting()
    scores = PublicBaseScores(task, BASE).scores(ATTACKS, task, SHARP, ROWS)
    assert set(scores) == {"loss", "calibrated"} | {f"{s} {k}" for s in ("image", "caption") for k in KINDS}
    logits = [3.0, 1.5, 6.0]
    np.testing.assert_allclose(scores["loss"], [-loss(x) for x in logits], rtol=1e-4)
    np.testing.assert_allclose(scores["calibrated"], [math.log(4) - loss(x) for x in logits], rtol=1e-4)
    for kind in KINDS:  # all positions of a row are equal
        np.testing.assert_allclose(scores[f"caption {kind}"], [-entropy(x) for x in logits], rtol=1e-4)
        np.testing.assert_allclose(scores[f"image {kind}"], [-entropy(x / 2) for x in logits], rtol=1e-4)


def test_a_model_without_images_has_a_target_and_no_caption():
    task = Counting(images=False)
    assert set(PublicBaseScores(task, BASE).scores(ATTACKS, task, SHARP, ROWS)) == {
        "loss",
        "calibrated",
        *(f"target {k}" for k in KINDS),
    }


def test_generated_is_of_the_first_rows_only():
    task = Counting()
    base = PublicBaseScores(task, BASE)
    scores, plain = base.scores(ATTACKS, task, SHARP, ROWS, generated_rows=2), base.scores(ATTACKS, task, SHARP, ROWS)
    assert set(scores) - set(plain) == {f"generated {k}" for k in KINDS}
    np.testing.assert_allclose(scores["generated 0%"], [-entropy(6.0), -entropy(3.0)], rtol=1e-4)
    for name, values in plain.items():
        np.testing.assert_array_equal(scores[name], values)
    assert [name for _, name, generate in task.asked if generate] == ["a", "b"]


@pytest.mark.parametrize("alpha", [1.0, 2.0, math.inf])
def test_another_alpha_than_the_headline_s(alpha):
    task = Counting()
    scores = PublicBaseScores(task, BASE).scores([MaxRenyiAttack(alpha)], task, SHARP, ROWS)
    assert set(scores) == {f"{s} {k}" for s in ("image", "caption") for k in KINDS}
    np.testing.assert_allclose(scores["caption 100%"], [-entropy(x, alpha) for x in (3, 1.5, 6)], rtol=1e-4)


def test_two_attacks_cannot_give_a_score_of_one_name():
    task = Counting()
    with pytest.raises(ValueError, match="two attacks use the same score name ..'loss', 'loss'..; rename one"):
        PublicBaseScores(task, BASE).scores([LossAttack(), LossAttack()], task, SHARP, ROWS)


def test_the_base_is_asked_about_each_row_once():
    """Over several models and overlapping rows; the attacked model is asked about each row of each call."""
    task = Counting()
    base = PublicBaseScores(task, BASE)
    base.scores(ATTACKS, task, SHARP, ROWS[:2])
    base.scores(ATTACKS, task, {"w": torch.tensor(5.0)}, ROWS)
    np.testing.assert_allclose(base.losses(ROWS[::-1]), [math.log(4)] * 3, rtol=1e-6)
    of_base = Counter(name for weight, name, _ in task.asked if weight == 0.0)
    assert of_base == {"a": 1, "b": 1, "c": 1}
    assert Counter(weight for weight, _, _ in task.asked) == {0.0: 3, 3.0: 2, 5.0: 3}


def test_losses_come_in_the_order_asked_for():
    task = Counting()
    base = PublicBaseScores(task, SHARP)
    expected = {row.name: loss(3 * row.fit) for row in ROWS}
    for order in ([2, 0], [1, 2, 0], [0, 1, 2]):
        np.testing.assert_allclose(
            base.losses([ROWS[i] for i in order]), [expected[ROWS[i].name] for i in order], rtol=1e-4
        )


def test_a_row_that_is_known_stays_alive():
    """Rows are told apart by identity; a freed row's address could be the next one's."""
    base, rows = PublicBaseScores(Counting(), SHARP), [Row("a")]
    weak_ref = weakref.ref(rows[0])
    base.losses(rows)
    del rows
    assert weak_ref() is not None


# --- centring ---------------------------------------------------------------------------------------------------------


def test_centred_by_hand():
    """Label x: non-members 1, 2, 6 with mean 3. Label y has one non-member, so no mean without it; z no non-member."""
    members = np.array([5.0, 0.0, 7.0, 9.0])
    others = np.array([1.0, 100.0, 2.0, 6.0, 50.0, 60.0])
    mine, theirs = center_scores(members, others, ["x", "x", "y", "z"], ["x", "y", "x", "x", "w", "w"])
    np.testing.assert_allclose(mine, [2.0, -3.0])
    np.testing.assert_allclose(theirs, [1 - 4.0, 2 - 3.5, 6 - 1.5])  # w: no member has it


def test_nothing_left_is_nothing_and_lengths_must_agree():
    mine, theirs = center_scores(np.array([1.0]), np.array([2.0, 3.0]), ["x"], ["y", "y"])
    assert len(mine) == len(theirs) == 0
    with pytest.raises(ValueError):
        center_scores(np.array([1.0, 2.0]), np.array([2.0, 3.0]), ["x"], ["x", "x"])
    with pytest.raises((ValueError, IndexError)):
        center_scores(np.array([1.0]), np.array([2.0, 3.0]), ["x"], ["x", "x", "x"])


def simulated(effect: float, seed: int, rows: int = 3000) -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    """A client with mostly the labels that its model likes, against a population of all labels alike."""
    rng = np.random.default_rng(seed)
    liked = np.array([3.0, 2.0, 0.0, -2.0, -3.0])
    mine, other = rng.choice(5, rows, p=[0.5, 0.3, 0.1, 0.05, 0.05]), rng.integers(5, size=rows)
    members = liked[mine] + rng.normal(size=rows) + effect
    non_members = liked[other] + rng.normal(size=rows)
    return members, non_members, [str(x) for x in mine], [str(x) for x in other]


def test_centring_takes_the_labels_away():
    """Nothing was memorised, and yet the client's rows look like members until they are compared with their like."""
    members, others, *labels = simulated(0.0, seed=0)
    assert area_under_roc(members, others) > 0.68
    assert area_under_roc(*center_scores(members, others, *labels)) == pytest.approx(0.5, abs=0.02)


def test_centring_leaves_membership():
    """A shift of one deviation is an AUROC of Phi(1 / sqrt 2) = 0.760."""
    members, others, *labels = simulated(1.0, seed=1)
    assert area_under_roc(*center_scores(members, others, *labels)) == pytest.approx(0.760, abs=0.02)


def test_small_groups_are_not_biased():
    """Three non-members a label: without leaving itself out a non-member would lie nearer to its mean than a member."""
    spread = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        labels = [str(i // 3) for i in range(60)]
        mine, theirs = center_scores(rng.normal(size=60), rng.normal(size=60), labels, labels)
        spread.append(
            (mine.std(), theirs.std(), area_under_roc(mine, theirs), area_under_roc(np.abs(mine), np.abs(theirs)))
        )
    _, _, area, of_sizes = np.mean(spread, 0)
    assert area == pytest.approx(0.5, abs=0.02)
    assert of_sizes == pytest.approx(0.5, abs=0.04)
