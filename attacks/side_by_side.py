"""A few attacks on several runs of the same sites and rows, with controls that are trained and asked once.

It is the audit of `fedveil demo`: what fits into seconds, beside the same controls as in attacks/audit.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks import audit
from fedveil.attacks.base import Attack, Knowledge, View
from fedveil.attacks.collector import Collector
from fedveil.attacks.controls import Control
from fedveil.attacks.findings import Audit, Finding
from fedveil.attacks.membership.scores import PublicBase
from fedveil.attacks.samples import Sample, Source, samples
from fedveil.attacks.unseen import of_run
from fedveil.config import RunConfig
from fedveil.errors import ConfigError

_SAME = ("task", "train")  # sections that make the rows, and how long a row is trained on


@dataclass(frozen=True)
class Common:
    """What the runs share.

    Attributes:
        config: of the first run.
        attacks: those that are tried.
        members, non_members: the auditor's rows.
        overfitted, taught: the controls.
        of_controls: what the attacks found on them.
        seed: of the bootstrap.
    """

    config: RunConfig
    attacks: Sequence[Attack]
    members: Mapping[str, Sample]
    non_members: Sample
    overfitted: Control
    taught: Control | None
    of_controls: Sequence[Finding]
    seed: int


def common(
    folder: Path, config: RunConfig, asked: Sequence[str], source: Source, attacks: Sequence[Attack], by_heart: int
) -> Common:
    """Trains the controls as the finished run in `folder` says, and asks them, on the CPU. Writes nothing.

    Args:
        config: the run's.
        asked: every site; each takes part in every run.
        source: the auditor's rows.
        attacks: those that are to be tried.
        by_heart: members of the overfitted control.

    Raises:
        StateError: there is no tap, or no final model.
        ConfigError: no rows, or too few.
    """
    knowledge, *_ = _read(folder, config)
    members, rest = samples(source, config, knowledge.task, asked, asked)
    with tempfile.TemporaryDirectory() as scratch:
        trained = audit.controls_of(
            knowledge, config, members, source, Path(scratch), "cpu", lambda text: None, by_heart
        )
        base = PublicBase(knowledge.task, knowledge.initial)
        collector = Collector(attacks, base, rest, source.seed, lambda text: None)
        everyone = [row for sample in members.values() for row in sample.rows]
        found = collector.of_controls(knowledge, everyone, *trained)
    return Common(config, attacks, members, rest, *trained, found, source.seed)


def audit_beside(told: Common, folder: Path, config: RunConfig) -> Audit:
    """Attacks a finished run on what its tap recorded. Writes nothing.

    Raises:
        StateError: there is no tap, or no final model.
        ConfigError: a run of other rows than the first.
    """
    if any(getattr(config, section) != getattr(told.config, section) for section in _SAME):
        raise ConfigError(
            f"runs: expected equal sections {' and '.join(_SAME)}, found others in {config.run.name}; "
            "audit it by itself"
        )
    knowledge, view, sums, said = _read(folder, config)
    found = audit.audit(
        view, knowledge, told.members, told.non_members, told.overfitted, told.taught, told.seed,
        sums=sums, attacks=told.attacks, known=told.of_controls,
    )  # fmt: skip
    return Audit(found.findings, found.rebuilt, [*said, *found.notes])


def _read(folder: Path, config: RunConfig) -> tuple[Knowledge, View, View | None, Sequence[str]]:
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, "cpu")
    view, sums, said, server = of_run(folder, config, method, task)
    return Knowledge(task, task.initial(rng.initial(config.run.seed, "weights")), server), view, sums, said
