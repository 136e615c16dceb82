"""What an audit found: the statistics of each attack's scores, and what its controls say of them.

A control is a model of which the answer is known (attacks/audit.py). An attack whose controls fail proves nothing
about the run, in either direction, and its note says so.

A verdict is of a rank test, within labels where members have some, and corrected (Holm) for all others of its kind:
those to win, those to lose, and those about the run. So the notes of fewer than one audit in twenty, of runs that give
nothing away, say that membership shows anywhere, however many models and attacks there are.
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
from fedveil.attacks.controls import Control
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


def to_lose(found: Sequence[Finding], attack: str) -> list[Finding]:
    """The controls that the attack must lose and could win."""
    lost = [f for f in found if f.kind == "to lose" and f.attack in (attack, beside(attack))]
    return [f for f in lost if not f.is_blind]


def unusable(found: Sequence[Finding], attack: str) -> list[str]:
    """Why the attack proves nothing about the run, in words; [] where its controls hold."""
    won = next((f for f in found if f.kind == "to win" and f.attack == attack), None)
    reasons = []
    if won is None or won.verdict != "above":
        reasons.append(f"it does not win where members are known by heart ({_shown(won) if won else 'not tried'})")
    lost = to_lose(found, attack)
    # Another site's training may undo rows: below 0.5.
    failed = [f for f in lost if f.verdict == "above" or (f.verdict == "below" and not is_beside(f.attack))]
    if not lost or failed:
        told = ", ".join(f"{f.model}: {_shown(f)}" for f in failed) or "no control that could fail was tried"
        reasons.append(f"it tells rows apart that nobody trained on there ({told}): the rows differ by themselves")
    return reasons


def strongest(found: Sequence[Finding]) -> list[Finding]:
    """What usable attacks found about the run, the highest AUROC first."""
    usable = {attack for attack in tried(found) if not unusable(found, attack)}
    about = [f for f in found if f.kind == "about the run" and f.attack in usable and not f.is_blind]
    return sorted(about, key=lambda f: -f.auroc[0])


def verdict(found: Sequence[Finding]) -> str:
    """What the audit comes to, in a sentence or two."""
    names, ordered = tried(found), strongest(found)
    lame = [name for name in names if unusable(found, name)]
    aside = f" {len(lame)} of {_attacks(len(names))} prove nothing here: their controls fail." if lame else ""
    if not ordered:
        return "Not decided: no attack was tried on the run whose controls hold." + aside
    count = f"{len(ordered)} findings of {_attacks(len(names) - len(lame))} whose controls hold"
    above = [f for f in ordered if f.verdict == "above"]
    if not above:
        return f"No membership shows in {count}. That is no proof that none can be told: other attacks may.{aside}"
    first = above[0]
    return (
        f"Membership shows in {len(above)} of {count}. Strongest: {first.attack} on {first.model} puts a trained row "
        f"above another one {100 * first.auroc[0]:.0f} times in 100 (a coin: 50).{aside}"
    )


def _attacks(count: int) -> str:
    return f"{count} attack{'s' * (count != 1)}"


def notes(found: Sequence[Finding], overfitted: Control, taught: Control | None) -> list[str]:
    """What the controls say of each attack, and what follows for the run: a sentence an attack.

    Args:
        found: with corrected verdicts.
        taught: None where there were too few rows for it.
    """
    said = [
        f"The overfitted control has {100 * overfitted.loss_share:.0f} % of its members' loss left after "
        f"{overfitted.rounds} rounds of 8 epochs.",
        f"The control of other rows was taught {len(taught.members)} of the members to {100 * taught.loss_share:.0f} % "
        f"of their loss in {taught.rounds} epochs, and is asked about the others."
        if taught
        else "There is NO control of other rows: there are too few members to teach it some and ask it about others.",
    ]
    for attack in tried(found):
        if reasons := unusable(found, attack):
            said.append(f"{attack}: NOT usable here, for {' and '.join(reasons)}.")
            continue
        lost = to_lose(found, attack)
        about = [f for f in found if f.attack == attack and f.kind == "about the run"]
        models, blind = [f for f in about if not f.is_blind], [f.model for f in about if f.is_blind]
        above = [f"{f.model} ({_shown(f)})" for f in models if f.verdict == "above"]
        held = f"{attack}: its controls hold (to lose: {', '.join(map(_shown, lost))})."
        said.append(
            f"{held} Membership shows in {', '.join(above)}."
            if above
            else f"{held} Membership shows in none of {len(models)} models."
        )
        if blind:
            said.append(f"{attack}: it scores all rows alike on {', '.join(blind)}, so it says NOTHING of them.")
    return said


def _shown(f: Finding) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*f.auroc)
