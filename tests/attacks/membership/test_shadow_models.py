"""The shadow attack on a hand-made classifier: it succeeds only if the target memorized its rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from fedveil.attacks.membership import attack_net, shadow_models
from fedveil.attacks.membership.shadow_models import ShadowAttackConfig, ShadowOutputs, TargetOutputs

CLASSES, WIDTH, ROWS = 4, 24, 40
SETTINGS = ShadowAttackConfig(shadows=12, epochs=100)


def rows(seed: int, count: int = ROWS):
    """Points whose classes are drawn apart from them: only its own training can teach a row."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    return list(zip(torch.randn(count, WIDTH, generator=generator), labels.tolist(), strict=True))


def labels(of):
    return [label for _, label in of]


def trained(of, number: int, steps: int = 150):
    """A linear classifier; without a step an untrained one."""
    inputs, wanted = torch.stack([x for x, _ in of]), torch.tensor(labels(of))
    weights = torch.zeros(WIDTH, CLASSES, requires_grad=True)
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(inputs @ weights, wanted), weights)
        weights = (weights - 0.5 * gradient).detach().requires_grad_()
    return {"w": weights.detach() + 1e-3 * torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(number))}


def says(weights, of):
    return np.asarray((torch.stack([x for x, _ in of]) @ weights["w"]).double().softmax(-1).numpy())


POOL, MINE, OTHERS = rows(1, 80), rows(2), rows(3, 60)


@cache
def played(steps: int, target_steps: int | None = None):
    rng = np.random.default_rng(5)
    shadows = shadow_models.train_shadows(lambda of, n: trained(of, n, steps), says, POOL, labels(POOL), SETTINGS, rng)
    weights = trained(MINE, 99, steps if target_steps is None else target_steps)
    at = shadow_models.target_outputs(says, weights, MINE, (MINE, labels(MINE)), (OTHERS, labels(OTHERS)), POOL)
    return shadows, at, shadow_models.run_shadow_attack(shadows, at, SETTINGS, rng)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["per class", "global"])
def test_it_wins_against_a_target_that_knows_its_rows_by_heart(kind):
    outcome = played(150)[2][kind]
    assert outcome.accuracy.value > 0.85
    assert outcome.accuracy.low > 0.5
    assert outcome.pooled_auroc.low > 0.8
    assert outcome.auroc.value > 0.9
    assert outcome.tpr_at_1.value > 0.2
    assert outcome.pooled_tpr_at_1.high > 0.2
    assert (outcome.classes, outcome.rows, outcome.by_global_net) == (CLASSES, ROWS, 0)


@pytest.mark.parametrize("kind", ["per class", "global"])
def test_it_loses_against_an_untrained_target_and_says_so_for_each_class(kind):
    outcome = played(150, 0)[2][kind]
    assert outcome.pooled_auroc.low <= 0.5 <= outcome.pooled_auroc.high
    assert abs(outcome.auroc.value - 0.5) < 0.2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["per class", "global"])
def test_its_control_to_lose_fails_where_members_are_of_another_distribution(kind):
    """A target that no row was shown to answers them more surely than the others, and nets read that."""
    shadows, bare = played(150)[0], {"w": 0.5 * torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(4))}

    def at(scale: float) -> shadow_models.ShadowAttackResult:
        members = [(scale * x, y) for x, y in MINE]
        sides = (members, labels(members)), (OTHERS, labels(OTHERS))
        target = shadow_models.target_outputs(says, bare, members, *sides, POOL)
        return shadow_models.run_shadow_attack(shadows, target, SETTINGS, np.random.default_rng(5))[kind]

    assert at(1.0).pooled_auroc.low <= 0.5 <= at(1.0).pooled_auroc.high
    assert at(4.0).pooled_auroc.high < 0.5


def test_members_that_were_not_trained_on_are_refused_and_would_score_a_half():
    strangers = rows(7)
    with pytest.raises(ValueError, match="members: the target was not trained on 40 of these examples"):
        shadow_models.target_outputs(
            says, trained(MINE, 0), MINE, (strangers, labels(strangers)), (OTHERS, labels(OTHERS)), POOL
        )
    shadows, at, _ = played(150)
    wrong = replace(at, members=says(trained(MINE, 99), strangers), member_labels=np.array(labels(strangers)))
    outcome = shadow_models.run_shadow_attack(shadows, wrong, SETTINGS, np.random.default_rng(5))["global"]
    assert outcome.pooled_auroc.low <= 0.5 <= outcome.pooled_auroc.high


def test_rows_of_the_wrong_side_are_refused():
    weights = trained(MINE, 0, 0)
    with pytest.raises(ValueError, match="others: the target was trained on 1 of these examples"):
        shadow_models.target_outputs(says, weights, MINE, (MINE[1:], labels(MINE[1:])), (MINE[:1], [0]), POOL)
    with pytest.raises(ValueError, match="pool: 40 of its examples are also examples of the target"):
        shadow_models.target_outputs(says, weights, MINE, (MINE, labels(MINE)), (OTHERS, labels(OTHERS)), POOL + MINE)


