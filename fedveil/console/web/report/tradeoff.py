"""Compare runs: the model's quality, an attacker's success, and the bytes sent by sites.

The attacker's result is the mean over the sites if the audit has it, otherwise the strongest finding about
the run. Either comes from an attack whose controls hold. If there is none, the picture says so and shows no
value. Runs whose audits used the same examples are compared example by example, corrected for their number
(attacks/audit/delong.py). Other runs are compared by whether their intervals are disjoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedveil import paths
from fedveil.attacks.audit import delong, findings
from fedveil.attacks.audit import verdict as words
from fedveil.attacks.audit.delong import SiteAveragedAuroc
from fedveil.attacks.audit.findings import AttackFinding, AuditReport
from fedveil.attacks.statistics import holm_correction
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.summary import BASELINE, protected_method
from fedveil.sanitize import sanitize

_COMMITTED = ("FedAvg client", "FedRand client")


@dataclass(frozen=True)
class TradeoffRun:
    """One run in the picture.

    Attributes:
        name, method: the run's name and method.
        before, after: test loss of the first and of the last model; None if the server did not score it.
        sent: bytes from all sites.
        attacked: whether there is an audit.
        told: the strongest usable finding about the run; None if there is none.
        lost, won: intervals of that attack's controls to lose and to win.
        across: results of usable attacks over all sites, and compared with another run.
        digest: SHA-256 of its audit.json; "" if there is none.
        findings: number of findings about the run, for which verdicts are corrected.
    """

    name: str
    method: str
    before: float | None
    after: float | None
    sent: int
    attacked: bool = False
    told: AttackFinding | None = None
    lost: tuple[float, float] = (0.5, 0.5)
    won: tuple[float, float] = (1.0, 1.0)
    across: Sequence[SiteAveragedAuroc] = ()
    digest: str = ""
    findings: int = 0

    def over_sites(self, attack: str = "") -> SiteAveragedAuroc | None:
        """Return the site average for that attack, by default the attack of the strongest finding."""
        attack = attack or (self.told.attack if self.told else "")
        return next((a for a in self.across if a.attack == attack), None)

    @property
    def auroc(self) -> tuple[float, float, float]:
        """Return the AUROC with interval: over all sites, or from the strongest finding, which the run must have."""
        assert self.told is not None
        site_average = self.over_sites()
        return site_average.auroc if site_average else self.told.auroc

    @property
    def words(self) -> str:
        """Return in words how well an attacker could identify members."""
        if self.told is None:
            return "undecided" if self.attacked else "not attacked"
        return f"{100 * self.auroc[0]:.0f} %"


def read_tradeoff_run(run: RunView) -> TradeoffRun:
    """Read one run for the picture. Raises StateError for an unreadable audit."""
    curve, audit = run.curve("loss"), AuditReport.read(run.folder)
    before = curve[0][1] if curve and curve[0][0] == 0 else None
    # A FedAvg run with noise is no undefended run, so every sentence that compares with it says so.
    noise = " + noise" if protected_method(run).endswith(" + noise") else ""
    plain = TradeoffRun(
        sanitize(run.name, 60) + noise, run.method, before, run.final.get("loss"), run.upload_bytes, audit is not None
    )
    ordered = words.strongest_findings(audit.findings) if audit else []
    if audit is None or not ordered:
        return plain
    top_finding = ordered[0]
    usable = {f.attack for f in ordered}
    lost = words.to_lose(audit.findings, top_finding.attack)
    won = [f for f in audit.findings if f.kind == "to win" and f.attack == top_finding.attack]
    return TradeoffRun(
        plain.name, plain.method, plain.before, plain.after, plain.sent, True, top_finding,
        (min(f.auroc[1] for f in lost), max(f.auroc[2] for f in lost)),
        (min(f.auroc[1] for f in won), max(f.auroc[2] for f in won)),
        [a for a in audit.across if a.attack in usable],
        hashlib.sha256((run.folder / findings.FILE).read_bytes()).hexdigest(),
        sum(f.kind == "about the run" for f in audit.findings),
    )  # fmt: skip


def tradeoff_verdict(arms: Sequence[TradeoffRun]) -> list[str]:
    """Compare the runs with FedAvg: the answer, then one sentence per run; [] if they cannot be compared."""
    base = next((a for a in arms if a.method == BASELINE), None)
    others = [a for a in arms if a is not base]
    if base is None or not others or not any(a.attacked for a in arms):
        return []
    if base.told is None or base.told.verdict != "above":
        return [f"The benefit of withholding is undecided here: no valid attack wins on {base.name}."]
    sides = {a.name: side for a, side in zip(others, _sides(others, base), strict=True)}
    less = [a for a in others if sides[a.name] == "less"]
    more = [a.name for a in others if sides[a.name] == "more"]
    answer = f"Undecided here: no run differs measurably from {base.name}, on which an attacker is right {_of(base)}."
    if less:
        best = min(less, key=lambda a: a.auroc[0])
        answer = (
            f"With {best.name} an attacker is right {_of(best)} (a coin: 50) instead of {_of(base)} with {base.name}"
            f"{_worst(best, base)}, {_cost(best, base)}."
        )
        answer += "".join(f" With {a.name}: {_of(a)}{_worst(a, base)}." for a in others if a is not best and a.told)
    elif more:
        answer = f"No benefit here: {' and '.join(more)} revealed more to an attacker than {base.name} ({_of(base)})."
    baseline_lines = [
        f"{base.name}: from the server's view, an attacker picks the trained example of a pair {_chance(base)}."
    ]
    limit = "One run of each: the intervals are over examples, and the draws of another run may differ."
    return [answer, *baseline_lines, *(f"{a.name}: {_beside(a, base, sides[a.name])}." for a in others), limit]


def _sides(others: Sequence[TradeoffRun], base: TradeoffRun) -> list[str]:
    """Return for each run whether it leaked "less" or "more" than `base`, or "" if no difference was found.

    All comparisons on the same examples are corrected for each other, across attacks.
    """
    assert base.told is not None
    pairs = [(a.name, p) for a in others for p in a.across if p.base and p.base == base.digest]
    decided = {
        (name, p.attack): p.less[0]
        for (name, p), corrected in zip(pairs, holm_correction([p.p for _, p in pairs]), strict=True)
        if corrected <= delong.ALPHA
    }
    same_rows = {(name, p.attack) for name, p in pairs}
    return [_side(a, base, base.told.attack, decided, same_rows) for a in others]


def _side(
    a: TradeoffRun,
    base: TradeoffRun,
    attack: str,
    decided: Mapping[tuple[str, str], float],
    same_rows: Collection[tuple[str, str]],
) -> str:
    if (a.name, attack) in same_rows:
        difference = decided.get((a.name, attack), 0.0)
        return "less" if difference > 0 else "more" if difference < 0 else ""
    assert base.told is not None
    if a.told and a.told.auroc[2] < base.told.auroc[1]:
        return "less"
    return "more" if a.told and a.told.auroc[1] > base.told.auroc[2] else ""


def _of(a: TradeoffRun) -> str:
    return f"{100 * a.auroc[0]:.0f} times in 100"


def _worst(*arms: TradeoffRun) -> str:
    """Describe the worst site, which a mean over sites hides; "" if the values are not means."""
    if any(a.told is None or a.over_sites() is None for a in arms):
        return ""
    return ", at the worst site {:.0f} instead of {:.0f}".format(*(100 * a.told.auroc[0] for a in arms if a.told))


def _cost(a: TradeoffRun, base: TradeoffRun) -> str:
    cost = []
    if a.after is not None and base.after is not None:
        cost = [f"at a test loss of {a.after:.2f} against {base.after:.2f}"]
    if base.sent:
        more = 100 * a.sent / base.sent - 100
        size = f"{abs(more):.0f} % {'more' if more > 0 else 'fewer'}" if abs(more) >= 0.5 else "equally many"
        cost.append(f"with {size} bytes sent")
    return ", ".join(cost) or "at no measured cost"


def is_larger(arms: Sequence[TradeoffRun]) -> str:
    """Point to the larger measurement, with its results if available here; "" if these runs decide the question."""
    base = next((a for a in arms if a.method == BASELINE), None)
    if base is None or not base.attacked or (base.told and base.told.verdict == "above"):
        return ""
    reference = "The larger, committed measurement: docs/results.md (fedveil bench fedrand/table4 --small)"
    at = paths.checkout_folder()
    file = at / "benchmarks" / "results" / "fedrand_table4.json" if at else None
    if file is None or not file.is_file():
        return f"{reference}."
    rows = {row["name"]: row["metrics"] for row in json.loads(file.read_text())["rows"]}
    alignments = (f"{n} {{mean:.3f}} [{{low:.3f}}, {{high:.3f}}]".format(**rows[n]["alignment"]) for n in _COMMITTED)
    return f"{reference}; alignment there: {', '.join(alignments)}."


def _beside(a: TradeoffRun, base: TradeoffRun, side: str) -> str:
    assert base.told is not None
    if a.told is None:
        return f"{a.words}; {_cost(a, base)}"
    outcome = {"less": "less", "more": "more", "": f"no measurable difference from {base.name}"}[side]
    if a.told.verdict != "above":
        guess = "not distinguishable from guessing"
        if a.auroc[1] > 0.5 and a.findings > 1:  # the interval alone would suggest otherwise
            guess += f" at any site, corrected for {a.findings} findings"
        outcome = f"{outcome}, and {guess}" if side else guess
    elif side == "less":
        outcome = "less, but not nothing"
    over = a.over_sites(base.told.attack)
    if over and over.base and over.base == base.digest:
        outcome += ", {:+.1f} [{:+.1f}, {:+.1f}] on the same examples".format(*(-100 * over.less[i] for i in (0, 2, 1)))
    return f"{_chance(a)}: {outcome}; {_cost(a, base)}"


def _chance(a: TradeoffRun) -> str:
    """Format the attacker's result to a tenth, so that differences match the shown values; includes the worst site."""
    shown_ = "{:.1f} times in 100 [{:.1f}, {:.1f}]".format(*(100 * x for x in a.auroc))
    if a.told is None or a.over_sites() is None:
        return shown_
    worst = "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in a.told.auroc))
    return f"{shown_} over the sites, at the worst site ({sanitize(a.told.model, 60)}) {worst}"
