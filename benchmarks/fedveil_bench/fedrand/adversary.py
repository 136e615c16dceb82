"""A seed's attacks on models, on uploads and on the overfitted control, as metrics with replicates."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng
from fedveil.attacks.audit import controls
from fedveil.attacks.audit.controls import TrainedControl
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView
from fedveil.attacks.membership import alignment, lira
from fedveil.attacks.membership import model_scores as membership
from fedveil.attacks.membership.loss import CalibratedLossAttack, LossAttack
from fedveil.attacks.membership.max_renyi import MaxRenyiAttack
from fedveil.config import RunConfig
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows, Task
from fedveil.wire.capture import MessageCapture
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import Numbers, ResampledMetric

_MEMBERS, _HELD_OUT, _SHIFTED = 1, 2, 3  # name the random draws; for a client's members, its number is added
_TAUGHT = 0.5  # the control on other rows trains until its training loss falls to this share of the initial loss
_ATTACKS = (MaxRenyiAttack(), LossAttack(), CalibratedLossAttack())
Figures = dict[str, ResampledMetric]


@dataclass(frozen=True)
class AttackTarget:
    """A model that an adversary has, and the model's training rows.

    Attributes:
        name: names its random draws; () for the server's model.
        weights: the model's weights.
        members: its training rows.
        labels: the members' labels, if scores are compared within a label; () for the server's model.
    """

    name: tuple[int, ...]
    weights: Weights
    members: Rows
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class NonMembers:
    """Examples that no client has: held-out rows from the members' distribution, with labels, and shifted rows."""

    held_out: Rows
    labels: Sequence[str]
    shifted: Rows


class ControlYardstick:
    """LiRA, with shadow models trained on random halves of `pool`, which has the members and as many held-out rows."""

    def __init__(self, task: Task, initial: Weights, pool: Rows, count: int, seed: int) -> None:
        def train(indices: list[int], number: int) -> Weights:
            rows = [pool[i] for i in indices]
            return task.trainer(rows, rng.initial_stream(seed, f"shadow {number}")).train(initial).weights

        shadows = lira.train_shadows(train, len(pool), count, np.random.default_rng(seed))
        self._members = shadows.members
        losses = [[membership.target_loss(p) for p in task.predict(w, pool)] for w in shadows.weights]
        self._phi = lira.target_confidence(np.array(losses))
        self._index = {id(row): i for i, row in enumerate(pool)}

    def scores(self, rows: Rows, losses: Numbers) -> Numbers:
        """Return LiRA's scores for `rows`, which are in the pool.

        `losses` are their losses under the attacked model.
        """
        known = [i for i, row in enumerate(rows) if id(row) in self._index]
        at = [self._index[id(rows[i])] for i in known]
        return lira.lira_scores(lira.target_confidence(losses[known]), self._phi[:, at], self._members[:, at])


