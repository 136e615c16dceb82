"""What a run gave away: every attack that fits it, on the run's own tap, each beside its controls.

| model under attack | whose adversary holds it |
|---|---|
| server | everyone who gets the final model |
| <site> | the server: the site's last factors or weights, paired by `factor_pairing.latest` |
| <site>, merged | the server: the site's last upload, the rest from the broadcast it answered |
| round 0 | nobody trained it: an attack must lose here, its interval containing 0.5 |
| another site's upload | for the alignment alone: the site's rows did not move it, so the attack must not win |
| overfitted FedAvg | a few members known by heart, undefended: an attack must win here, its interval wholly above 0.5 |

An attack whose controls fail proves nothing about the run, in either direction, and the result says so. Where round 0 is
already told apart, the non-members are not of the members' distribution.

An attack gets the view of the tap, what every adversary knows (base model, initial weights, method) and rows without labels;
which of them are members only the statistics know. Against a site's model scores are compared within a label, since a model
that likes the labels of its site is no sign of membership.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.attacks import statistics
from fedveil.attacks.base import Knowledge, ModelAttack, View, installed
from fedveil.attacks.controls import Overfitted
from fedveil.attacks.hidden_model import factor_pairing
from fedveil.attacks.membership import alignment
from fedveil.attacks.membership.scores import PublicBase, centred
from fedveil.contract.spec import Weights
from fedveil.contract.task import Rows, Task

RESAMPLES = 1000
WRONG_SITE = "alignment, wrong site"
CONTROLS = ("round 0", "overfitted FedAvg")
ALIGNED = 60  # rows of a side whose gradients are taken
Numbers = NDArray[np.float64]


_UNREAD: Mapping[str, Sequence[str]] = {
    "weights": (),
    "gradients": (
        "Sites send gradients: there is no model of theirs to attack; the alignment is with what they sent.",
    ),
    "coded": (
        "The sites' uploads are NOT attacked: they are codes or changes of a proxy, which no attack here reads.",
    ),
}


@dataclass(frozen=True)
class Sample:
    """Rows with their labels ("" throughout where they have none)."""

    rows: Rows
    labels: Sequence[str]

    def alike(self, labels: Sequence[str], most: int) -> Sample:
        """At most that many of the rows that have one of `labels`."""
        at = [i for i, label in enumerate(self.labels) if label in set(labels)][:most]
        return Sample([self.rows[i] for i in at], [self.labels[i] for i in at])


@dataclass(frozen=True)
class Finding:
    """One attack on one model.

    Attributes:
        auroc: value and 95 % bootstrap interval.
        tpr_at_1, tpr_at_01: true positive rate at 1 % and 0.1 % false positives, with intervals.
        epsilon_bound: with 95 % confidence a training that gave this away is not (epsilon, 1e-5)-private below it.
        members, non_members: rows behind it.
        verdict: whether the AUROC's interval lies "above" 0.5, "contains" it or lies "below".
    """

    model: str
    attack: str
    auroc: tuple[float, float, float]
    tpr_at_1: tuple[float, float, float]
    tpr_at_01: tuple[float, float, float]
    epsilon_bound: float
    members: int
    non_members: int
    verdict: str


@dataclass(frozen=True)
class Rebuilt:
    """How well the server could rebuild one site: what it saw of it, and how old."""

    site: str
    coverage: float
    staleness: int


@dataclass(frozen=True)
class Audit:
    """Everything that was found.

    Attributes:
        findings: by model, then attack.
        rebuilt: one a site.
        notes: sentences, the controls' verdicts first.
    """

    findings: Sequence[Finding]
    rebuilt: Sequence[Rebuilt]
    notes: Sequence[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def audit(
    view: View,
    knowledge: Knowledge,
    members: Mapping[str, Sample],
    non_members: Sample,
    control: Overfitted,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Attacks the server's model, each rebuilt client and the controls.

    Args:
        view: the server's.
        knowledge: of the same run; `server` is its final model.
        members: rows that each site trained on, of the sites that took part.
        non_members: rows that no site trained on, of the same distribution.
        control: the overfitted control.
        seed: of the bootstrap.
    """
    task, base = knowledge.task, PublicBase(knowledge.task, knowledge.initial)
    assert knowledge.server is not None
    everyone = [row for sample in members.values() for row in sample.rows]
    found = _Findings(base, non_members, seed, say)
    found.attack("round 0", task, knowledge.initial, everyone)
    found.attack("overfitted FedAvg", control.task, control.weights, control.members)
    known = Sample(control.members[::2][:ALIGNED], [""] * len(control.members[::2][:ALIGNED]))
    some = Sample(non_members.rows[:ALIGNED], [""] * len(non_members.rows[:ALIGNED]))
    own = Knowledge(control.task, knowledge.initial)
    found.align("overfitted FedAvg", "alignment", control.view, "a", own, known, some)
    found.attack("server", task, knowledge.server, everyone)
    rebuilt, sites = [], list(members)
    kind = view.exchange.method.uploads
    for site, sample in members.items():
        if kind == "coded":
            continue
        mine, theirs = sample.alike(sample.labels, ALIGNED), non_members.alike(sample.labels, ALIGNED)
        found.align(site, "alignment", view, site, knowledge, mine, theirs)
        if len(sites) > 1:
            found.align(site, WRONG_SITE, view, sites[sites.index(site) - 1], knowledge, mine, theirs)
        if kind == "gradients":
            continue
        latest = factor_pairing.latest(view, site, knowledge.server)
        merged = factor_pairing.merged(view, site, knowledge.server)
        rebuilt.append(Rebuilt(site, latest.coverage, latest.staleness))
        found.attack(site, task, latest.weights, sample.rows, sample.labels)
        if latest.staleness or latest.coverage < 1:
            found.attack(f"{site}, merged", task, merged.weights, sample.rows, sample.labels)
    return Audit(found.done, rebuilt, [*_notes(found.done, control), *_UNREAD[kind]])


