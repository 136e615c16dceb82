"""Audit a run: run every applicable attack on the run's captured messages, together with its controls.

| model under attack | available to |
|---|---|
| server | every party that gets the final model |
| <site> | the server: the site's last factors or weights, paired by `factor_pairing.latest_factors` |
| <site>, merged | the server: the site's last upload, with the rest from the broadcast that the site answered |
| round 0 | a control: the model is untrained, so an attack must fail |
| other rows | a control: trained on half of the members and scored on the others, so an attack must fail |
| another site's upload | a control for attacks on uploads: not trained on the site's examples, so attacks must fail |
| overfitted FedAvg | a control: a few memorized members, no defense, so an attack must succeed |
| <site>, the sum | the server of a secure run: the sum of all sites instead of the upload (attacks/secagg_views.py) |

If an attack's controls fail, the attack proves nothing about the run in either direction, and the result
says so. In round 0, and for a model trained on other examples, the controls show whether the non-members come
from the members' distribution.

An attack gets the captured messages, the knowledge of every adversary (base model, initial weights, method)
and unlabeled examples. Only the statistics know which of the examples are members. For a site's model,
scores are compared within a label: a model that favors its site's labels is not a sign of membership.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks.audit import controls, image_reconstruction, token_recovery_audit
from fedveil.attacks.audit.controls import TrainedControl
from fedveil.attacks.audit.delong import Sides
from fedveil.attacks.audit.findings import (
    ALPHA,
    GATE,
    AttackFinding,
    AuditReport,
    ReconstructionFinding,
    correct_for_multiple_tests,
)
from fedveil.attacks.audit.schedule import AuditStep, TimeBudget, describe_skipped, take_steps
from fedveil.attacks.audit.scoring import KINDS, ON_UPLOADS, AuditScorer, Kind, SecondSample
from fedveil.attacks.audit.verdict import control_notes
from fedveil.attacks.base import (
    AdversaryKnowledge,
    AdversaryView,
    AuditAttack,
    UploadAttack,
    explain_misfit,
    list_attacks,
)
from fedveil.attacks.canaries import pairs
from fedveil.attacks.membership.model_scores import PublicBaseScores, target_loss
from fedveil.attacks.model_extraction import factor_pairing
from fedveil.attacks.samples import LEAST, AuditDataSource, AuditSample, draw_samples
from fedveil.attacks.secagg_views import secagg_view_of_run
from fedveil.config import RunConfig
from fedveil.contract.param_spec import Weights
from fedveil.privacy.guarantee_source import guarantee_of
from fedveil.wire.capture import MessageCapture

__all__ = ["audit_run"]

_BY_HEART = 64  # number of members of the overfitted control
_UNREAD: Mapping[str, Sequence[str]] = {
    "weights": (),
    "gradients": (
        "The sites send gradients, so there is no site model to attack; the alignment is measured against "
        "the sent gradients.",
    ),
    "changes": ("The sites' uploads are NOT attacked: they are changes of a proxy, which no attack here can read.",),
}
_NEVER = (
    "Left out of every audit: LiRA and shadow models (they train dozens of models), imprinting (a server that "
    "deviates), property inference (the auditor would have to name the property), inference of which sites were in "
    "a round (the auditor would need examples of sites that were not), recovery by clients from a proxy; fedveil "
    "bench has most of them."
)
_NO_PICTURES = (
    "Left out: pictures reconstructed from gradients: the sites of this run send none, or their examples are not "
    "pictures."
)


def audit_run(
    folder: Path,
    config: RunConfig,
    asked: Sequence[str],
    source: AuditDataSource,
    device: str = "auto",
    say: Callable[[str], None] = lambda text: None,
    budget: TimeBudget | None = None,
    planted: tuple[str, Path] | None = None,
) -> tuple[AuditReport, bytes | None]:
    """Attack a finished run from its captured messages. Write no file.

    Args:
        folder: the run folder, with captured messages and final model.
        config: the run's config.
        asked: every site that the run asked to take part.
        source: the auditor's examples.
        device: device for the models: "auto", "cpu" or "cuda".
        say: called with progress messages.
        budget: time limit for the attacks; the controls are always trained, and use part of the budget.
        planted: a site, and the folder with the canaries in its examples.

    Returns:
        The report, and a PNG of reconstructed images, or None if the run sends no image gradients.

    Raises:
        StateError: there are no captured messages, or no final model.
        ConfigError: `source` names no examples, or there are too few.
    """
    budget = budget or TimeBudget()
    method = strategies.create_method(config.method.name, config.method.params)
    task = tasks.load_task(config, method.adapter, device)
    view, sums, notes, server = secagg_view_of_run(folder, config, method, task)
    members, non_members = draw_samples(source, config, task, asked, view.sites)
    knowledge = AdversaryKnowledge(
        task=task,
        initial=task.initial(rng.initial_stream(config.run.seed, "weights")),
        server=server,
    )
    canary_epsilon = None
    if planted:
        site, canary_folder = planted
        say(f"{site}: canaries")
        claim = guarantee_of(method, config)
        delta = claim.budget.delta if claim else pairs.DELTA
        bound = pairs.bound_from_audit(canary_folder, site, view, knowledge, delta)
        canary_epsilon = bound.epsilon
        told = claim.budget if claim else None
        unit_rows, by_units = pairs.canary_rows(canary_folder), bool(config.dp.unit_column)
        notes = [pairs.describe_bound(bound, site, told, unit_rows, by_units), *notes]
    with tempfile.TemporaryDirectory() as scratch:
        pair = controls_of(knowledge, config, members, source, Path(scratch), device, say)
        report = run_audit(view, knowledge, members, non_members, *pair, source.seed, say, sums, budget=budget)
    over = budget.left <= 0
    sheet = None if over else image_reconstruction.reconstruct_images(view, task, config, members)
    more = ["Left out: pictures reconstructed from gradients: there was not enough time."] if over else [_NO_PICTURES]
    read = token_recovery_audit.audit_notes(view, knowledge, config, members, non_members, lambda: budget.left <= 0)
    all_notes = [*notes, *report.notes, *(sheet.notes if sheet else more), *read, _NEVER]
    return replace(report, notes=all_notes, epsilon_shown=canary_epsilon), sheet.png if sheet else None


def controls_of(
    knowledge: AdversaryKnowledge,
    config: RunConfig,
    members: Mapping[str, AuditSample],
    source: AuditDataSource,
    scratch: Path,
    device: str,
    say: Callable[[str], None],
    by_heart: int = _BY_HEART,
) -> tuple[TrainedControl, TrainedControl | None]:
    """Train the overfitted control, and a control on half of the members, trained as well as the run's model."""
    assert knowledge.server is not None
    everyone = [row for sample in members.values() for row in sample.rows]
    drawn = random.Random(source.seed).sample(everyone, len(everyone))
    known, half = drawn[:by_heart], drawn[: min(len(drawn) // 2, source.most)]
    own, adapter = controls.control_config(config), strategies.create_method("fedavg").adapter
    say(f"Training the overfitted control on {len(known)} members")
    tap = MessageCapture(scratch / "by-heart")
    overfitted = controls.train_overfitted_control(tasks.load_task(own, adapter, device), known, own, tap, say=say)
    if len(drawn) - len(half) < LEAST:
        return overfitted, None
    base = PublicBaseScores(knowledge.task, knowledge.initial)
    left = [target_loss(prediction) for prediction in knowledge.task.predict(knowledge.server, half)]
    share = sum(left) / float(base.losses(half).sum())
    say(f"Training the control of other rows on {len(half)} members, to {100 * share:.0f} % of their loss")
    gentle = controls.gentle_config(own)
    task = tasks.load_task(gentle, adapter, device)
    return overfitted, controls.train_control(
        task, half, gentle, MessageCapture(scratch / "other-rows"), share, say=say
    )


def run_audit(
    view: AdversaryView,
    knowledge: AdversaryKnowledge,
    members: Mapping[str, AuditSample],
    non_members: AuditSample,
    control: TrainedControl,
    taught: TrainedControl | None,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
    sums: AdversaryView | None = None,
    attacks: Sequence[AuditAttack] | None = None,
    known: Sequence[AttackFinding] = (),
    budget: TimeBudget | None = None,
    scored: dict[tuple[str, str], Sides] | None = None,
    second: SecondSample | None = None,
) -> AuditReport:
    """Run every attack on the server's model, each rebuilt client, each site's uploads, and the controls.

    Args:
        view: the server's view.
        knowledge: the adversary's knowledge about the same run; `server` is its final model.
        members: training examples of each site that took part.
        non_members: examples from the same distribution that no site trained on.
        control: the overfitted control.
        taught: the control trained on other examples, if there are enough.
        seed: seed of the bootstrap.
        sums: view of a secure run's sums, if its broadcasts reveal them.
        attacks: the attacks to run; by default every installed attack.
        known: findings about the controls, if already available.
        budget: time limit; steps that do not fit are skipped and named.
        scored: receives the scores of members and non-members, by model and attack.
        second: other non-members; a control to lose counts as failed only if it also fails on them.

    Raises:
        ValueError: `knowledge` has no final model.
    """
    if knowledge.server is None:
        raise ValueError("knowledge.server: the server's final model is missing; pass it to AdversaryKnowledge")
    server = knowledge.server
    attacks = list_attacks() if attacks is None else attacks
    reasons = [(attack, explain_misfit(attack, view, knowledge)) for attack in attacks]
    fitting = [attack for attack, reason in reasons if not reason]
    base = PublicBaseScores(knowledge.task, knowledge.initial)
    scorer = AuditScorer(fitting, base, non_members, seed, say, scored, second)
    everyone = [row for sample in members.values() for row in sample.rows]
    steps = [] if known else scorer.control_steps(knowledge, everyone, control, taught)
    steps += scorer.model_steps("server", knowledge.task, lambda: [("server", server)], everyone)
    of_run = _OfRun(view, sums, knowledge, server, members, non_members, scorer)
    steps += [step for site in members for step in of_run.steps(site)]
    scorer.done = [*known]
    left = take_steps(steps, budget or TimeBudget(), scorer.begin_step)
    done, repeated = correct_for_multiple_tests(scorer.done, GATE if second else ALPHA), list[str]()
    if second:
        done, repeated = second.confirm(done)
    targets: list[tuple[Kind, str]] = [("model", "server"), *(t for site in members for t in of_run.targets(site))]
    notes = [*repeated, *control_notes(done, control, taught), *_unread(view.exchange.method.upload_kind, attacks)]
    notes += [f"Left out: {attack.name}: {reason}." for attack, reason in reasons if reason]
    return AuditReport(done, of_run.rebuilt, [*notes, *describe_skipped(left)], scorer.undecided(done, targets))


@dataclass(frozen=True)
class _OfRun:
    """Attack targets of the audited run, by site.

    Attributes:
        server: weights of the server's final model.
        rebuilt: filled as the sites' models are rebuilt, one at a time, because a model may be large.
    """

    view: AdversaryView
    sums: AdversaryView | None
    knowledge: AdversaryKnowledge
    server: Weights
    members: Mapping[str, AuditSample]
    non_members: AuditSample
    found: AuditScorer
    rebuilt: list[ReconstructionFinding] = field(default_factory=list)

    @property
    def _sends_weights(self) -> bool:
        return self.view.exchange.method.upload_kind == "weights"

    def targets(self, site: str) -> list[tuple[Kind, str]]:
        """List the attack targets for a site: its upload, the sum that contains it, and models if it sent weights."""
        names = [site, *([_summed(site)] if self.sums else [])]
        return [(kind, name) for kind in (KINDS if self._sends_weights else KINDS[:1]) for name in names]

    def steps(self, site: str) -> list[AuditStep]:
        """Return the steps of all attacks on a site's uploads, on another site's uploads, and on its rebuilt models."""
        sample, sites = self.members[site], list(self.members)
        mine, theirs = (of.alike(sample.labels, ON_UPLOADS) for of in (sample, self.non_members))
        steps = self.found.upload_steps(site, self.view, site, self.knowledge, mine, theirs)
        if len(sites) > 1:
            other = sites[sites.index(site) - 1]
            steps += self.found.upload_steps(site, self.view, other, self.knowledge, mine, theirs, is_beside=True)
        if self.sums:
            steps += self.found.upload_steps(_summed(site), self.sums, site, self.knowledge, mine, theirs)
        if self._sends_weights:
            rows, labels = sample.rows, sample.labels
            steps += self.found.model_steps(site, self.knowledge.task, lambda: self._rebuilt(site), rows, labels)
        return steps

    def _rebuilt(self, site: str) -> Iterator[tuple[str, Weights]]:
        latest = factor_pairing.latest_factors(self.view, site, self.server)
        self.rebuilt.append(ReconstructionFinding(site, latest.coverage, latest.staleness))
        yield site, latest.weights
        if latest.staleness or latest.coverage < 1:
            yield f"{site}, merged", factor_pairing.merge_with_broadcast(self.view, site, self.server).weights
        if self.sums:
            yield _summed(site), factor_pairing.latest_factors(self.sums, site, self.server).weights


def _summed(site: str) -> str:
    return f"{site}, the sum"


def _unread(kind: str, attacks: Sequence[AuditAttack]) -> Sequence[str]:
    """Return sentences about uploads of this kind that the audit does not attack."""
    read = any(isinstance(attack, UploadAttack) and kind in attack.reads for attack in attacks)
    return () if kind == "changes" and read else _UNREAD[kind]
