"""Membership inference with shadow models.

Shokri, Stronati, Song, Shmatikov: Membership Inference Attacks Against Machine Learning Models. IEEE S&P 2017.

The adversary trains models like the target on random halves of its own examples. It records each model's output for
every example, and trains an attack network on these records to tell "in" from "out".

    record = (softmax vector of a shadow for an example, the example's class, "in" or "out")
    net_c  = Linear(C, 32) - ReLU - Linear(32, 2), logits, cross entropy; one for each class c     "per class"
    net    = the same on the vector and the one-hot class, Linear(2 C, 32)                         "global"
    score  = logit("in") - logit("out"); above 0 an example is called a member

Each example in the pool is in exactly half of the shadows, so the records are balanced in every class. The attack uses
the network from the epoch with the lowest cross entropy on held-out shadows, which no network was trained on.

| case | result |
|---|---|
| a class with fewer than 5 examples in the pool | the global network scores its examples, and the result says so |
| an example in the pool that is also in the target's examples | refused: the shadows would have seen the answer |
| a "member" that the target was not trained on | refused: a score near 1/2 would mean nothing |
| a class with only members or only non-members | left out of the result |
| more members than non-members in a class, or the reverse | equally many of each, chosen at random |

Differences from the paper: vectors from all shadows feed one set of networks; there is no synthetic data; the cross
entropy is computed from logits, not sigmoids (the code of Tran et al., DP-FPL, has both).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.attacks import statistics
from fedveil.attacks.membership import attack_net, lira
from fedveil.attacks.statistics import IntervalEstimate, Scores
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows

__all__ = [
    "FEWEST_ROWS",
    "Labels",
    "ShadowAttackConfig",
    "ShadowAttackResult",
    "ShadowOutputs",
    "TargetOutputs",
    "Vectors",
    "run_shadow_attack",
    "target_outputs",
    "train_shadows",
]

Vectors = NDArray[np.float64]  # (rows, classes), softmax
Labels = NDArray[np.int64]
Train = Callable[[Rows, int], Weights]  # trains like the target; takes examples and the shadow's number
Says = Callable[[Weights, Rows], Vectors]

FEWEST_ROWS = 5


@dataclass(frozen=True)
class ShadowAttackConfig:
    """The attack's hyperparameters.

    Attributes:
        shadows: number of shadows, even.
        held_out: fraction of the shadows that is held out to decide when the networks' training ends; at least one
            pair.
        epochs: maximum number of full-batch epochs per network.
        learning_rate: learning rate of Adam.
        patience: training ends after this many epochs without a lower held-out loss.

    Raises:
        ValueError: fewer than 4 shadows or an odd number, or another field out of range.
    """

    shadows: int = 50
    held_out: float = 0.2
    epochs: int = 200
    learning_rate: float = 0.01
    patience: int = 20

    def __post_init__(self) -> None:
        if self.shadows < 4 or self.shadows % 2:
            raise ValueError(f"shadows: must be even and at least 4, found {self.shadows}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: expected a fraction between 0 and 1, found {self.held_out}")
        if self.epochs < 1 or self.patience < 1:
            raise ValueError(f"epochs, patience: expected at least 1, found {self.epochs} and {self.patience}")


@dataclass(frozen=True)
class ShadowOutputs:
    """Outputs of the shadow models for the pool.

    Attributes:
        vectors: (shadows, examples, classes) softmax vectors.
        labels: (examples,) classes.
        members: (shadows, examples) true if the shadow was trained on the example.
    """

    vectors: NDArray[np.float64]
    labels: Labels
    members: NDArray[np.bool_]


@dataclass(frozen=True)
class TargetOutputs:
    """Outputs of the attacked model for its training examples and for other examples from the same source.

    Attributes:
        members, others: (examples, classes) softmax vectors.
        member_labels, other_labels: (examples,) classes.
    """

    members: Vectors
    others: Vectors
    member_labels: Labels
    other_labels: Labels


@dataclass(frozen=True)
class ShadowAttackResult:
    """Accuracy with which one kind of attack network separates members from non-members.

    Attributes:
        accuracy, auroc, tpr_at_1: mean over classes with its 95% interval. Accuracy is balanced, at
            threshold 0.
        pooled_auroc, pooled_tpr_at_1: values for the pooled scores of all examples, with bootstrap intervals.
        classes: number of classes in the means.
        rows: number of members, equal to the number of non-members.
        by_global_net: number of classes with too few examples for their own network.
    """

    accuracy: IntervalEstimate
    auroc: IntervalEstimate
    tpr_at_1: IntervalEstimate
    pooled_auroc: IntervalEstimate
    pooled_tpr_at_1: IntervalEstimate
    classes: int
    rows: int
    by_global_net: int = 0


def train_shadows(
    train: Train, says: Says, pool: Rows, labels: Sequence[int], settings: ShadowAttackConfig, rng: np.random.Generator
) -> ShadowOutputs:
    """Train the shadows, each on a random half of the pool, and query each shadow for every example in the pool.

    Raises:
        ValueError: the pool has fewer than 2 examples.
    """
    shadows = lira.train_shadows(lambda i, n: train([pool[j] for j in i], n), len(pool), settings.shadows, rng)
    vectors = np.stack([says(weights, pool) for weights in shadows.weights])
    return ShadowOutputs(vectors, np.asarray(labels, dtype=np.int64), shadows.members)


def target_outputs(
    says: Says,
    weights: Weights,
    trained_on: Rows,
    members: tuple[Rows, Sequence[int]],
    others: tuple[Rows, Sequence[int]],
    pool: Rows,
) -> TargetOutputs:
    """Query the attacked model on members and on other examples; return the outputs with the examples' classes.

    Raises:
        ValueError: a member is not in `trained_on`, a non-member is in `trained_on`, or an example is in the pool.
            Examples are compared by object identity.
    """
    seen, pooled = {id(row) for row in trained_on}, {id(row) for row in pool}
    if strange := sum(id(row) not in seen for row in members[0]):
        raise ValueError(
            f"members: the target was not trained on {strange} of these examples; use examples from its training data"
        )
    if known := sum(id(row) in seen for row in others[0]):
        raise ValueError(f"others: the target was trained on {known} of these examples; remove them")
    if shared := sum(id(row) in pooled for row in [*members[0], *others[0]]):
        raise ValueError(
            f"pool: {shared} of its examples are also examples of the target; give the adversary other examples"
        )
    return TargetOutputs(
        says(weights, members[0]), says(weights, others[0]), np.asarray(members[1]), np.asarray(others[1])
    )  # fmt: skip


def run_shadow_attack(
    found: ShadowOutputs, at: TargetOutputs, settings: ShadowAttackConfig, rng: np.random.Generator
) -> Mapping[str, ShadowAttackResult]:
    """Return the results of the networks "per class" and "global". Raises ValueError if no class has both sides."""
    classes = found.vectors.shape[-1]
    pairs = settings.shadows // 2
    held_out_mask = np.repeat(
        np.isin(np.arange(pairs), rng.permutation(pairs)[: max(1, round(settings.held_out * pairs))]), 2
    )
    seed = int(rng.integers(2**31))

    def fitted(chosen: NDArray[np.bool_], tagged: bool, number: int) -> attack_net.AttackNet:
        """Train a network on the records of the chosen examples."""

        def of(side: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
            vectors = found.vectors[side][:, chosen].reshape(-1, classes)
            labels = np.tile(found.labels[chosen], int(side.sum()))
            return _inputs(vectors, labels if tagged else None), _tensor(found.members[side][:, chosen].ravel())

        generator = torch.Generator().manual_seed(seed + number)
        return attack_net.fit_attack_net(
            of(~held_out_mask), of(held_out_mask), settings.learning_rate, settings.epochs, settings.patience, generator
        )

    whole = fitted(np.ones(len(found.labels), dtype=bool), tagged=True, number=classes)
    per_class: dict[int, attack_net.AttackNet] = {}
    for c in sorted(set(at.member_labels.tolist()) & set(at.other_labels.tolist())):
        if (found.labels == c).sum() >= FEWEST_ROWS:
            per_class[c] = fitted(found.labels == c, tagged=False, number=c)

    def by_whole(vectors: Vectors, labels: Labels) -> Scores:
        return whole.scores(_inputs(vectors, labels))

    def by_class(vectors: Vectors, labels: Labels) -> Scores:
        scores = by_whole(vectors, labels)
        for c, net in per_class.items():
            scores[labels == c] = net.scores(_inputs(vectors[labels == c], None))
        return scores

    chosen = _balanced(at, rng)
    return {
        "per class": _outcome(chosen, by_class, rng, set(chosen.member_labels.tolist()) - set(per_class)),
        "global": _outcome(chosen, by_whole, rng, set()),
    }


def _balanced(at: TargetOutputs, rng: np.random.Generator) -> TargetOutputs:
    """Select equally many members and others from each class. Raises ValueError if no class has both."""
    indices: tuple[list[int], list[int]] = ([], [])
    for c in sorted(set(at.member_labels.tolist()) & set(at.other_labels.tolist())):
        sides = [np.flatnonzero(labels == c) for labels in (at.member_labels, at.other_labels)]
        count = min(map(len, sides))
        for side, into in zip(sides, indices, strict=True):
            into += sorted(rng.permutation(side)[:count].tolist())
    if not indices[0]:
        raise ValueError("no class has both members and non-members; score members and non-members of the same classes")
    m, o = indices
    return TargetOutputs(at.members[m], at.others[o], at.member_labels[m], at.other_labels[o])


def _outcome(
    at: TargetOutputs, scored: Callable[[Vectors, Labels], Scores], rng: np.random.Generator, by_global_net: set[int]
) -> ShadowAttackResult:
    members, others = scored(at.members, at.member_labels), scored(at.others, at.other_labels)
    rows = []
    for c in sorted(set(at.member_labels.tolist())):
        m, o = members[at.member_labels == c], others[at.other_labels == c]
        accuracy = ((m > 0).mean() + (o <= 0).mean()) / 2
        rows.append((accuracy, statistics.area_under_roc(m, o), statistics.tpr_at_fpr(m, o, 0.01)))
    accuracy, auroc, tpr = (_mean(np.array(column), rng) for column in zip(*rows, strict=True))
    pooled = [
        statistics.bootstrap_interval(statistic, members, others, rng)
        for statistic in (statistics.areas_under_roc, partial(statistics.tprs_at_fpr, fpr=0.01))
    ]
    return ShadowAttackResult(accuracy, auroc, tpr, pooled[0], pooled[1], len(rows), len(members), len(by_global_net))


def _mean(values: Scores, rng: np.random.Generator, resamples: int = 1000) -> IntervalEstimate:
    """Return the mean over classes with its bootstrap interval."""
    drawn = rng.choice(values, (resamples, len(values))).mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return IntervalEstimate(float(values.mean()), float(low), float(high))


def _tensor(values: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _inputs(vectors: Vectors, labels: Labels | None) -> Tensor:
    """Return the vectors, concatenated with one-hot classes if `labels` is given."""
    features = torch.from_numpy(np.ascontiguousarray(vectors)).float()
    if labels is None:
        return features
    return torch.cat([features, torch.nn.functional.one_hot(torch.from_numpy(labels), vectors.shape[-1])], dim=1)
