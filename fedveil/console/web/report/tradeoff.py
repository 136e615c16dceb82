"""Compare runs: attack success at the worst site and over all sites, model quality, and bytes sent.

The attack result comes from the audit's first attack over all sites (attacks/audit/delong.py). If an audit has no such
attack, it comes from the strongest one. An attack that fails on memorized examples, or succeeds on other rows, proves
nothing in any run. A site whose examples also score high on another site's upload is named but not judged.

| run | compared with |
|---|---|
| FedAvg with secure aggregation, FedAvg with noise | the plain FedAvg run and each other, on the same examples |
| another method | no run, because what one of its runs reveals may depend on its random draws |

A comparison counts if the difference is at least MARGIN, and its p-value is at most ALPHA after Holm's correction for
all comparisons. The margin is needed because a p-value is about examples, but two runs also differ in their draws.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from fedveil.attacks.audit import delong, findings
from fedveil.attacks.audit import verdict as words
from fedveil.attacks.audit.delong import NormalEstimate, RunDifference, SiteAveragedAuroc
from fedveil.attacks.audit.findings import AttackFinding, AuditReport, control_name
from fedveil.attacks.statistics import holm_correction
from fedveil.console import demo_settings
from fedveil.console.runs.run_reader import RunView
from fedveil.console.runs.summary import BASELINE
from fedveil.sanitize import sanitize

MARGIN = 0.03
LITTLE = 0.8  # a method hides little if the lower bound of its mean is above this
_CHANCE_LEVEL = 0.95  # by chance, the worst site stays below `worst_by_chance` in 19 of 20 demos
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(64)


@dataclass(frozen=True)
class AttackedSite:
    """An attack at one site in a run.

    Attributes:
        site: the site's name.
        auroc: fraction of (member, non-member) pairs that the attack orders correctly.
        wrong: the same on another site's upload; None without such an upload.
        standard_error: of `auroc`; None if the audit has none.
        members, non_members: number of examples of each kind.
        is_above: whether the finding shows membership, in an audit without a mean over the sites.
        is_void: whether `wrong` is above chance on two samples of non-members, in which case `auroc` proves nothing.
    """

    site: str
    auroc: float
    wrong: float | None = None
    standard_error: float | None = None
    members: int = 0
    non_members: int = 0
    is_above: bool = False
    is_void: bool = False


@dataclass(frozen=True)
class TradeoffRun:
    """A run in the picture.

    Attributes:
        name, method: the run's name and method.
        before, after: test loss of the initial and of the final model; None if the server did not score it.
        sent: bytes from all sites.
        adapter: the adapter and its number of weights; "" if the run did not record them.
        secure: whether the server saw only sums.
        noise: description of the noise; "" without noise.
        attack: the attack's name; "" if no attack can be judged.
        broken: the reason why no attack can be judged; "" if one can, or if there is no audit.
        sites: the attack at each site.
        mean: the mean over the sites; None if the audit has none.
        differences: comparisons with other runs.
        digest: SHA-256 of its audit.json; "" if there is none.
        is_demo: whether it has the demo's own settings.
    """

    name: str
    method: str
    before: float | None
    after: float | None
    sent: int
    adapter: str = ""
    secure: bool = False
    noise: str = ""
    attack: str = ""
    broken: str = ""
    sites: Sequence[AttackedSite] = ()
    mean: NormalEstimate | None = None
    differences: Sequence[RunDifference] = field(default_factory=list)
    digest: str = ""
    is_demo: bool = False

    @property
    def judged(self) -> list[AttackedSite]:
        """Return the sites whose result counts."""
        return [site for site in self.sites if not site.is_void]

    @property
    def worst(self) -> AttackedSite | None:
        """Return the site where the attack is right most often."""
        return max(self.judged, key=lambda site: site.auroc, default=None)

    @property
    def is_plain(self) -> bool:
        """Return whether the run is FedAvg without protection."""
        return self.method == BASELINE and not self.secure and not self.noise

    @property
    def is_judged_whole(self) -> bool:
        """Return whether every site's result counts, and so their mean does too."""
        return self.mean is not None and len(self.judged) == len(self.sites)

    @property
    def words(self) -> str:
        """Return the worst site's figure, or a word for why there is none."""
        if self.worst is None:
            return "undecided" if self.broken or self.sites else "not attacked"
        return f"{100 * self.worst.auroc:.0f}"


