"""A few attacks on several runs of the same sites and rows, with controls that are trained and asked once.

It is the audit of `fedveil demo`: what fits into seconds, beside the same controls as in attacks/audit.py. The runs are
compared row by row (attacks/paired.py), over all sites, by what the server has of each: its upload, or, where the run
summed unseen, the sum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedveil import rng, strategies, tasks
from fedveil.attacks import audit
from fedveil.attacks.base import Attack, Knowledge, View
from fedveil.attacks.collector import Collector
from fedveil.attacks.controls import Control
from fedveil.attacks.findings import Audit, Finding, tried
from fedveil.attacks.membership.scores import PublicBase
from fedveil.attacks.paired import Across, Placed, Sides, placed
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


@dataclass(frozen=True)
class Attacked:
    """A run's audit.

    Attributes:
        audit: what was found.
        over_sites: of each attack the parts of its mean area; none where the sites' non-members are not the same rows,
            or where the server's sums of unseen uploads are not shown.
    """

    audit: Audit
    over_sites: Mapping[str, Placed]

    def beside(self, base: Attacked | None, digest: str = "") -> Audit:
        """The audit with each attack over all sites, compared with `base`, whose audit.json has that digest."""
        across = [
            Across.of(attack, mine, base.over_sites.get(attack) if base else None, digest)
            for attack, mine in self.over_sites.items()
        ]
        return replace(self.audit, across=across)


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


def audit_beside(told: Common, folder: Path, config: RunConfig) -> Attacked:
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
    scored: dict[tuple[str, str], Sides] = {}
    found = audit.audit(
        view, knowledge, told.members, told.non_members, told.overfitted, told.taught, told.seed,
        sums=sums, attacks=told.attacks, known=told.of_controls, scored=scored,
    )  # fmt: skip
    has = {site: f"{site}, the sum" if sums else site for site in told.members}
    hidden = config.secure.enabled and sums is None
    comparable = not hidden and not any(told.non_members.labels)
    over = over_sites(scored, tried(found.findings), list(has.values())) if comparable else {}
    return Attacked(replace(found, notes=[*said, *found.notes]), over)


def over_sites(
    scored: Mapping[tuple[str, str], Sides], attacks: Sequence[str], models: Sequence[str]
) -> dict[str, Placed]:
    """The parts of each attack's mean area over `models`, of the attacks that have scores of all of them.

    None of an attack that scores all rows of a model alike: it says nothing of that one.
    """
    return {
        attack: placed([scored[model, attack] for model in models])
        for attack in attacks
        if all(_tells(scored.get((model, attack))) for model in models)
    }


def _tells(sides: Sides | None) -> bool:
    return sides is not None and len({*sides[0], *sides[1]}) > 1


def _read(folder: Path, config: RunConfig) -> tuple[Knowledge, View, View | None, Sequence[str]]:
    method = strategies.create(config.method.name, config.method.fields)
    task = tasks.load(config, method.adapter, "cpu")
    view, sums, said, server = of_run(folder, config, method, task)
    return Knowledge(task, task.initial(rng.initial(config.run.seed, "weights")), server), view, sums, said
