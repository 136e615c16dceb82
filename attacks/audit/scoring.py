"""Run attacks on models, uploads and controls, and collect the statistics of their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from fedveil.attacks import statistics
from fedveil.attacks.audit.controls import TrainedControl
from fedveil.attacks.audit.delong import Sides
from fedveil.attacks.audit.findings import GATE, TO_LOSE, AttackFinding, Numbers, control_name, make_finding
from fedveil.attacks.audit.schedule import AuditStep
from fedveil.attacks.audit.verdict import explain_unusable
from fedveil.attacks.base import (
    OTHER_ROWS,
    OVERFITTED,
    ROUND_0,
    WRONG_SITE,
    AdversaryKnowledge,
    AdversaryView,
    AuditAttack,
    ModelAttack,
    UploadAttack,
)
from fedveil.attacks.membership.gradient_attacks import GradientAttack, SharedGradientScorer
from fedveil.attacks.membership.model_scores import PublicBaseScores, center_scores
from fedveil.attacks.samples import AuditSample
from fedveil.contract.param_spec import Weights
from fedveil.contract.task import Rows, Task

ON_UPLOADS = 64  # examples per side for attacks on uploads, which may need a gradient for each example
Kind = Literal["uploads", "model"]
KINDS: tuple[Kind, ...] = ("uploads", "model")


@dataclass(frozen=True)
class SecondSample:
    """Non-members on which an attack repeats a failed control to lose before the control counts as failed.

    With several controls on one sample, some fail by chance; the same control hardly ever fails on two samples.

    Attributes:
        sample: examples from the same distribution, disjoint from the first sample.
        asks: for each model and score name, the function that scores a control's examples and a sample again.
    """

    sample: AuditSample
    asks: dict[tuple[str, str], Callable[[AuditSample], Sides]] = field(default_factory=dict)

    def confirm(self, found: Sequence[AttackFinding]) -> tuple[list[AttackFinding], list[str]]:
        """Return the findings, with controls to lose failed only if they fail twice, and a sentence per repetition."""
        confirmed, notes = [*found], []
        for i, f in enumerate(found):
            if f.kind != "to lose" or f.verdict == "contains" or (f.model, f.attack) not in self.asks:
                continue
            members, others = self.asks[f.model, f.attack](self.sample)
            z = statistics.rank_test(members, others) * (1 if f.verdict == "above" else -1)
            again = f"{statistics.area_under_roc(members, others):.3f} on {len(others)} other non-members"
            fails = z > 0 and statistics.two_sided(z) / 2 < GATE
            confirmed[i] = f if fails else replace(f, verdict="contains")
            notes.append(
                f"{f.attack} on {f.model}: the control to lose was at {f.auroc[0]:.3f}, and at {again}, so it "
                f"{'failed' if fails else 'counts as held'}."
            )
        return confirmed, notes


class AuditScorer:
    """Builds the steps of an audit, and collects their findings.

    Attributes:
        done: the findings.
        kinds: for each score name, whether it scores models or uploads.
    """

    def __init__(
        self,
        attacks: Sequence[AuditAttack],
        base: PublicBaseScores,
        non_members: AuditSample,
        seed: int,
        say: Callable[[str], None],
        scored: dict[tuple[str, str], Sides] | None = None,
        second: SecondSample | None = None,
    ) -> None:
        self.done: list[AttackFinding] = []
        self._scored = {} if scored is None else scored
        self._second = second
        self.kinds: dict[str, Kind] = {}
        self._theirs: dict[tuple[object, ...], Mapping[str, Numbers]] = {}
        self._on_models = [attack for attack in attacks if isinstance(attack, ModelAttack)]
        self._on_uploads = [attack for attack in attacks if isinstance(attack, UploadAttack)]
        self._shared = SharedGradientScorer(
            [attack for attack in self._on_uploads if isinstance(attack, GradientAttack)]
        )
        self._base, self._non_members, self._seed, self._say = base, non_members, seed, say
        self._step = ""

    def of_controls(
        self, knowledge: AdversaryKnowledge, everyone: Rows, control: TrainedControl, taught: TrainedControl | None
    ) -> Sequence[AttackFinding]:
        """Run every attack on the controls and return the findings, which are not added to `done`."""
        before, self.done = self.done, []
        for step in self.control_steps(knowledge, everyone, control, taught):
            step.take()
        findings, self.done = self.done, before
        return findings

    def control_steps(
        self, knowledge: AdversaryKnowledge, everyone: Rows, control: TrainedControl, taught: TrainedControl | None
    ) -> list[AuditStep]:
        """Return the steps of every attack on the controls."""
        initial = knowledge.initial
        steps = self.model_steps(ROUND_0, knowledge.task, lambda: [(ROUND_0, initial)], everyone)
        steps += self._control_steps(OVERFITTED, control, initial, control.members, control.members[::2])
        if taught:
            seen = set(map(id, taught.members))
            others = [row for row in everyone if id(row) not in seen]
            steps += self._control_steps(OTHER_ROWS, taught, initial, others, others)
        return steps

    def _control_steps(
        self, name: str, control: TrainedControl, initial: Weights, members: Rows, of_client: Rows
    ) -> list[AuditStep]:
        """Build the steps for a trained control.

        `members` are scored on the control's model, and the examples `of_client` on the upload of client "a".
        """
        mine, others = (
            AuditSample(rows, [""] * len(rows)).first(ON_UPLOADS) for rows in (of_client, self._non_members.rows)
        )
        of_model = self.model_steps(name, control.task, lambda: [(name, control.weights)], members)
        knowledge = AdversaryKnowledge(control.task, initial, control.weights)
        return of_model + self.upload_steps(name, control.view, "a", knowledge, mine, others)

    def model_steps(
        self,
        on: str,
        task: Task,
        models: Callable[[], Iterable[tuple[str, Weights]]],
        members: Rows,
        labels: Sequence[str] = (),
    ) -> list[AuditStep]:
        """Return one step for all attacks on models, which share a pass, or no step if there are no such attacks.

        Args:
            on: description of the models.
            models: yields the models' names and weights, one at a time.
        """
        attacks = [attack for attack in self._on_models if on not in TO_LOSE or on in attack.must_lose]
        name = ", ".join(attack.name for attack in self._on_models)

        def take() -> None:
            for model, weights in models():
                self.of_model(attacks, model, task, weights, members, labels)

        return [AuditStep(name, on, max(attack.cost for attack in attacks), take)] if attacks else []

    def upload_steps(
        self,
        model: str,
        view: AdversaryView,
        site: str,
        knowledge: AdversaryKnowledge,
        members: AuditSample,
        others: AuditSample,
        is_beside: bool = False,
    ) -> list[AuditStep]:
        """Return a step per attack that can read `site`'s uploads; with another site's examples, it is a control."""

        def step(attack: UploadAttack) -> AuditStep:
            return AuditStep(
                attack.name,
                f"{model} ({WRONG_SITE})" if is_beside else model,
                attack.cost,
                lambda: self.of_upload(attack, model, view, site, knowledge, members, others, is_beside),
            )

        return [step(attack) for attack in self._on_uploads if view.exchange.method.upload_kind in attack.reads]

    def begin_step(self, number: int, count: int) -> None:
        """Put the step's number and the number of all steps before the messages that follow."""
        self._step = f"{number} of {count}: "

    def of_model(
        self,
        attacks: Sequence[ModelAttack],
        model: str,
        task: Task,
        weights: Weights,
        members: Rows,
        labels: Sequence[str] = (),
    ) -> None:
        """Run attacks on one model; with the members' labels, compare scores within a label."""
        others = self._non_members
        self._say(f"{self._step}{model}: {len(members)} members, {len(others.rows)} non-members")
        mine, theirs = (self._base.scores(attacks, task, weights, rows) for rows in (members, others.rows))
        for name in mine:
            self.kinds[name] = "model"
            self.add(model, name, mine[name], theirs[name], labels, others.labels)

    def of_upload(
        self,
        attack: UploadAttack,
        model: str,
        view: AdversaryView,
        site: str,
        knowledge: AdversaryKnowledge,
        members: AuditSample,
        others: AuditSample,
        is_control: bool = False,
    ) -> None:
        """Run one attack on the uploads of `site`."""
        self._say(f"{self._step}{model}: {attack.name} on {len(members.rows)} members, {len(others.rows)} non-members")
        if not members.rows or not others.rows:
            return
        ask = partial(self._shared.scores, attack) if isinstance(attack, GradientAttack) else attack.scores
        mine = ask(view, site, knowledge, members.rows)
        asked = (id(attack), id(view), site, *map(id, others.rows))  # own and wrong-site runs share these scores
        if asked not in self._theirs:
            self._theirs[asked] = ask(view, site, knowledge, others.rows)
        theirs = self._theirs[asked]
        for name in mine:
            self.kinds[name] = "uploads"
            score_name = control_name(name) if is_control else name
            if self._second and (is_control or model in TO_LOSE):

                def again(sample: AuditSample, name: str = name) -> Sides:
                    rows = sample.alike(members.labels, ON_UPLOADS).rows
                    return mine[name], ask(view, site, knowledge, rows)[name]

                self._second.asks[model, score_name] = again
            self.add(model, score_name, mine[name], theirs[name], members.labels, others.labels)

    def add(
        self,
        model: str,
        attack: str,
        members: Numbers,
        non_members: Numbers,
        labels: Sequence[str],
        other_labels: Sequence[str],
    ) -> None:
        """Add the statistics of one attack's scores, unless no label has both members and non-members."""
        z = None
        if labels and len(members) and len(non_members):
            z = statistics.rank_test(members, non_members, labels, other_labels)
            members, non_members = center_scores(members, non_members, labels, other_labels)
        if len(members) and len(non_members):
            self._scored[model, attack] = members, non_members
            self.done.append(make_finding(model, attack, members, non_members, self._seed, z))

    def undecided(self, found: Sequence[AttackFinding], targets: Sequence[tuple[Kind, str]]) -> list[str]:
        """Return a sentence for each target for which no attack with valid controls gives a result.

        Args:
            found: findings with corrected verdicts.
            targets: models and uploads available to an adversary of the run.
        """
        reliable_attacks = {f.attack for f in found if not explain_unusable(found, f.attack)}
        usable = {(self.kinds.get(f.attack), f.model) for f in found if f.attack in reliable_attacks and not f.is_blind}
        descriptions = {"model": "its model", "uploads": "its uploads"}
        return [
            f"{on}: no attack on {descriptions[kind]} whose controls hold was tried"
            for kind, on in targets
            if (kind, on) not in usable
        ]
