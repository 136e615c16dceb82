"""An audit as a release gate: its findings decide between "pass", "leak above the limit" and "undecided".

| the audit | exit code |
|---|---|
| an attack whose controls passed was tried on every model and upload, and no lower bound is above the limit | 0 |
| a lower bound of an attack whose controls passed, or of canaries, is above the limit | 1 |
| neither: no such attack was tried on some model or upload | 3 |

Passing does not prove safety: other attacks may find more, and intervals from few examples are wide. The sentence names
the highest value that was not ruled out. Each bound is at 95%, without correction for multiple testing, so a limit
close to guessing also fails runs that reveal nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedveil.attacks.audit.findings import AttackFinding, AuditReport
from fedveil.attacks.audit.verdict import strongest_findings
from fedveil.errors import ConfigError

PASSES, ABOVE, CANNOT_TELL = 0, 1, 3
Triple = tuple[float, float, float]
# Value, lower bound and upper bound. An epsilon has only a lower bound.
FIGURES: Mapping[str, Callable[[AttackFinding], Triple]] = {
    "auroc": lambda f: f.auroc,
    "tpr-at-1": lambda f: f.tpr_at_1,
    "tpr-at-01": lambda f: f.tpr_at_01,
    "epsilon": lambda f: (f.epsilon_bound, f.epsilon_bound, math.inf),
}


@dataclass(frozen=True)
class LeakageThreshold:
    """Threshold of the audit gate. Errors name the options of `fedveil audit`.

    Attributes:
        above: highest lower bound that still passes.
        figure: the tested statistic, a key of FIGURES.
    """

    above: float
    figure: str = "auroc"

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise ConfigError(f"--figure: expected one of {', '.join(FIGURES)}, found {self.figure!r}")
        most = 1000.0 if self.figure == "epsilon" else 1.0
        if not 0 <= self.above < most:  # False for NaN; at 1, no rate could fail
            raise ConfigError(
                f"--fail-above: for {self.figure}, expected at least 0 and less than {most:g}, found "
                f"{self.above:g}; for auroc, 0.5 is a random guess"
            )


@dataclass(frozen=True)
class GateDecision:
    """Decision of the gate: an exit code and a sentence that explains it."""

    code: int
    says: str


def decide_gate(audit: AuditReport, limit: LeakageThreshold) -> GateDecision:
    """Decide whether an audit passes. A finding above the limit counts even if another model is undecided."""
    read, findings = FIGURES[limit.figure], strongest_findings(audit.findings)
    above = sorted((f for f in findings if read(f)[1] > limit.above), key=lambda f: -read(f)[1])
    what = f"{limit.figure} above {limit.above:g}"
    canary_epsilon = audit.epsilon_shown
    if limit.figure == "epsilon" and canary_epsilon is not None and canary_epsilon > limit.above:
        return GateDecision(ABOVE, f"Gate: FAILS. {what}: canaries show at least {canary_epsilon:.3f}.")
    if above:
        first = above[0]
        return GateDecision(
            ABOVE,
            f"Gate: FAILS. {what}: {len(above)} of {len(findings)} findings; highest: {first.attack} on {first.model}, "
            f"at least {read(first)[1]:.3f}.",
        )
    if audit.undecided or not findings:
        why = "; ".join(audit.undecided) or "no attack whose controls hold was tried"
        return GateDecision(CANNOT_TELL, f"Gate: CANNOT TELL, which is not a pass. {why}.")
    most = max(read(f)[2] for f in findings)
    ruled = f"values up to {most:.3f} are not ruled out" if math.isfinite(most) else "no value is ruled out"
    return GateDecision(PASSES, f"Gate: passes. No lower bound of {len(findings)} findings shows {what}; {ruled}.")
