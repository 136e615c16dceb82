"""What an audit found: the statistics of each attack's scores, and what its controls say of them.

A control is a model of which the answer is known (attacks/audit.py). An attack whose controls fail proves nothing
about the run, in either direction, and its note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.attacks import statistics
from fedveil.attacks.base import OVERFITTED, ROUND_0, WRONG_SITE
from fedveil.attacks.controls import Overfitted

FILE = "audit.json"  # of a run folder: an Audit as JSON
PICTURES = "reconstructed.png"  # beside it: attempts at the sites' pictures, where there were any
RESAMPLES = 1000
CONTROLS = (ROUND_0, OVERFITTED)
Numbers = NDArray[np.float64]


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


def beside(attack: str) -> str:
    """The name of an attack's control: the same rows against another site's upload."""
    return f"{attack}, {WRONG_SITE}"


def is_beside(attack: str) -> bool:
    """Whether `beside` made that name."""
    return attack.endswith(f", {WRONG_SITE}")


def notes(found: Sequence[Finding], overfitted: Overfitted) -> list[str]:
    """What the controls say of each attack, and what follows for the run: a sentence an attack."""
    by = {(f.model, f.attack): f for f in found}
    said = [
        f"The overfitted control has {100 * overfitted.loss_share:.0f} % of its members' loss left after "
        f"{overfitted.rounds} rounds of 8 epochs."
    ]
    for attack in dict.fromkeys(f.attack for f in found if not is_beside(f.attack)):
        won = by.get((OVERFITTED, attack))
        lost = [f for f in found if (f.model, f.attack) == (ROUND_0, attack) or f.attack == beside(attack)]
        reasons = []
        if won is None or won.verdict != "above":
            reasons.append(f"it does not win where members are known by heart ({_shown(won) if won else 'not tried'})")
        # Another site's training may undo rows (below 0.5), and one of several intervals leaves 0.5 out by chance.
        failed = [f for f in lost if f.verdict != "contains" and (not is_beside(f.attack) or f.verdict == "above")]
        if not lost or len(failed) > len(lost) // 4:
            told = ", ".join(map(_shown, failed)) or "not tried"
            reasons.append(f"it tells rows apart that nobody trained on there ({told}): the rows differ by themselves")
        if reasons:
            said.append(f"{attack}: NOT usable here, for {' and '.join(reasons)}.")
            continue
        models = [f for f in found if f.attack == attack and f.model not in CONTROLS]
        above = [f"{f.model} ({_shown(f)})" for f in models if f.verdict == "above"]
        said.append(
            f"{attack}: both controls hold. Membership shows in {', '.join(above)}."
            if above
            else f"{attack}: both controls hold. Membership shows in none of {len(models)} models."
        )
    return said


def _shown(f: Finding) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*f.auroc)
