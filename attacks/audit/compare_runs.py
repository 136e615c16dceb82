"""Run a few attacks on several runs of the same sites and examples, with one shared set of controls.

`fedveil demo` uses this audit: it takes seconds and applies the same controls as attacks/audit/runner.py.
It compares the runs example by example (attacks/audit/delong.py), over all sites. The server's view of a
site is its upload or, under secure aggregation, the sum. The baseline for an upload is the score of the same examples
on another site's upload: examples that are easy to identify on their own score high on both. A control to lose voids a
result only if it fails on two samples of non-members.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks.audit import runner
from fedveil.attacks.audit.controls import TrainedControl
from fedveil.attacks.audit.delong import Sides, SiteAveragedAuroc, SitePlacements
from fedveil.attacks.audit.findings import AttackFinding, AuditReport, attack_names, control_name
from fedveil.attacks.audit.scoring import AuditScorer, SecondSample
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView, AuditAttack
from fedveil.attacks.membership.model_scores import PublicBaseScores
from fedveil.attacks.samples import AuditDataSource, AuditSample, draw_samples
from fedveil.attacks.secagg_views import secagg_view_of_run
from fedveil.config import RunConfig
from fedveil.contract.task import Task
from fedveil.errors import ConfigError

_SAME = ("task", "train")  # sections that determine the examples and how long training uses each of them


@dataclass(frozen=True)
class SharedAuditInputs:
    """Inputs shared by the audits of all compared runs.

    Attributes:
        config: run config of the first run.
        attacks: attacks to run.
        members, non_members: the auditor's examples.
        second: other non-members, for controls that fail on the first sample.
        overfitted, taught: trained controls.
        of_controls: attack findings for the controls.
        seed: seed of the bootstrap.
    """

    config: RunConfig
    attacks: Sequence[AuditAttack]
    members: Mapping[str, AuditSample]
    non_members: AuditSample
    second: SecondSample
    overfitted: TrainedControl
    taught: TrainedControl | None
    of_controls: Sequence[AttackFinding]
    seed: int


@dataclass(frozen=True)
class RunAudit:
    """A run's audit.

    Attributes:
        audit: the findings.
        over_sites: placement values of each attack on all sites; empty if the sites have different non-members,
            or if broadcasts do not reveal the secure sums.
    """

    audit: AuditReport
    over_sites: Mapping[str, SitePlacements]

    def beside(self, bases: Mapping[str, RunAudit]) -> AuditReport:
        """Return the audit with each attack over all sites, compared with other runs (keyed by audit.json digest)."""
        across = []
        for attack, mine in self.over_sites.items():
            others = {digest: of[attack] for digest, base in bases.items() if attack in (of := base.over_sites)}
            across.append(SiteAveragedAuroc.from_placements(attack, mine, others))
        return replace(self.audit, across=across)


def prepare_shared_inputs(
    folder: Path,
    config: RunConfig,
    asked: Sequence[str],
    source: AuditDataSource,
    attacks: Sequence[AuditAttack],
    by_heart: int,
    each: int,
) -> SharedAuditInputs:
    """Train the controls for the finished run in `folder`, and attack them, on the CPU. Write no file.

    Args:
        config: the run's config.
        asked: every site; each takes part in every run.
        source: the auditor's examples.
        attacks: the attacks to try.
        by_heart: number of members in the overfitted control.
        each: number of attacked members per site, and of non-members in each of the two samples. With too few
            non-members for two such samples, each sample gets half of them.

    Raises:
        StateError: there are no captured messages, or no final model.
        ConfigError: there are no examples, or too few.
    """
    knowledge, *_ = _read(folder, config)
    source = replace(source, most=2 * each)
    members, rest, spare = draw_compared_samples(source, config, knowledge.task, asked)
    second = SecondSample(spare)
    with tempfile.TemporaryDirectory() as scratch:
        trained = runner.controls_of(
            knowledge, config, members, source, Path(scratch), "cpu", lambda text: None, by_heart
        )
        base = PublicBaseScores(knowledge.task, knowledge.initial)
        collector = AuditScorer(attacks, base, rest, source.seed, lambda text: None, second=second)
        everyone = [row for sample in members.values() for row in sample.rows]
        control_findings = collector.of_controls(knowledge, everyone, *trained)
    return SharedAuditInputs(config, attacks, members, rest, second, *trained, control_findings, source.seed)


def draw_compared_samples(
    source: AuditDataSource, config: RunConfig, task: Task, asked: Sequence[str]
) -> tuple[dict[str, AuditSample], AuditSample, AuditSample]:
    """Return the members of each site and two samples of non-members, each with at most half of `source.most` examples.

    Raises:
        ConfigError: there are no examples, or too few.
    """
    each, seed = source.most // 2, source.seed
    drawn, others = draw_samples(source, config, task, asked, asked)
    members = {site: sample.shuffled(seed).first(each) for site, sample in drawn.items()}
    return members, *others.shuffled(seed).halves(each)


def audit_run_pair(told: SharedAuditInputs, folder: Path, config: RunConfig) -> RunAudit:
    """Attack a finished run from its captured messages. Write no file.

    Raises:
        StateError: there are no captured messages, or no final model.
        ConfigError: the run's examples differ from those of the first run.
    """
    if any(getattr(config, section) != getattr(told.config, section) for section in _SAME):
        raise ConfigError(
            f"runs: the sections {' and '.join(_SAME)} of {config.run.name} differ from those of the first run; "
            "audit it separately"
        )
    knowledge, view, sums, notes = _read(folder, config)
    scored: dict[tuple[str, str], Sides] = {}
    report = runner.run_audit(
        view, knowledge, told.members, told.non_members, told.overfitted, told.taught, told.seed,
        sums=sums, attacks=told.attacks, known=told.of_controls, scored=scored, second=told.second,
    )  # fmt: skip
    hidden = config.secure.enabled and sums is None
    comparable = not hidden and not any(told.non_members.labels)
    names = {site: f"{site}, the sum" if sums else site for site in told.members}
    over = place_sites(scored, attack_names(report.findings), names) if comparable else {}
    return RunAudit(replace(report, notes=[*notes, *report.notes]), over)


def place_sites(
    scored: Mapping[tuple[str, str], Sides], attacks: Sequence[str], models: Mapping[str, str]
) -> dict[str, SitePlacements]:
    """Return each attack's placement values on all sites; `models` names each site's model.

    Omit attacks that lack scores for any site, and attacks that give all examples of a site the same score.
    """
    placed = {}
    for attack in attacks:
        if all(_tells(scored.get((model, attack))) for model in models.values()):
            own = {site: scored[model, attack] for site, model in models.items()}
            control = control_name(attack)
            wrong = {s: scored[m, control] for s, m in models.items() if s == m and (m, control) in scored}
            placed[attack] = SitePlacements.from_scores(own, wrong)
    return placed


def _tells(sides: Sides | None) -> bool:
    return sides is not None and len({*sides[0], *sides[1]}) > 1


def _read(
    folder: Path, config: RunConfig
) -> tuple[AdversaryKnowledge, AdversaryView, AdversaryView | None, Sequence[str]]:
    method = strategies.create_method(config.method.name, config.method.params)
    task = tasks.load_task(config, method.adapter, "cpu")
    view, sums, notes, server = secagg_view_of_run(folder, config, method, task)
    return (
        AdversaryKnowledge(task, task.initial(rng.initial_stream(config.run.seed, "weights")), server),
        view,
        sums,
        notes,
    )
