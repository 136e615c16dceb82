"""Draw an audit's findings as a forest plot: a row per attack and model, in front of bands for its controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.attacks.audit import verdict
from fedveil.attacks.audit.findings import AttackFinding, attack_names
from fedveil.console.web.report.line_chart import COLOURS, INK, draw_curves
from fedveil.sanitize import sanitize

MOST_ROWS = 24
_WON, _LOST, _OPEN, _UNDECIDED = COLOURS[5], COLOURS[0], "#8a8a8a", INK
_NAME = 26  # characters
_BANDS, _LEAST_BAND = {_LOST: 0.3, _WON: 0.6}, 0.012  # a band's opacity, and its minimum visible width


def forest_rows(found: Sequence[AttackFinding], most: int = MOST_ROWS) -> list[AttackFinding]:
    """Return at most `most` of the strongest findings about the run, by attack, with unusable attacks last."""
    lame = {attack for attack in attack_names(found) if verdict.explain_unusable(found, attack)}
    about = [f for f in found if f.kind == "about the run"]
    about = sorted(about, key=lambda f: (f.attack in lame, -f.auroc[0]))[:most]
    attacks = list(dict.fromkeys(f.attack for f in about))
    return sorted(about, key=lambda f: attacks.index(f.attack))


def forest_svg(found: Sequence[AttackFinding], name: str, most: int = MOST_ROWS) -> str:
    """Return the plot for the run `name` as an SVG element; "" if there are no findings about a run."""
    from matplotlib.patches import Rectangle

    listed = forest_rows(found, most)
    if not listed:
        return ""
    attacks = list(dict.fromkeys(f.attack for f in listed))
    height = len(listed) + len(attacks)  # each attack has its own line above its models

    def draw(axes: Any) -> None:
        y, ticks = 0.0, list[tuple[float, str]]()
        for attack in attacks:
            own = [f for f in listed if f.attack == attack]
            usable = not verdict.explain_unusable(found, attack)
            axes.text(0.0, y, _short(attack) + ("" if usable else ": NOT usable here"), weight="bold", va="center")
            for colour, controls in ((_LOST, verdict.to_lose(found, attack)), (_WON, _to_win(found, attack))):
                if controls:
                    low, high = min(f.auroc[1] for f in controls), max(f.auroc[2] for f in controls)
                    low = max(0.0, min(low, high - _LEAST_BAND))
                    axes.add_patch(
                        Rectangle((low, y + 0.5), high - low, len(own), color=colour, alpha=_BANDS[colour], lw=0)
                    )
            for f in own:
                y += 1
                value, low, high = f.auroc
                colour, marker, fill = _look(f, usable)
                axes.plot((low, high), (y, y), color=colour, linewidth=1.6)
                axes.plot((value,), (y,), color=colour, marker=marker, markersize=4.5, markerfacecolor=fill)
                ticks.append((y, _short(f.model)))
            y += 1
        axes.axvline(0.5, color=INK, alpha=0.5, linewidth=0.8, linestyle="--")
        axes.set(xlim=(0, 1), ylim=(y - 0.3, -0.7), xlabel="AUROC: 0.5 = guessing, 1 = certainty")
        axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)

    return draw_curves(f"forest-{name}", (5.4, 0.85 + 0.22 * height), _words(found, listed), draw)


def forest_caption(found: Sequence[AttackFinding], most: int = MOST_ROWS) -> str:
    """Describe the plot, and say if some findings appear only in the table."""
    about = sum(f.kind == "about the run" for f in found)
    left = f" The plot shows the {most} strongest of {about} findings; the table has all." if about > most else ""
    named = list(dict.fromkeys(f.attack for f in forest_rows(found, most)))
    overlap = [attack for attack in named if _bands_overlap(found, attack)]
    touching = (
        f" Where the bands overlap ({', '.join(map(_short, overlap))}), the attack can barely tell its own controls "
        "apart, so a row between them says little."
        if overlap
        else ""
    )
    return (
        "Each row is an attack on a model, with its 95 % interval. Blue band: the attack on models that never saw the "
        "examples, where it must fail. Orange band: the attack on models that memorized them, where it must succeed. "
        "A filled orange dot reveals membership. A hollow dot whose interval is above 0.5 is undecided after "
        "correction for all attacks. A blue dot cannot be told apart from guessing here, which does not prove "
        f"safety. A gray cross proves nothing, because a control failed.{touching}{left}"
    )


def _look(f: AttackFinding, is_usable: bool) -> tuple[str, str, str]:
    """Return a finding's color, marker and fill: membership shown, above 0.5 but undecided, like guessing, or void."""
    if not is_usable:
        return _OPEN, "x", _OPEN
    if f.verdict == "above":
        return _WON, "o", _WON
    return (_UNDECIDED, "o", "none") if f.auroc[1] > 0.5 else (_LOST, "o", _LOST)


def _bands_overlap(found: Sequence[AttackFinding], attack: str) -> bool:
    """Return whether the intervals for the must-fail controls reach those for the must-succeed controls."""
    lost, won = verdict.to_lose(found, attack), _to_win(found, attack)
    return bool(lost and won) and max(f.auroc[2] for f in lost) >= min(f.auroc[1] for f in won)


def _to_win(found: Sequence[AttackFinding], attack: str) -> list[AttackFinding]:
    return [f for f in found if f.kind == "to win" and f.attack == attack]


def _words(found: Sequence[AttackFinding], listed: Sequence[AttackFinding]) -> str:
    """Return the text alternative for readers who cannot see the plot."""
    first_rows = "; ".join("{}, {}: {:.2f} [{:.2f}, {:.2f}]".format(f.attack, f.model, *f.auroc) for f in listed[:5])
    return f"Forest plot of AUROC by attack and model. {verdict.audit_verdict(found)} First rows: {first_rows}."


def _short(name: str) -> str:
    name = sanitize(name, 200)
    return name if len(name) <= _NAME else name[: _NAME - 1] + "\u2026"
