"""What runs side by side gained: how good the model is, what an attacker could still tell, what the sites sent.

An attacker's figure is the mean over the sites where the audit has it, else the strongest finding about the run, of an
attack whose controls hold. Where none is, the picture says so and draws nothing. Runs whose audits asked the same rows
are compared row by row, corrected for how many are (attacks/paired.py); others by whether their intervals are apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedveil import places
from fedveil.attacks import findings, paired
from fedveil.attacks import verdict as words
from fedveil.attacks.findings import Audit, Finding
from fedveil.attacks.paired import Across
from fedveil.attacks.statistics import holm
from fedveil.console.runs.folder import Run
from fedveil.console.runs.summary import BASELINE
from fedveil.foreign import shown

_COMMITTED = ("FedAvg client", "FedRand client")


@dataclass(frozen=True)
class Arm:
    """One run of the picture.

    Attributes:
        name, method: the run's.
        before, after: test loss of the first and of the last model, None where the server did not score it.
        sent: bytes from all sites.
        attacked: whether there is an audit.
        told: its strongest usable finding about the run, None where there is none.
        lost, won: intervals of that attack's controls: on what it must lose, and what it must win.
        across: what usable attacks found over all sites, and beside another run.
        digest: SHA-256 of its audit.json, "" without.
        findings: about the run, for which verdicts are corrected.
    """

    name: str
    method: str
    before: float | None
    after: float | None
    sent: int
    attacked: bool = False
    told: Finding | None = None
    lost: tuple[float, float] = (0.5, 0.5)
    won: tuple[float, float] = (1.0, 1.0)
    across: Sequence[Across] = ()
    digest: str = ""
    findings: int = 0

    def over_sites(self, attack: str = "") -> Across | None:
        """Of that attack, by default of the strongest finding's."""
        attack = attack or (self.told.attack if self.told else "")
        return next((a for a in self.across if a.attack == attack), None)

    @property
    def auroc(self) -> tuple[float, float, float]:
        """Over all sites, or of the strongest finding, which the run must have."""
        assert self.told is not None
        found = self.over_sites()
        return found.auroc if found else self.told.auroc

    @property
    def words(self) -> str:
        """What an attacker could tell."""
        if self.told is None:
            return "not decided here" if self.attacked else "not attacked"
        return f"{100 * self.auroc[0]:.0f} %"


def arm(run: Run) -> Arm:
    """One run as it is drawn. Raises StateError for an audit that cannot be read."""
    curve, audit = run.curve("loss"), Audit.read(run.folder)
    before = curve[0][1] if curve and curve[0][0] == 0 else None
    plain = Arm(shown(run.name, 60), run.method, before, run.final.get("loss"), run.upload_bytes, audit is not None)
    ordered = words.strongest(audit.findings) if audit else []
    if audit is None or not ordered:
        return plain
    told = ordered[0]
    usable = {f.attack for f in ordered}
    lost = words.to_lose(audit.findings, told.attack)
    won = [f for f in audit.findings if f.kind == "to win" and f.attack == told.attack]
    return Arm(
        plain.name, plain.method, plain.before, plain.after, plain.sent, True, told,
        (min(f.auroc[1] for f in lost), max(f.auroc[2] for f in lost)),
        (min(f.auroc[1] for f in won), max(f.auroc[2] for f in won)),
        [a for a in audit.across if a.attack in usable],
        hashlib.sha256((run.folder / findings.FILE).read_bytes()).hexdigest(),
        sum(f.kind == "about the run" for f in audit.findings),
    )  # fmt: skip


def verdict(arms: Sequence[Arm]) -> list[str]:
    """What the arms show beside FedAvg, no more than was measured: the answer, then a sentence an arm; [] without."""
    base = next((a for a in arms if a.method == BASELINE), None)
    others = [a for a in arms if a is not base]
    if base is None or not others or not any(a.attacked for a in arms):
        return []
    if base.told is None or base.told.verdict != "above":
        return [f"Not decided here what withholding gains: no attack that counts wins on {base.name}."]
    sides = {a.name: side for a, side in zip(others, _sides(others, base), strict=True)}
    less = [a for a in others if sides[a.name] == "less"]
    more = [a.name for a in others if sides[a.name] == "more"]
    answer = f"Not decided here: nothing is told apart from {base.name}, on which an attacker is right {_of(base)}."
    if less:
        best = min(less, key=lambda a: a.auroc[0])
        answer = (
            f"With {best.name} an attacker is right {_of(best)} (a coin: 50) instead of {_of(base)} with {base.name}"
            f"{_worst(best, base)}, {_cost(best, base)}."
        )
        answer += "".join(f" With {a.name}: {_of(a)}{_worst(a, base)}." for a in others if a is not best and a.told)
    elif more:
        answer = f"Nothing is gained here: {' and '.join(more)} told an attacker more than {base.name} ({_of(base)})."
    said = [f"{base.name}: from what the server has, an attacker picks the trained row of a pair {_chance(base)}."]
    limit = "One run of each: the intervals are over rows, and another run's draws may fall otherwise."
    return [answer, *said, *(f"{a.name}: {_beside(a, base, sides[a.name])}." for a in others), limit]