class _Findings:
    """Runs the attacks and keeps what they found."""

    def __init__(self, base: PublicBase, non_members: Sample, seed: int, say: Callable[[str], None]) -> None:
        self.done: list[Finding] = []
        self._base, self._non_members, self._seed, self._say = base, non_members, seed, say

    def attack(self, model: str, task: Task, weights: Weights, members: Rows, labels: Sequence[str] = ()) -> None:
        """Every attack on one model; with the members' labels, within a label."""
        others = self._non_members
        self._say(f"{model}: {len(members)} members, {len(others.rows)} non-members")
        attacks = [attack for attack in installed() if isinstance(attack, ModelAttack)]
        mine, theirs = (self._base.scores(attacks, task, weights, rows) for rows in (members, others.rows))
        for name in mine:
            self.add(model, name, mine[name], theirs[name], labels, others.labels)

    def align(
        self, model: str, name: str, view: View, site: str, knowledge: Knowledge, members: Sample, others: Sample
    ) -> None:
        """The gradients of some rows against the last upload of `site`."""
        mine, theirs = (alignment.alignment_scores(view, site, knowledge, side.rows) for side in (members, others))
        self.add(model, name, mine, theirs, members.labels, others.labels)

    def add(
        self,
        model: str,
        attack: str,
        members: Numbers,
        non_members: Numbers,
        labels: Sequence[str],
        other_labels: Sequence[str],
    ) -> None:
        """The statistics of one attack's scores; nothing where no label has rows on both sides."""
        if labels:
            members, non_members = centred(members, non_members, labels, other_labels)
        if len(members) and len(non_members):
            self.done.append(finding(model, attack, members, non_members, self._seed))


def finding(model: str, attack: str, members: Numbers, non_members: Numbers, seed: int) -> Finding:
    """The statistics of one attack's scores."""
    rng = np.random.default_rng(seed)
    auroc = statistics.bootstrap(statistics.auroc, members, non_members, rng, RESAMPLES)
    at_1, at_01 = (
        statistics.bootstrap(partial(statistics.tpr_at_fpr, fpr=fpr), members, non_members, rng, RESAMPLES)
        for fpr in (0.01, 0.001)
    )
    bound = statistics.epsilon_lower_bound(members, non_members, 1e-5, rng)
    where = statistics.verdict(auroc.low, auroc.high)
    sizes = len(members), len(non_members)
    return Finding(model, attack, _triple(auroc), _triple(at_1), _triple(at_01), bound, *sizes, where)


def _triple(estimate: statistics.Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def _notes(found: Sequence[Finding], overfitted: Overfitted) -> list[str]:
    """What the controls say of each attack, and what follows for the run."""
    by = {(f.model, f.attack): f for f in found}
    notes = [
        f"The overfitted control has {100 * overfitted.loss_share:.0f} % of its members' loss left after {overfitted.rounds} "
        f"rounds of 8 epochs."
    ]
    for attack in dict.fromkeys(f.attack for f in found if f.attack != WRONG_SITE):
        won = by.get(("overfitted FedAvg", attack))
        lost = [
            f
            for f in found
            if (f.model, f.attack) == ("round 0", attack) or (attack, f.attack) == ("alignment", WRONG_SITE)
        ]
        reasons = []
        if won is None or won.verdict != "above":
            reasons.append(f"it does not win where members are known by heart ({_shown(won) if won else 'not tried'})")
        # Another site's training may undo rows (below 0.5), and one of several intervals leaves 0.5 out by chance.
        failed = [f for f in lost if f.verdict != "contains" and (f.attack != WRONG_SITE or f.verdict == "above")]
        if not lost or len(failed) > len(lost) // 4:
            told = ", ".join(map(_shown, failed)) or "not tried"
            reasons.append(f"it tells rows apart that nobody trained on there ({told}): the rows differ by themselves")
        if reasons:
            notes.append(f"{attack}: NOT usable here, for {' and '.join(reasons)}.")
            continue
        models = [f for f in found if f.attack == attack and f.model not in CONTROLS]
        above = [f"{f.model} ({_shown(f)})" for f in models if f.verdict == "above"]
        notes.append(
            f"{attack}: both controls hold. Membership shows in {', '.join(above)}."
            if above
            else f"{attack}: both controls hold. Membership shows in none of {len(models)} models."
        )
    return notes


def _shown(f: Finding) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*f.auroc)