def read_tradeoff_run(run: RunView) -> TradeoffRun:
    """Read a run for the picture. Raises StateError for an unreadable audit."""
    curve, audit, config = run.curve("loss"), AuditReport.read(run.folder), run.config.get("config", {})
    attack, broken, sites, over = _attack_of(audit) if audit else ("", "", [], None)
    return TradeoffRun(
        sanitize(run.name, 60), run.method,
        curve[0][1] if curve and curve[0][0] == 0 else None, run.final.get("loss"), run.upload_bytes,
        run.adapter_weights, bool(config.get("secure.enabled")), _noise(config), attack, broken, sites,
        over.mean if over else None, over.differences if over else [],
        hashlib.sha256((run.folder / findings.FILE).read_bytes()).hexdigest() if audit else "",
        demo_settings.has_demo_settings(config),
    )  # fmt: skip


def _attack_of(audit: AuditReport) -> tuple[str, str, list[AttackedSite], SiteAveragedAuroc | None]:
    """Return the attack that represents the audit, the reason if there is none, its sites, and its mean over them."""
    reasons = []
    for over in audit.across:
        if reason := _broken(audit.findings, over.attack):
            reasons.append(f"{over.attack}: {reason}")
        else:
            return over.attack, "", [_site_of(audit, over, i) for i in range(len(over.sites))], over
    ordered = words.strongest_findings(audit.findings) if not audit.across else []
    if not ordered:
        return "", "; ".join(reasons) or "no attack whose controls hold was tried", [], None
    attack = ordered[0].attack
    own = [f for f in audit.findings if f.kind == "about the run" and f.attack == attack and not f.is_blind]
    own = [f for f in own if f.model.endswith(", the sum")] or own  # masked uploads, which the server cannot read
    return attack, "", [_site_of_finding(audit, f) for f in own], None


def _broken(found: Sequence[AttackFinding], attack: str) -> str:
    """Return why the attack proves nothing in any run, if a trained control failed; "" if both hold."""
    for f in found:
        if f.attack == attack and f.kind == "to win" and f.verdict != "above":
            return f"it does not succeed on memorized examples ({_percent(f.auroc[0])} times in 100)"
        if f.attack == attack and f.kind == "to lose" and f.verdict != "contains":
            return f"it distinguishes examples that no model was trained on ({f.model}: {_percent(f.auroc[0])})"
    return ""


def _site_of(audit: AuditReport, over: SiteAveragedAuroc, i: int) -> AttackedSite:
    site = over.sites[i]
    value, wrong = site.auroc.value, site.auroc.value - site.less_wrong.value if site.less_wrong else None
    is_void = any(
        f.model == site.site and f.attack == control_name(over.attack) and f.verdict == "above" for f in audit.findings
    )
    error = site.auroc.standard_error
    return AttackedSite(site.site, value, wrong, error, site.members, site.non_members, is_void=is_void)


def _site_of_finding(audit: AuditReport, f: AttackFinding) -> AttackedSite:
    control = control_name(f.attack)
    wrong = next((c.auroc[0] for c in audit.findings if (c.model, c.attack) == (f.model, control)), None)
    return AttackedSite(f.model, f.auroc[0], wrong, None, f.members, f.non_members, f.verdict == "above")


def _noise(config: Mapping[str, object]) -> str:
    if not config.get("dp.noise-multiplier"):
        return ""
    epsilon = config.get("dp.epsilon")
    return f"noise with epsilon {epsilon:g}" if isinstance(epsilon, int | float) and epsilon else "noise"


def worst_by_chance(sites: int, members: int, non_members: int, level: float = _CHANCE_LEVEL) -> float:
    """Return the AUROC that, if the attack only guesses, the worst site stays below with probability `level`.

    The sites have the same non-members, so their figures have correlation members / (members + non_members). They
    are treated as normal.
    """
    shared = members / (members + non_members)
    deviation = math.sqrt((members + non_members + 1) / (12 * members * non_members))
    normal = NormalDist()

    def below(z: float) -> float:
        inner = [math.pow(normal.cdf((z - shared**0.5 * float(t)) / (1 - shared) ** 0.5), sites) for t in _NODES]
        return float(np.dot(inner, _NODE_WEIGHTS) / _NODE_WEIGHTS.sum())

    low, high = 0.0, 10.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < level else (low, middle)
    return min(1.0, 0.5 + low * deviation)


