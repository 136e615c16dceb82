"""Findings of an audit: statistics of each attack's scores, stored in `audit.json`.

attacks/audit/verdict.py turns them into sentences.

Verdicts come from a rank test, per label if members have labels. They are Holm-corrected together
with all verdicts of the same kind: controls to win, controls to lose, and findings about the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.attacks import statistics
from fedveil.attacks.audit.delong import SiteAveragedAuroc
from fedveil.attacks.base import OTHER_ROWS, OVERFITTED, ROUND_0, WRONG_SITE
from fedveil.errors import StateError

FILE = "audit.json"  # in a run folder: an audit report as JSON
PICTURES = "reconstructed.png"  # next to it: reconstructions of the sites' images, if there are any
RESAMPLES = 1000
ALPHA = 0.05  # joint error rate of all verdicts of a kind
GATE = 0.001  # error rate of controls to lose that are repeated on other examples before they count as failed
TO_LOSE = (ROUND_0, OTHER_ROWS)
_MOST_BYTES, _MOST_FINDINGS, _MOST_ATTACKS, _MOST_NAME = 1 << 26, 20_000, 1000, 300
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class AttackFinding:
    """One attack on one model.

    Attributes:
        auroc: value and 95% bootstrap interval.
        tpr_at_1, tpr_at_01: true positive rate at 1% and 0.1% false positives, with intervals.
        epsilon_bound: lower bound on the epsilon of the training at delta 1e-5, with 95% confidence.
        members, non_members: numbers of examples.
        verdict: "above" or "below" if members score above or below non-members; "contains" if 0.5 is not ruled out.
        p: p-value of the verdict.
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
    p: float

    @property
    def kind(self) -> str:
        """Return the kind: a control "to win" or "to lose", or a finding "about the run"."""
        if is_control_name(self.attack) or self.model in TO_LOSE:
            return "to lose"
        return "to win" if self.model == OVERFITTED else "about the run"

    @property
    def is_blind(self) -> bool:
        """Return whether all examples have the same score, so that the attack could not single out members."""
        return self.auroc == (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ReconstructionFinding:
    """Reconstruction result for one site: the fraction of tensors that the server saw, and their age."""

    site: str
    coverage: float
    staleness: int


@dataclass(frozen=True)
class AuditReport:
    """All results of an audit.

    Attributes:
        findings: attack findings, in the order they were computed.
        rebuilt: one reconstruction finding per site.
        notes: sentences, with the verdicts on the controls first.
        undecided: sentences naming the models and uploads for which no attack with valid controls gives a
            result.
        across: in an audit of several runs on the same examples, each attack by site and over all sites, compared
            with other runs.
        epsilon_shown: lower bound on epsilon from canaries; None without canaries.
    """

    findings: Sequence[AttackFinding]
    rebuilt: Sequence[ReconstructionFinding]
    notes: Sequence[str] = field(default_factory=list)
    undecided: Sequence[str] = field(default_factory=list)
    across: Sequence[SiteAveragedAuroc] = field(default_factory=list)
    epsilon_shown: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for audit.json."""
        return asdict(self)

    @classmethod
    def read(cls, run: Path) -> AuditReport | None:
        """Return the audit of the run in a folder; None if the run was not audited.

        Raises:
            StateError: `fedveil audit` did not write the file.
        """
        file = run / FILE
        if not file.is_file():
            return None
        try:
            if (size := file.stat().st_size) > _MOST_BYTES:
                raise ValueError(f"{size} bytes")
            content: Mapping[str, Any] = json.loads(file.read_text())
            if len(content["findings"]) > _MOST_FINDINGS:
                raise ValueError(f"{len(content['findings'])} findings")
            findings = [_finding(row) for row in content["findings"]]
            rebuilt = [
                ReconstructionFinding(str(r["site"]), float(r["coverage"]), int(r["staleness"]))
                for r in content["rebuilt"]
            ]
            undecided = [str(text) for text in content.get("undecided", [])]  # older files lack these three fields
            across = content.get("across", [])
            if len(across) > _MOST_ATTACKS:
                raise ValueError(f"{len(across)} attacks")
            beside_others = [SiteAveragedAuroc.read(row) for row in across]
            canary_epsilon = None if content.get("epsilon_shown") is None else float(content["epsilon_shown"])
            if canary_epsilon is not None and not 0 <= canary_epsilon < math.inf:
                raise ValueError(f"epsilon_shown {canary_epsilon}")
            return cls(
                findings, rebuilt, [str(note) for note in content["notes"]], undecided, beside_others, canary_epsilon
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StateError(f"{file}: not a valid output of fedveil audit ({error!r}); audit the run again") from None


def _finding(row: Mapping[str, Any]) -> AttackFinding:
    """Parse a finding from JSON. Raises ValueError, KeyError or TypeError if it is malformed."""
    auroc, at_1, at_01 = (_share(row[name]) for name in ("auroc", "tpr_at_1", "tpr_at_01"))
    bound, p = float(row["epsilon_bound"]), float(row["p"])
    if row["verdict"] not in ("above", "below", "contains") or not math.isfinite(bound) or not 0 <= p <= 1:
        raise ValueError(f"verdict {row['verdict']!r}, epsilon_bound {bound}, p {p}")
    model, attack = str(row["model"])[:_MOST_NAME], str(row["attack"])[:_MOST_NAME]
    sizes = int(row["members"]), int(row["non_members"])
    return AttackFinding(model, attack, auroc, at_1, at_01, bound, *sizes, row["verdict"], p)


def _share(value: Sequence[float]) -> tuple[float, float, float]:
    middle, low, high = map(float, value)
    if not (0 <= low <= 1 and 0 <= middle <= 1 and 0 <= high <= 1):
        raise ValueError(f"expected values from 0 to 1, found {value}")
    return middle, low, high


def make_finding(
    model: str, attack: str, members: Numbers, non_members: Numbers, seed: int, z: float | None = None
) -> AttackFinding:
    """Return the statistics of one attack's scores; the verdict is not yet corrected for multiple testing.

    Args:
        z: result of a rank test within labels; by default the z of these scores.
    """
    rng = np.random.default_rng(seed)
    auroc = statistics.bootstrap_interval(statistics.areas_under_roc, members, non_members, rng, RESAMPLES)
    at_1, at_01 = (
        statistics.bootstrap_interval(partial(statistics.tprs_at_fpr, fpr=fpr), members, non_members, rng, RESAMPLES)
        for fpr in (0.01, 0.001)
    )
    bound = statistics.epsilon_lower_bound(members, non_members, 1e-5, rng)
    z = statistics.rank_test(members, non_members) if z is None else z
    sizes, side = (len(members), len(non_members)), "above" if z > 0 else "below"
    return AttackFinding(
        model, attack, _triple(auroc), _triple(at_1), _triple(at_01), bound, *sizes, side, statistics.two_sided(z)
    )


def correct_for_multiple_tests(found: Sequence[AttackFinding], to_lose: float = ALPHA) -> list[AttackFinding]:
    """Return the findings with verdicts corrected for the number of findings of each kind.

    Args:
        to_lose: joint error rate of all verdicts on controls to lose; each other kind uses ALPHA.
    """
    p = [f.p for f in found]
    for kind in {f.kind for f in found}:
        at = [i for i, f in enumerate(found) if f.kind == kind]
        for i, value in zip(at, statistics.holm_correction([found[i].p for i in at]), strict=True):
            p[i] = value
    return [
        replace(f, p=value, verdict=f.verdict if value <= (to_lose if f.kind == "to lose" else ALPHA) else "contains")
        for f, value in zip(found, p, strict=True)
    ]


def _triple(estimate: statistics.IntervalEstimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def control_name(attack: str) -> str:
    """Return the name of an attack's wrong-site control: the same examples scored on another site's upload."""
    return f"{attack}, {WRONG_SITE}"


def is_control_name(attack: str) -> bool:
    """Return whether `control_name` created the name."""
    return attack.endswith(f", {WRONG_SITE}")


def attack_names(found: Sequence[AttackFinding]) -> list[str]:
    """Return the names of the attacks, without their wrong-site controls."""
    return list(dict.fromkeys(f.attack for f in found if not is_control_name(f.attack)))
