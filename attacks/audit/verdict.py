"""Summarize an audit in words: the attacks that count, the members found, and findings that prove little.

A control is a model for which the answer is known (attacks/audit/runner.py). If an attack's controls fail,
the attack proves nothing about the run in either direction, and its note says so. Verdicts are corrected for
multiple testing (attacks/audit/findings.py). So fewer than one in twenty audits of runs without leakage
report membership, regardless of the number of models and attacks.

A control to lose with few examples rules out little: with 64 examples per side its interval reaches about
0.6. A finding about the run within that range may merely reflect different examples, so it is counted
separately (`in_band`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.attacks.audit.controls import TrainedControl
from fedveil.attacks.audit.findings import AttackFinding, attack_names, control_name, is_control_name


def to_lose(found: Sequence[AttackFinding], attack: str) -> list[AttackFinding]:
    """Return the controls where the attack must fail but could succeed."""
    lost = [f for f in found if f.kind == "to lose" and f.attack in (attack, control_name(attack))]
    return [f for f in lost if not f.is_blind]


def explain_unusable(found: Sequence[AttackFinding], attack: str) -> list[str]:
    """Return the reasons why the attack proves nothing about the run; [] if its controls passed."""
    won = next((f for f in found if f.kind == "to win" and f.attack == attack), None)
    reasons = []
    if won is None or won.verdict != "above":
        reasons.append(f"it does not win where members are memorized ({_shown(won) if won else 'not tried'})")
    lost = to_lose(found, attack)
    # Another site's training may lower the scores of these examples below 0.5.
    failed = [f for f in lost if f.verdict == "above" or (f.verdict == "below" and not is_control_name(f.attack))]
    if not lost or failed:
        details = ", ".join(f"{f.model}: {_shown(f)}" for f in failed) or "no control that could fail was tried"
        reasons.append(
            f"it separates examples that the model was not trained on ({details}): the examples themselves differ"
        )
    return reasons


def in_band(found: Sequence[AttackFinding], one: AttackFinding) -> bool:
    """Return whether a finding shows no more membership than the attack may find in untrained examples."""
    return one.verdict == "above" and one.auroc[0] <= max((f.auroc[2] for f in to_lose(found, one.attack)), default=0.0)


def strongest_findings(found: Sequence[AttackFinding]) -> list[AttackFinding]:
    """Return the findings of usable attacks about the run, highest AUROC first."""
    usable = {attack for attack in attack_names(found) if not explain_unusable(found, attack)}
    about = [f for f in found if f.kind == "about the run" and f.attack in usable and not f.is_blind]
    return sorted(about, key=lambda f: -f.auroc[0])


def audit_verdict(found: Sequence[AttackFinding]) -> str:
    """Summarize the audit's result in one or two sentences."""
    names, ordered = attack_names(found), strongest_findings(found)
    lame = [name for name in names if explain_unusable(found, name)]
    aside = f" {len(lame)} of {_attacks(len(names))} prove nothing here: their controls fail." if lame else ""
    if not ordered:
        return "Not decided: no attack whose controls hold was tried on the run." + aside
    count = f"{len(ordered)} findings of {_attacks(len(names) - len(lame))} whose controls hold"
    above = [f for f in ordered if f.verdict == "above"]
    if not above:
        return (
            f"Membership shows in none of {count}. That is no proof that it cannot be inferred: other attacks may "
            f"succeed.{aside}"
        )
    first, open_ = above[0], [f for f in above if in_band(found, f)]
    but = f", {len(open_)} of them no higher than their controls reach on untrained examples" if open_ else ""
    return (
        f"Membership shows in {len(above)} of {count}{but}. Strongest: {first.attack} on {first.model} ranks a "
        f"trained example above an untrained one {100 * first.auroc[0]:.0f} times in 100 (a coin: 50).{aside}"
    )


def _attacks(count: int) -> str:
    return f"{count} attack{'s' * (count != 1)}"


def control_notes(
    found: Sequence[AttackFinding], overfitted: TrainedControl, taught: TrainedControl | None
) -> list[str]:
    """Return one sentence per attack: the result of its controls and what that means for the run.

    Args:
        found: findings with corrected verdicts.
        taught: control trained on other examples; None if there were too few examples for it.
    """
    notes = [
        f"The overfitted control has {100 * overfitted.loss_share:.0f} % of its members' loss left after "
        f"{8 * overfitted.rounds} epochs.",
        f"The control of other rows was trained on {len(taught.members)} of the members to "
        f"{100 * taught.loss_share:.0f} % of their loss (epochs: {taught.rounds}), and is tested on the others."
        if taught
        else "There is NO control of other rows: there are too few members to train it on some and test it on others.",
    ]
    for attack in attack_names(found):
        if reasons := explain_unusable(found, attack):
            notes.append(f"{attack}: NOT usable here, because {' and '.join(reasons)}.")
            continue
        lost = to_lose(found, attack)
        about = [f for f in found if f.attack == attack and f.kind == "about the run"]
        models, blind = [f for f in about if not f.is_blind], [f.model for f in about if f.is_blind]
        above = [f"{f.model} ({_shown(f)}{_but(found, f)})" for f in models if f.verdict == "above"]
        control_note = f"{attack}: its controls hold (to lose: {', '.join(map(_shown, lost))})."
        notes.append(
            f"{control_note} Membership shows in {', '.join(above)}."
            if above
            else f"{control_note} Membership shows in none of {len(models)} models."
        )
        if blind:
            notes.append(
                f"{attack}: it scores all examples alike on {', '.join(blind)}, so it says NOTHING about them."
            )
    return notes


def _shown(f: AttackFinding) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*f.auroc)


def _but(found: Sequence[AttackFinding], f: AttackFinding) -> str:
    return "; no higher than its controls to lose reach" if in_band(found, f) else ""