def chance_of_runs(arms: Sequence[TradeoffRun]) -> float:
    """Return the runs' highest `worst_by_chance`; 0.5 if no run's sites have known numbers of examples."""
    return max(
        (
            worst_by_chance(len(arm.judged), min(s.members for s in arm.judged), min(s.non_members for s in arm.judged))
            for arm in arms
            if arm.judged and all(s.members and s.non_members for s in arm.judged)
        ),
        default=0.5,
    )


def decide_differences(arms: Sequence[TradeoffRun]) -> dict[tuple[str, str], bool]:
    """Return, for each (run, other run) comparison, whether the run reveals less, corrected for all comparisons."""
    by_digest = {a.digest: a for a in arms if a.method == BASELINE and a.is_judged_whole}
    pairs = [(a.name, by_digest[d.base].name, d.less) for a in by_digest.values() for d in a.differences
             if d.base in by_digest]  # fmt: skip
    corrected = holm_correction([less.p for _, _, less in pairs])
    return {
        (name, other): p <= delong.ALPHA and less.value >= MARGIN
        for (name, other, less), p in zip(pairs, corrected, strict=True)
    }


def tradeoff_verdict(arms: Sequence[TradeoffRun]) -> list[str]:
    """Return the answer with one clause per run on its worst site, then a line per run; [] without an attack."""
    base = next((a for a in arms if a.is_plain), None)
    if base is None or len(arms) < 2 or not any(a.attack or a.broken for a in arms):
        return []
    if base.worst is None:
        why = base.broken or (_void_words(base) if base.sites else "it was not attacked")
        return [f"Undecided here: nothing can be judged on {base.name}: {why}.", *_lines(arms)]
    less = decide_differences(arms)
    clauses = [_base_clause(base)]
    clauses += [_clause(a, base, arms, less) for a in arms if a is not base]
    return [" ".join(clauses), *_lines(arms), *_limits(arms)]


def _base_clause(base: TradeoffRun) -> str:
    assert base.worst is not None
    if not (base.mean.lower_bound(delong.ALPHA) > 0.5 + MARGIN if base.mean else base.worst.is_above):
        mean = f" (mean over the sites {_percent(base.mean.value)})" if base.mean else ""
        return (
            f"{base.name}: at the worst site, an attacker is right {base.words} times in 100{mean}, which cannot be "
            "told apart from a coin toss here."
        )
    return (
        f"An attacker who reads what {base.name} sends picks the training example from a pair at the worst site "
        f"{base.words} times in 100 (a coin toss: 50)."
    )


def _clause(
    a: TradeoffRun, base: TradeoffRun, arms: Sequence[TradeoffRun], less: Mapping[tuple[str, str], bool]
) -> str:
    """Return what the run changes, if that is decided; otherwise both figures and "no difference shown"."""
    if a.worst is None:
        why = f" ({a.broken})" if a.broken else f" ({_void_words(a)})" if a.sites else ""
        return f"{a.name}: {a.words}{why}."
    if a.method != BASELINE:
        return _other_method(a, base)
    if not less.get((a.name, base.name)):
        return f"{a.name}: {a.words} at the worst site against {base.words} with {base.name}: no difference shown here."
    if a.noise:
        text = f"{a.noise[0].upper()}{a.noise[1:]} ({a.name}) brings it to {a.words}"
        if any(s.members for s in a.judged):
            text += (
                f", where chance alone gives the worst of {len(a.judged)} sites up to "
                f"{_percent(chance_of_runs([a]))} in 19 demos of 20"
            )
        undecided = [o.name for o in arms if (a.name, o.name) in less and not less[a.name, o.name]]
        text += f" (not shown to differ from {', '.join(undecided)})" if undecided else ""
        return f"{text}{_loss_cost(a, base)}."
    return f"The secure sum of {len(a.sites)} sites ({a.name}) hides whose update it is, not what is in it: {a.words}."


