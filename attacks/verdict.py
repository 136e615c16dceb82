"""What an audit comes to, in words: which attacks count, where membership shows, and where that says little.

A control is a model of which the answer is known (attacks/audit.py). An attack whose controls fail proves nothing
about the run, in either direction, and its note says so. Fewer than one audit in twenty, of runs that give nothing
away, say that membership shows anywhere, however many models and attacks there are: verdicts are corrected
(attacks/findings.py).

A control to lose of a few rows rules little out: with 60 rows a side its interval reaches to about 0.6. What shows on
the run and is no higher than that may be rows that differ by themselves, so it is counted apart (`in_band`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.attacks.controls import Control
from fedveil.attacks.findings import Finding, beside, is_beside, tried


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


def in_band(found: Sequence[Finding], one: Finding) -> bool:
    """Whether it shows membership by a figure no higher than the attack may have where nobody trained on the rows."""
    return one.verdict == "above" and one.auroc[0] <= max((f.auroc[2] for f in to_lose(found, one.attack)), default=0.0)


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
    first, open_ = above[0], [f for f in above if in_band(found, f)]
    but = f", {len(open_)} of them no higher than their controls reach where nobody trained" if open_ else ""
    return (
        f"Membership shows in {len(above)} of {count}{but}. Strongest: {first.attack} on {first.model} puts a trained "
        f"row above another one {100 * first.auroc[0]:.0f} times in 100 (a coin: 50).{aside}"
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
        f"{8 * overfitted.rounds} epochs.",
        f"The control of other rows was taught {len(taught.members)} of the members to {100 * taught.loss_share:.0f} % "
        f"of their loss (epochs: {taught.rounds}), and is asked about the others."
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
        above = [f"{f.model} ({_shown(f)}{_but(found, f)})" for f in models if f.verdict == "above"]
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


def _but(found: Sequence[Finding], f: Finding) -> str:
    return "; no higher than its controls to lose reach" if in_band(found, f) else ""
