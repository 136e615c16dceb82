"""Run a few attacks on several runs of the same sites and examples, sharing one set of controls.

`fedveil demo` uses this audit: it takes seconds and applies the same controls as attacks/audit/runner.py.
It compares the runs example by example (attacks/audit/delong.py), over all sites. The server's view of a
site is its upload or, under secure aggregation, the sum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks.audit import runner
from fedveil.attacks.audit.controls import TrainedControl
from fedveil.attacks.audit.delong import PlacementValues, Sides, SiteAveragedAuroc, placement_values
from fedveil.attacks.audit.findings import AttackFinding, AuditReport, attack_names
from fedveil.attacks.audit.scoring import AuditScorer
from fedveil.attacks.base import AdversaryKnowledge, AdversaryView, AuditAttack
from fedveil.attacks.membership.model_scores import PublicBaseScores
from fedveil.attacks.samples import AuditDataSource, AuditSample, draw_samples
from fedveil.attacks.secagg_views import secagg_view_of_run
from fedveil.config import RunConfig
from fedveil.errors import ConfigError

_SAME = ("task", "train")  # sections that determine the examples, and how long each is trained on


@dataclass(frozen=True)
class SharedAuditInputs:
    """Inputs shared by the audits of all compared runs.

    Attributes:
        config: run config of the first run.
        attacks: attacks to run.
        members, non_members: the auditor's examples.
        overfitted, taught: trained controls.
        of_controls: findings of the attacks on the controls.
        seed: seed of the bootstrap.
    """

    config: RunConfig
    attacks: Sequence[AuditAttack]
    members: Mapping[str, AuditSample]
    non_members: AuditSample
    overfitted: TrainedControl
    taught: TrainedControl | None
    of_controls: Sequence[AttackFinding]
    seed: int


@dataclass(frozen=True)
class RunAudit:
    """A run's audit.

    Attributes:
        audit: the findings.
        over_sites: placement values of each attack's mean AUROC; empty if the sites have different non-members,
            or if broadcasts do not reveal the secure sums.
    """

    audit: AuditReport
    over_sites: Mapping[str, PlacementValues]

    def beside(self, base: RunAudit | None, digest: str = "") -> AuditReport:
        """Return the audit with each attack over all sites, compared with `base`, whose audit.json has that digest."""
        across = [
            SiteAveragedAuroc.from_scores(attack, mine, base.over_sites.get(attack) if base else None, digest)
            for attack, mine in self.over_sites.items()
        ]
        return replace(self.audit, across=across)


def prepare_shared_inputs(
    folder: Path,
    config: RunConfig,
    asked: Sequence[str],
    source: AuditDataSource,
    attacks: Sequence[AuditAttack],
    by_heart: int,
) -> SharedAuditInputs:
    """Train the controls for the finished run in `folder`, and attack them, on the CPU. Write no file.

    Args:
        config: the run's config.
        asked: every site; each takes part in every run.
        source: the auditor's examples.
        attacks: the attacks to try.
        by_heart: members of the overfitted control.

    Raises:
        StateError: there are no captured messages, or no final model.
        ConfigError: there are no examples, or too few.
    """
    knowledge, *_ = _read(folder, config)
    members, rest = draw_samples(source, config, knowledge.task, asked, asked)
    with tempfile.TemporaryDirectory() as scratch:
        trained = runner.controls_of(
            knowledge, config, members, source, Path(scratch), "cpu", lambda text: None, by_heart
        )
        base = PublicBaseScores(knowledge.task, knowledge.initial)
        collector = AuditScorer(attacks, base, rest, source.seed, lambda text: None)
        everyone = [row for sample in members.values() for row in sample.rows]
        control_findings = collector.of_controls(knowledge, everyone, *trained)
    return SharedAuditInputs(config, attacks, members, rest, *trained, control_findings, source.seed)


def audit_run_pair(told: SharedAuditInputs, folder: Path, config: RunConfig) -> RunAudit:
    """Attack a finished run from its captured messages. Write no file.

    Raises:
        StateError: there are no captured messages, or no final model.
        ConfigError: the run has other examples than the first run.
    """
    if any(getattr(config, section) != getattr(told.config, section) for section in _SAME):
        raise ConfigError(
            f"runs: expected equal sections {' and '.join(_SAME)}, found different ones in {config.run.name}; audit it "
            "separately"
        )
    knowledge, view, sums, notes = _read(folder, config)
    scored: dict[tuple[str, str], Sides] = {}
    report = runner.run_audit(
        view, knowledge, told.members, told.non_members, told.overfitted, told.taught, told.seed,
        sums=sums, attacks=told.attacks, known=told.of_controls, scored=scored,
    )  # fmt: skip
    has = {site: f"{site}, the sum" if sums else site for site in told.members}
    hidden = config.secure.enabled and sums is None
    comparable = not hidden and not any(told.non_members.labels)
    over = average_over_sites(scored, attack_names(report.findings), list(has.values())) if comparable else {}
    return RunAudit(replace(report, notes=[*notes, *report.notes]), over)


def average_over_sites(
    scored: Mapping[tuple[str, str], Sides], attacks: Sequence[str], models: Sequence[str]
) -> dict[str, PlacementValues]:
    """Return the placement values of each attack's mean AUROC over `models`.

    Omit attacks without scores for some model, and attacks that give all examples of a model the same score.
    """
    return {
        attack: placement_values([scored[model, attack] for model in models])
        for attack in attacks
        if all(_tells(scored.get((model, attack))) for model in models)
    }


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