def _sides(others: Sequence[Arm], base: Arm) -> list[str]:
    """Of each arm: whether it told "less" or "more" than `base`, or "" where it was not told apart.

    Every comparison of the same rows is corrected for all others, of the same attack or not.
    """
    assert base.told is not None
    pairs = [(a.name, p) for a in others for p in a.across if p.base and p.base == base.digest]
    decided = {
        (name, p.attack): p.less[0]
        for (name, p), corrected in zip(pairs, holm([p.p for _, p in pairs]), strict=True)
        if corrected <= paired.ALPHA
    }
    same_rows = {(name, p.attack) for name, p in pairs}
    return [_side(a, base, base.told.attack, decided, same_rows) for a in others]


def _side(
    a: Arm, base: Arm, attack: str, decided: Mapping[tuple[str, str], float], same_rows: Collection[tuple[str, str]]
) -> str:
    if (a.name, attack) in same_rows:
        found = decided.get((a.name, attack), 0.0)
        return "less" if found > 0 else "more" if found < 0 else ""
    assert base.told is not None
    if a.told and a.told.auroc[2] < base.told.auroc[1]:
        return "less"
    return "more" if a.told and a.told.auroc[1] > base.told.auroc[2] else ""


def _of(a: Arm) -> str:
    return f"{100 * a.auroc[0]:.0f} times in 100"


def _worst(*arms: Arm) -> str:
    """A mean over sites hides the one that gave most away; "" where the figures are no means."""
    if any(a.told is None or a.over_sites() is None for a in arms):
        return ""
    return ", at the worst site {:.0f} instead of {:.0f}".format(*(100 * a.told.auroc[0] for a in arms if a.told))


def _cost(a: Arm, base: Arm) -> str:
    cost = []
    if a.after is not None and base.after is not None:
        cost = [f"at a test loss of {a.after:.2f} against {base.after:.2f}"]
    if base.sent:
        more = 100 * a.sent / base.sent - 100
        size = f"{abs(more):.0f} % {'more' if more > 0 else 'fewer'}" if abs(more) >= 0.5 else "as many"
        cost.append(f"with {size} bytes sent")
    return ", ".join(cost) or "at no cost that was measured"


def larger(arms: Sequence[Arm]) -> str:
    """Where more was measured, with its figures where they are here; "" where these runs decide it."""
    base = next((a for a in arms if a.method == BASELINE), None)
    if base is None or not base.attacked or (base.told and base.told.verdict == "above"):
        return ""
    said = "The larger, committed measurement: docs/results.md (fedveil bench fedrand/table4 --small)"
    at = places.checkout()
    file = at / "benchmarks" / "results" / "fedrand_table4.json" if at else None
    if file is None or not file.is_file():
        return f"{said}."
    rows = {row["name"]: row["metrics"] for row in json.loads(file.read_text())["rows"]}
    told = (f"{n} {{mean:.3f}} [{{low:.3f}}, {{high:.3f}}]".format(**rows[n]["alignment"]) for n in _COMMITTED)
    return f"{said}; alignment there: {', '.join(told)}."


def _beside(a: Arm, base: Arm, side: str) -> str:
    assert base.told is not None
    if a.told is None:
        return f"{a.words}; {_cost(a, base)}"
    found = {"less": "less", "more": "more", "": f"not told apart from {base.name}"}[side]
    if a.told.verdict != "above":
        guess = "not told from guessing"
        if a.auroc[1] > 0.5 and a.findings > 1:  # by itself the interval says otherwise
            guess += f" at any site, corrected for {a.findings} findings"
        found = f"{found}, and {guess}" if side else guess
    elif side == "less":
        found = "less, but not nothing"
    over = a.over_sites(base.told.attack)
    if over and over.base and over.base == base.digest:
        found += ", {:+.1f} [{:+.1f}, {:+.1f}] on the same rows".format(*(-100 * over.less[i] for i in (0, 2, 1)))
    return f"{_chance(a)}: {found}; {_cost(a, base)}"


def _chance(a: Arm) -> str:
    """To a tenth, so that a difference is that of the figures shown; a hospital asks for the worst site."""
    shown_ = "{:.1f} times in 100 [{:.1f}, {:.1f}]".format(*(100 * x for x in a.auroc))
    if a.told is None or a.over_sites() is None:
        return shown_
    worst = "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in a.told.auroc))
    return f"{shown_} over the sites, at the worst ({shown(a.told.model, 60)}) {worst}"
