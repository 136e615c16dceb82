"""What an audit found: the statistics of each attack's scores, kept in `audit.json`.

attacks/verdict.py puts it in words.

A verdict is of a rank test, within labels where members have some, and corrected (Holm) for all others of its kind:
those to win, those to lose, and those about the run.
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
from fedveil.attacks.base import OTHER_ROWS, OVERFITTED, ROUND_0, WRONG_SITE
from fedveil.attacks.paired import Across
from fedveil.errors import StateError

FILE = "audit.json"  # of a run folder: an Audit as JSON
PICTURES = "reconstructed.png"  # beside it: attempts at the sites' pictures, where there were any
RESAMPLES = 1000
ALPHA = 0.05  # of all verdicts of a kind together
TO_LOSE = (ROUND_0, OTHER_ROWS)
CONTROLS = (*TO_LOSE, OVERFITTED)
_MOST_BYTES, _MOST_FINDINGS, _MOST_ATTACKS, _MOST_NAME = 1 << 26, 20_000, 1000, 300
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """One attack on one model.

    Attributes:
        auroc: value and 95 % bootstrap interval.
        tpr_at_1, tpr_at_01: true positive rate at 1 % and 0.1 % false positives, with intervals.
        epsilon_bound: with 95 % confidence a training that gave this away is not (epsilon, 1e-5)-private below it.
        members, non_members: rows behind it.
        verdict: whether members score "above" non-members, "below", or 0.5 is not ruled out ("contains").
        p: of the verdict.
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
        """A control "to win" or "to lose", or a finding "about the run"."""
        if is_beside(self.attack) or self.model in TO_LOSE:
            return "to lose"
        return "to win" if self.model == OVERFITTED else "about the run"

    @property
    def is_blind(self) -> bool:
        """Whether all rows have one score: it could tell nothing, whatever was trained on."""
        return self.auroc == (0.5, 0.5, 0.5)


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
        findings: in the order in which they were found.
        rebuilt: one a site.
        notes: sentences, the controls' verdicts first.
        undecided: sentences on the models and uploads of which no attack whose controls hold says anything.
        across: of an audit of several runs of the same rows: each attack over all sites, beside one of the runs.
        epsilon_shown: at least so much, by canaries; None where there were none.
    """

    findings: Sequence[Finding]
    rebuilt: Sequence[Rebuilt]
    notes: Sequence[str] = field(default_factory=list)
    undecided: Sequence[str] = field(default_factory=list)
    across: Sequence[Across] = field(default_factory=list)
    epsilon_shown: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def read(cls, run: Path) -> Audit | None:
        """The audit of the run in that folder; None where it was not audited.

        Raises:
            StateError: a file that `fedveil audit` has not written.
        """
        file = run / FILE
        if not file.is_file():
            return None
        try:
            if (size := file.stat().st_size) > _MOST_BYTES:
                raise ValueError(f"{size} bytes")
            told: Mapping[str, Any] = json.loads(file.read_text())
            if len(told["findings"]) > _MOST_FINDINGS:
                raise ValueError(f"{len(told['findings'])} findings")
            found = [_finding(row) for row in told["findings"]]
            rebuilt = [Rebuilt(str(r["site"]), float(r["coverage"]), int(r["staleness"])) for r in told["rebuilt"]]
            undecided = [str(text) for text in told.get("undecided", [])]  # older files have none of these three
            across = told.get("across", [])
            if len(across) > _MOST_ATTACKS:
                raise ValueError(f"{len(across)} attacks")
            beside_others = [Across.read(row) for row in across]
            shown = None if told.get("epsilon_shown") is None else float(told["epsilon_shown"])
            if shown is not None and not 0 <= shown < math.inf:
                raise ValueError(f"epsilon_shown {shown}")
            return cls(found, rebuilt, [str(note) for note in told["notes"]], undecided, beside_others, shown)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StateError(
                f"{file}: expected what fedveil audit writes, found {error!r}; audit the run again"
            ) from None


def _finding(row: Mapping[str, Any]) -> Finding:
    """A finding as JSON has it. Raises ValueError, KeyError or TypeError for another thing."""
    auroc, at_1, at_01 = (_share(row[name]) for name in ("auroc", "tpr_at_1", "tpr_at_01"))
    bound, p = float(row["epsilon_bound"]), float(row["p"])
    if row["verdict"] not in ("above", "below", "contains") or not math.isfinite(bound) or not 0 <= p <= 1:
        raise ValueError(f"verdict {row['verdict']!r}, epsilon_bound {bound}, p {p}")
    model, attack = str(row["model"])[:_MOST_NAME], str(row["attack"])[:_MOST_NAME]
    sizes = int(row["members"]), int(row["non_members"])
    return Finding(model, attack, auroc, at_1, at_01, bound, *sizes, row["verdict"], p)


def _share(value: Sequence[float]) -> tuple[float, float, float]:
    middle, low, high = map(float, value)
    if not (0 <= low <= 1 and 0 <= middle <= 1 and 0 <= high <= 1):
        raise ValueError(f"expected values from 0 to 1, found {value}")
    return middle, low, high


def finding(
    model: str, attack: str, members: Numbers, non_members: Numbers, seed: int, z: float | None = None
) -> Finding:
    """The statistics of one attack's scores, alone: no verdict is corrected yet.

    Args:
        z: of the rank test, where scores were compared within labels; by default that of these scores.
    """
    rng = np.random.default_rng(seed)
    auroc = statistics.bootstrap(statistics.aurocs, members, non_members, rng, RESAMPLES)
    at_1, at_01 = (
        statistics.bootstrap(partial(statistics.tprs_at_fpr, fpr=fpr), members, non_members, rng, RESAMPLES)
        for fpr in (0.01, 0.001)
    )
    bound = statistics.epsilon_lower_bound(members, non_members, 1e-5, rng)
    z = statistics.rank_test(members, non_members) if z is None else z
    sizes, side = (len(members), len(non_members)), "above" if z > 0 else "below"
    return Finding(
        model, attack, _triple(auroc), _triple(at_1), _triple(at_01), bound, *sizes, side, statistics.two_sided(z)
    )


def corrected(found: Sequence[Finding]) -> list[Finding]:
    """The findings with verdicts that are corrected for all others of their kind."""
    p = [f.p for f in found]
    for kind in {f.kind for f in found}:
        at = [i for i, f in enumerate(found) if f.kind == kind]
        for i, value in zip(at, statistics.holm([found[i].p for i in at]), strict=True):
            p[i] = value
    return [
        replace(f, p=value, verdict=f.verdict if value <= ALPHA else "contains")
        for f, value in zip(found, p, strict=True)
    ]


def _triple(estimate: statistics.Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def beside(attack: str) -> str:
    """The name of an attack's control: the same rows against another site's upload."""
    return f"{attack}, {WRONG_SITE}"


def is_beside(attack: str) -> bool:
    """Whether `beside` made that name."""
    return attack.endswith(f", {WRONG_SITE}")


def tried(found: Sequence[Finding]) -> list[str]:
    """Names of the attacks, their controls on wrong sites apart."""
    return list(dict.fromkeys(f.attack for f in found if not is_beside(f.attack)))