@dataclass(frozen=True)
class FedRandAdversary:
    """The parts that all attacks of a seed share.

    Attributes:
        settings: the preset's `settings.attack`.
    """

    base: membership.PublicBaseScores
    yardstick: ControlYardstick | None
    non_members: NonMembers
    settings: Mapping[str, Any]
    seed: int

    def attacked(self, task: Task, targets: Sequence[AttackTarget]) -> Figures:
        """Return each attack's AUROC, as a mean over `targets`. The prefix "shifted " means shifted non-members.

        The slice "generated" and LiRA are computed only for the server's model.
        """
        figures: dict[str, list[ResampledMetric]] = {}
        for target in targets:
            for attack, figure in self._of_model(task, target).items():
                figures.setdefault(attack, []).append(figure)
        return {attack: resampling.average_metrics(each) for attack, each in figures.items()}

    def _of_model(self, task: Task, target: AttackTarget) -> Figures:
        members, labels = self._some(target)
        generated = 0 if target.name else self.settings["generated_rows"]
        mine = self.base.scores(_ATTACKS, task, target.weights, members, generated)
        figures = {}
        for prefix, others, draw in (
            ("", self.non_members.held_out, _HELD_OUT),
            ("shifted ", self.non_members.shifted, _SHIFTED),
        ):
            if not others:
                continue
            theirs = self.base.scores(_ATTACKS, task, target.weights, others, generated)
            if self.yardstick and not target.name and not prefix:
                mine["LiRA"] = self.yardstick.scores(members, -mine["loss"])
                theirs["LiRA"] = self.yardstick.scores(others, -theirs["loss"])
            for attack in self.settings["shifted"] if prefix else list(theirs):
                pair = mine[attack], theirs[attack]
                if labels and not prefix:
                    pair = membership.center_scores(*pair, labels, self.non_members.labels)
                if min(map(len, pair)):  # it may be that no label has rows on both sides
                    figures[prefix + attack] = self._auroc(*pair, target.name, draw)
        return figures

    def _some(self, target: AttackTarget) -> tuple[Rows, Sequence[str]]:
        """Return at most `settings["rows"]` members, chosen by the seed, with their labels."""
        most = self.settings["rows"]
        if len(target.members) <= most:
            return target.members, target.labels
        at = random.Random(self.seed).sample(range(len(target.members)), most)
        return [target.members[i] for i in at], [target.labels[i] for i in at] if target.labels else ()

    def _auroc(
        self, members: Numbers, non_members: Numbers, name: tuple[int, ...], draw: int = _HELD_OUT
    ) -> ResampledMetric:
        return resampling.resample_auroc(members, non_members, (_MEMBERS, *name), (draw,))

    def aligned(
        self, view: AdversaryView, task: Task, initial: Weights, clients: Mapping[str, tuple[Rows, Sequence[str]]]
    ) -> Figures:
        """Return the AUROC of row gradients compared with their site's last upload, within a label; mean over clients.

        "alignment, wrong site" is the control: the same rows compared with another site's upload, which they did not
        affect. If all rows have equal scores, the control could not fail in any case, and there is no value.
        """
        knowledge, sites = AdversaryKnowledge(task, initial), sorted(clients)
        figures: dict[str, list[ResampledMetric]] = {}
        for i, site in enumerate(sites):
            rows, labels = clients[site]
            alike = [j for j, label in enumerate(self.non_members.labels) if label in set(labels)]
            alike = alike[: self.settings["aligned_rows"]]
            others, other_labels = (
                [of[j] for j in alike] for of in (self.non_members.held_out, self.non_members.labels)
            )
            for name, of_site in (("alignment", site), ("alignment, wrong site", sites[i - 1])):
                if name != "alignment" and of_site == site:
                    continue
                scores = [alignment.alignment_scores(view, of_site, knowledge, side) for side in (rows, others)]
                pair = membership.center_scores(scores[0], scores[1], labels, other_labels)
                if min(map(len, pair)) and len({*scores[0], *scores[1]}) > 1:
                    figures.setdefault(name, []).append(self._auroc(*pair, (10 + i,)))
        return {name: resampling.average_metrics(each) for name, each in figures.items()}

    def overfitted(self, task: Task, members: Rows, config: RunConfig) -> tuple[Figures, TrainedControl]:
        """Run every attack on a control, an overfitted FedAvg trained on `members`, and also return the control.

        `config` comes from `controls.control_config`, and `task` was loaded with this config.
        """
        with tempfile.TemporaryDirectory() as folder:
            done = controls.train_overfitted_control(task, members, config, MessageCapture(Path(folder)))
            knowledge = AdversaryKnowledge(task, self.base.initial)
            sides = done.members[::2], self.non_members.held_out[: self.settings["aligned_rows"]]
            scores = [alignment.alignment_scores(done.view, "a", knowledge, rows) for rows in sides]
        figures = self.attacked(task, [AttackTarget((), done.weights, members)])
        return figures | {"alignment": self._auroc(scores[0], scores[1], (9,))}, done

    def other_rows(self, task: Task, members: Rows, config: RunConfig) -> tuple[Figures, TrainedControl]:
        """Train a control on half of `members`, run every attack on it for the other half, and also return the control.

        `config` comes from `controls.gentle_config`, and `task` was loaded with this config.
        """
        with tempfile.TemporaryDirectory() as folder:
            done = controls.train_control(task, members[::2], config, MessageCapture(Path(folder)), _TAUGHT)
        return self.attacked(task, [AttackTarget((), done.weights, members[1::2])]), done