def test_records_are_those_of_the_shadows_and_balanced_in_every_class():
    got = []

    def train(of, number):
        got.append([id(row) for row in of])
        return {"w": torch.full((WIDTH, CLASSES), float(number))}

    def number_of(weights, of):
        return np.full((len(of), CLASSES), float(weights["w"][0, 0]))

    settings = ShadowAttackConfig(shadows=6)
    shadows = shadow_models.train_shadows(train, number_of, POOL, labels(POOL), settings, np.random.default_rng(1))
    for number, given in enumerate(got):
        assert given == [id(row) for row, member in zip(POOL, shadows.members[number], strict=True) if member]
        assert (shadows.vectors[number] == number).all()
    assert (shadows.members.sum(0) == 3).all()
    assert shadows.labels.tolist() == labels(POOL)
    assert len({tuple(given) for given in got}) == 6


def made_up(rng, shadows=8, per_class=(12, 3), informative=(True, True)):
    """Records in which the probability of the first class says membership in classes that inform."""
    class_labels = np.repeat(np.arange(len(per_class)), per_class)
    members = np.zeros((shadows, len(class_labels)), dtype=bool)
    for first in range(0, shadows, 2):
        members[first] = rng.permuted(np.arange(len(class_labels)) % 2 == 0)
        members[first + 1] = ~members[first]
    signal = np.where(np.array(informative)[class_labels] & members, 0.9, 0.5) + 0.02 * rng.standard_normal(
        members.shape
    )
    return ShadowOutputs(np.stack([signal, 1 - signal], -1), class_labels, members)


def told(classes, values):
    values = np.asarray(values, dtype=float)
    return np.stack([values, 1 - values], -1), np.asarray(classes)


@pytest.mark.long
def test_a_class_with_few_rows_is_scored_by_the_global_net():
    rng = np.random.default_rng(0)
    (members, m), (others, o) = told([0, 0, 1, 1], [0.9] * 4), told([0, 0, 1, 1], [0.5] * 4)
    outcome = shadow_models.run_shadow_attack(
        made_up(rng), TargetOutputs(members, others, m, o), ShadowAttackConfig(shadows=8), rng
    )
    assert outcome["per class"].by_global_net == 1
    assert outcome["global"].by_global_net == 0
    assert outcome["per class"].accuracy.value == outcome["global"].accuracy.value == 1.0


@pytest.mark.long
def test_the_global_net_reads_the_class():
    """In class 0 a high first probability is a member, in class 1 a low one: the class is needed to tell."""
    rng = np.random.default_rng(0)
    shadows = made_up(rng, per_class=(12, 12))
    turned = np.where(shadows.labels == 1, 1.4 - shadows.vectors[..., 0], shadows.vectors[..., 0])
    shadows = replace(shadows, vectors=np.stack([turned, 1 - turned], -1))
    (members, m), (others, o) = told([0, 0, 1, 1], [0.9, 0.9, 0.5, 0.5]), told([0, 0, 1, 1], [0.5, 0.5, 0.9, 0.9])
    outcome = shadow_models.run_shadow_attack(
        shadows, TargetOutputs(members, others, m, o), ShadowAttackConfig(shadows=8), rng
    )["global"]
    assert outcome.accuracy.value == 1.0


@pytest.mark.long
def test_both_sides_have_as_many_rows_of_each_class_and_classes_of_one_side_are_left_out():
    rng = np.random.default_rng(0)
    members, m = told([0] * 5 + [1] * 2, [0.9] * 7)
    others, o = told([0] * 2, [0.5] * 2)
    outcome = shadow_models.run_shadow_attack(
        made_up(rng), TargetOutputs(members, others, m, o), ShadowAttackConfig(shadows=8), rng
    )["per class"]
    assert (outcome.classes, outcome.rows) == (1, 2)
    with pytest.raises(ValueError, match="no class has both members and non-members"):
        shadow_models.run_shadow_attack(
            made_up(rng), TargetOutputs(members, others, m * 0 + 1, o), ShadowAttackConfig(shadows=8), rng
        )


def test_held_out_shadows_stop_a_net_that_learns_noise():
    """With nothing to learn the best held-out loss is near ln 2; nets of the last epoch know their records by heart."""
    rng = np.random.default_rng(3)
    noise = made_up(rng, shadows=8, per_class=(12, 12), informative=(False, False))
    vectors = rng.random((*noise.vectors.shape[:2], 30))
    labels_of = noise.members[:6].ravel().astype(np.int64), noise.members[6:].ravel().astype(np.int64)
    sides = [
        (torch.from_numpy(part.reshape(-1, 30)).float(), torch.from_numpy(of))
        for part, of in zip((vectors[:6], vectors[6:]), labels_of, strict=True)
    ]
    net = attack_net.fit_attack_net(*sides, 0.01, 200, 200, torch.Generator().manual_seed(0))
    held_out_loss = float(torch.nn.functional.cross_entropy(net.logits(sides[1][0], net.weights), sides[1][1]))
    assert held_out_loss < 0.75
    assert float(torch.nn.functional.cross_entropy(net.logits(sides[0][0], net.weights), sides[0][1])) > 0.4


@pytest.mark.long
def test_one_seed_gives_one_outcome():
    shadows, at, _ = played(150)
    first, second = (shadow_models.run_shadow_attack(shadows, at, SETTINGS, np.random.default_rng(8)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"shadows": 3}, "shadows: "),
        ({"shadows": 2}, "shadows: "),
        ({"held_out": 1.0}, "held_out: "),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        ShadowAttackConfig(**fields)