def _other_method(a: TradeoffRun, base: TradeoffRun) -> str:
    """Return the clause for a method that is not compared with other runs."""
    share = 100 - 100 * a.sent / base.sent if base.sent else 0.0
    saves = f"saves {share:.0f} % of the bytes" if share >= 0.5 else "sends as many bytes or more"
    if a.is_demo and a.name in demo_settings.DRAWN:
        over = demo_settings.EARLIER_RANGES[a.name]
        return (
            f"{a.name} {saves}: {a.words}; this depends on its draws (mean over the sites {over.low:.0f} to "
            f"{over.high:.0f} in {over.runs} runs), so a single run is not compared."
        )
    little = a.mean is not None and a.is_judged_whole and a.mean.lower_bound(delong.ALPHA) > LITTLE
    return f"{a.name} {saves}{' and hides little' if little else ''}: {a.words}."


def _loss_cost(a: TradeoffRun, base: TradeoffRun) -> str:
    if a.after is None or base.after is None or base.before is None:
        return ""
    cost, learned = a.after - base.after, base.before - base.after
    if cost <= 0 or learned <= 0:
        return f", at a test loss of {a.after:.2f} against {base.after:.2f}"
    return f", and costs {cost:.2f} of the {learned:.2f} nats that {base.name} learned"


def _void_words(a: TradeoffRun) -> str:
    void = [f"{s.site}: {_percent(s.wrong or 0.0)} on another site's upload" for s in a.sites if s.is_void]
    return f"not judged, because the same examples score above chance where they were not trained on: {', '.join(void)}"


def _lines(arms: Sequence[TradeoffRun]) -> list[str]:
    """Return a line per run: its worst site with bounds, all sites, their mean, and the wrong-site baseline."""
    attacked = sum(len(a.judged) for a in arms) or 1
    lines = []
    for a in arms:
        if a.worst is None:
            continue
        worst = f"worst site {a.worst.site} {100 * a.worst.auroc:.1f}"
        if a.worst.standard_error:
            estimate = NormalEstimate(a.worst.auroc, a.worst.standard_error)
            low, high = estimate.interval(delong.ALPHA / attacked, 0.0)
            worst += f" [{100 * low:.1f}, {100 * high:.1f}]"
        parts = [worst, "sites " + ", ".join(f"{100 * s.auroc:.1f}" for s in a.judged)]
        if a.mean and a.is_judged_whole:
            low, high = a.mean.interval(delong.ALPHA, 0.0)
            parts.append(f"mean {100 * a.mean.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]")
        if wrong := [s.auroc - s.wrong for s in a.judged if s.wrong is not None]:
            parts.append(f"own upload minus another site's {', '.join(f'{100 * value:+.1f}' for value in wrong)}")
        if any(s.is_void for s in a.sites):
            parts.append(_void_words(a))
        lines.append(f"{a.name}: {'; '.join(parts)}.")
    return lines


def _limits(arms: Sequence[TradeoffRun]) -> list[str]:
    """Return the limits of what the figures show."""
    limits = [
        "Intervals are 99 %; for a worst site, they hold for all sites of all runs together. A difference is shown at "
        f"the 1 % level over all comparisons, and from {100 * MARGIN:.0f} points on. This is about examples; another "
        "run has other draws. 50 does not prove safety: another attack may find more.",
    ]
    if all(a.is_demo for a in arms):
        ranges = [
            f"{a.name} {over.low:.0f} to {over.high:.0f} in {over.runs} runs"
            for a in arms
            if (over := demo_settings.EARLIER_RANGES.get(a.name))
        ]
        limits.append(
            "Seeded: which examples a site has, the initial weights and the attacked examples. Not seeded: the order "
            "of batches, the masks, the noise and the methods' draws. So your figures will differ"
            f"{', mean over the sites: ' + ', '.join(ranges) if ranges else ' by a few points'}."
        )
        limits.append(
            "Each site trains four times on 64 examples, so that attacks succeed; with fewer passes, more examples or "
            "another model, they may succeed less often."
        )
    return limits


def _percent(value: float) -> str:
    return f"{100 * value:.0f}"
