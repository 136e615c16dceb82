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
from typing import Any

from fedveil import places
from fedveil.attacks import findings, paired
from fedveil.attacks.findings import Audit, Finding
from fedveil.attacks.paired import Across
from fedveil.attacks.statistics import holm
from fedveil.console.report.figures import COLOURS, INK, drawn
from fedveil.console.runs.folder import Run
from fedveil.console.runs.summary import BASELINE
from fedveil.foreign import shown

MOST_ARMS = 8
_COMMITTED = ("FedAvg client", "FedRand client")
_BLUE, _ORANGE = COLOURS[0], COLOURS[5]


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
    ordered = findings.strongest(audit.findings) if audit else []
    if audit is None or not ordered:
        return plain
    told = ordered[0]
    usable = {f.attack for f in ordered}
    lost = findings.to_lose(audit.findings, told.attack)
    won = [f for f in audit.findings if f.kind == "to win" and f.attack == told.attack]
    return Arm(
        plain.name, plain.method, plain.before, plain.after, plain.sent, True, told,
        (min(f.auroc[1] for f in lost), max(f.auroc[2] for f in lost)),
        (min(f.auroc[1] for f in won), max(f.auroc[2] for f in won)),
        [a for a in audit.across if a.attack in usable],
        hashlib.sha256((run.folder / findings.FILE).read_bytes()).hexdigest(),
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
            f"With {best.name} an attacker is right {_of(best)} (a coin: 50) instead of {_of(base)} with {base.name}, "
            f"{_cost(best, base)}."
        )
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


def _cost(a: Arm, base: Arm) -> str:
    cost = [f"{100 * a.sent / base.sent:.0f} % of the bytes"] if base.sent else []
    if a.after is not None and base.after is not None:
        cost = [f"at a test loss of {a.after:.2f} (there {base.after:.2f})", *cost]
    return ", ".join(cost) or "at no cost that was measured"


def larger(arms: Sequence[Arm]) -> str:
    """Where more was measured, with its figures where they are here; "" where these runs decide it."""
    base = next((a for a in arms if a.method == BASELINE), None)
    if base is None or not base.attacked or (base.told and base.told.verdict == "above"):
        return ""
    said = "The larger, committed measurement: docs/results.md (fedveil bench fedrand/table4 --quick)"
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
        found = f"{found}, and not told from guessing" if side else "not told from guessing"
    elif side == "less":
        found = "less, but not nothing"
    over = a.over_sites(base.told.attack)
    if over and over.base and over.base == base.digest:
        found += ", {:+.0f} [{:+.0f}, {:+.0f}] on the same rows".format(*(-100 * over.less[i] for i in (0, 2, 1)))
    return f"{_chance(a)}: {found}; {_cost(a, base)}"


def _chance(a: Arm) -> str:
    return "{:.0f} times in 100 [{:.0f}, {:.0f}]".format(*(100 * x for x in a.auroc))


def svg(arms: Sequence[Arm], name: str = "trade") -> str:
    """The picture of the first MOST_ARMS arms as an SVG element; "" for less than two."""
    arms = arms[:MOST_ARMS]
    if len(arms) < 2:
        return ""

    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1.25, 0.8))
        _quality(panels[0], arms)
        _attacker(panels[1], arms)
        _bytes(panels[2], arms)
        for axes in panels:
            axes.set_ylim(len(arms) - 0.45, -0.75)
            axes.set_yticks([])
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.title.set_fontweight("bold")
        for y, a in enumerate(arms):
            panels[0].text(
                -0.04, y - 0.34, a.name, transform=panels[0].get_yaxis_transform(), weight="bold", va="center"
            )

    return drawn(name, (5.6, 1.15 + 0.72 * len(arms)), f"What was gained. {_told(arms)}", draw)


def _told(arms: Sequence[Arm]) -> str:
    """For who cannot see it."""
    return "; ".join(
        f"{a.name}: test loss {'not scored' if a.after is None else f'{a.after:.3f}'}, an attacker picks the trained "
        f"row of a pair: {a.words} (a coin: 50 %), {a.sent / 1e6:.2f} MB sent"
        for a in arms
    )


def _quality(axes: Any, arms: Sequence[Arm]) -> None:
    for y, a in enumerate(arms):
        if a.after is None:
            axes.text(
                0.5, y, "not scored", transform=axes.get_yaxis_transform(), ha="center", va="center", style="italic"
            )
            continue
        if a.before is not None:
            axes.plot((a.before, a.after), (y, y), color=INK, alpha=0.35, linewidth=1.4)
            axes.plot((a.before,), (y,), "o", markersize=4, markerfacecolor="none", markeredgecolor=INK)
        axes.plot((a.after,), (y,), "o", markersize=8, color=COLOURS[2])
        axes.annotate(f"{a.after:.2f}", (a.after, y), (0, -13), textcoords="offset points", ha="center", va="center")
    axes.margins(x=0.15)
    axes.xaxis.set_inverted(True)
    axes.set(title="Quality", xlabel="test loss, better \u2192")


def _attacker(axes: Any, arms: Sequence[Arm]) -> None:
    told = [a for a in arms if a.told]
    if told:
        low, high = min(a.lost[0] for a in told), max(a.lost[1] for a in told)
        axes.axvspan(100 * low, 100 * high, color=_BLUE, alpha=0.2, lw=0)
        low, high = min(a.won[0] for a in told), max(a.won[1] for a in told)
        axes.axvspan(100 * min(low, 0.99), 100 * high, color=_ORANGE, alpha=0.25, lw=0)
    axes.axvline(50, color=INK, alpha=0.5, linewidth=0.8, linestyle="--")
    for y, a in enumerate(arms):
        if a.told is None:
            axes.text(66, y, a.words, ha="center", va="center", style="italic")
            continue
        value, low, high = (100 * x for x in a.auroc)
        colour = _ORANGE if a.told.verdict == "above" else _BLUE
        axes.plot((low, high), (y, y), color=colour, linewidth=2)
        axes.plot((value,), (y,), "o", markersize=8, color=colour)
        axes.annotate(a.words, (value, y), (0, -13), textcoords="offset points", ha="center", va="center")
    axes.set(title="Told to an attacker", xlim=(32, 101), xlabel="% right, \u2190 better (50: coin)")


def _bytes(axes: Any, arms: Sequence[Arm]) -> None:
    most = max(a.sent for a in arms) / 1e6 or 1.0
    for y, a in enumerate(arms):
        axes.barh(y, a.sent / 1e6, height=0.22, color=COLOURS[4])
        axes.annotate(f"{a.sent / 1e6:.2f}", (0, y), (2, -13), textcoords="offset points", ha="left", va="center")
    axes.set(title="Sent by sites", xlim=(0, 1.05 * most), xlabel="MB, \u2190 better")


def caption(arms: Sequence[Arm]) -> str:
    """What the picture shows, in words."""
    first = next((a for a in arms if a.told), None)
    if first is None or first.told is None:
        return "Quality: open circle untrained, full circle after the last round. No attack is shown."
    which = "the mean over the sites" if first.over_sites() else "its strongest finding"
    return (
        "Quality: open circle untrained, full circle after the last round, on rows that no site has. An attacker who "
        "reads what the server gets is shown a row that a site trained on and one that it did not "
        f"({first.told.attack}, {which}, 95 %). Blue band: the same attack on models that never saw the rows. "
        "Orange band: on rows known by heart. An orange point shows membership; a blue one was not told from guessing, "
        "which proves no safety. One run each: no result to cite."
    )
