"""Draw the trade-off of runs (tradeoff.py): quality, attacker's success, and bytes, with a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.console.web.report.line_chart import COLOURS, INK, draw_curves
from fedveil.console.web.report.tradeoff import TradeoffRun

MOST_ARMS = 8
_BLUE, _ORANGE = COLOURS[0], COLOURS[5]
_BAND, _HEART = 0.2, 0.6  # opacity of the bands; the second is thin


def tradeoff_svg(arms: Sequence[TradeoffRun], name: str = "trade") -> str:
    """Return the picture of the first MOST_ARMS arms as an SVG element; "" for fewer than two."""
    arms = arms[:MOST_ARMS]
    if len(arms) < 2:
        return ""

    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1.25, 0.8))
        figure.get_layout_engine().set(wspace=0.09)  # otherwise the ends of neighboring axes touch
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

        _legend(figure, bool(_in_band(arms)))

    return draw_curves(name, (5.6, 1.75 + 0.72 * len(arms)), f"Benefit and cost of withholding. {_told(arms)}", draw)


def _legend(figure: Any, inside: bool) -> None:
    """Draw the legend, so that the picture is clear on its own. `inside`: whether any run is in `_in_band`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = [
        Line2D([], [], marker="o", color="none", markerfacecolor="none", markeredgecolor=INK, label="untrained"),
        Line2D([], [], marker="o", markersize=8, color="none", markerfacecolor=COLOURS[2], markeredgewidth=0,
               label="trained"),
        Line2D([], [], marker="o", color=_ORANGE, label="above guessing; bar: 95 %"),
        Line2D([], [], marker="o", color=_BLUE, label="not above guessing"),
        Line2D([], [], marker="D", markersize=5, color="none", markerfacecolor=_ORANGE, markeredgewidth=0,
               label="worst site"),
        Patch(color=_BLUE, alpha=_BAND, lw=0, label="examples never seen"),
        Patch(color=_ORANGE, alpha=_HEART, lw=0, label="memorized examples"),
    ]  # fmt: skip
    if inside:
        of = Line2D([], [], marker="o", color=_ORANGE, linestyle=":", fillstyle="none", label="above, within the band")
        marks.append(of)
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)


def _told(arms: Sequence[TradeoffRun]) -> str:
    """Return the picture's text alternative for readers who cannot see it."""
    return "; ".join(
        f"{a.name}: test loss {'not scored' if a.after is None else f'{a.after:.3f}'}, an attacker picks the trained "
        f"example of a pair: {a.words} (a coin: 50 %), {a.sent / 1e6:.2f} MB sent"
        for a in arms
    )


def _quality(axes: Any, arms: Sequence[TradeoffRun]) -> None:
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
        axes.annotate(
            f"loss {a.after:.2f}", (a.after, y), (0, -13), textcoords="offset points", ha="center", va="center"
        )
    axes.margins(x=0.15)
    axes.xaxis.set_inverted(True)
    axes.set(title="Quality", xlabel="test loss, better \u2192")


def _attacker(axes: Any, arms: Sequence[TradeoffRun]) -> None:
    measured_arms = [a for a in arms if a.told]
    if measured_arms:
        low, high = _never_seen(measured_arms)
        axes.axvspan(100 * low, 100 * high, color=_BLUE, alpha=_BAND, lw=0)
        low, high = min(a.won[0] for a in measured_arms), max(a.won[1] for a in measured_arms)
        axes.axvspan(100 * min(low, 0.985), 100 * high, color=_ORANGE, alpha=_HEART, lw=0)
    axes.axvline(50, color=INK, alpha=0.5, linewidth=0.8, linestyle="--")
    for y, a in enumerate(arms):
        if a.told is None:
            axes.text(66, y, a.words, ha="center", va="center", style="italic")
            continue
        value, low, high = (100 * x for x in a.auroc)
        colour = _ORANGE if a.told.verdict == "above" else _BLUE
        is_open = a in _in_band(arms)
        axes.plot((low, high), (y, y), color=colour, linewidth=2, linestyle=":" if is_open else "-")
        axes.plot((value,), (y,), "o", markersize=8, color=colour, fillstyle="none" if is_open else "full")
        axes.annotate(a.words, (value, y), (0, -13), textcoords="offset points", ha="center", va="center")
        if a.over_sites():
            axes.plot((100 * a.told.auroc[0],), (y,), "D", markersize=5, color=colour)
    axes.set(title="Revealed to an attacker", xlim=(32, 101), xlabel="% right, \u2190 better (50: coin)")


def _never_seen(told: Sequence[TradeoffRun]) -> tuple[float, float]:
    """Return the band, over all arms, of the control on which the attack must fail."""
    return min(a.lost[0] for a in told), max(a.lost[1] for a in told)


def _in_band(arms: Sequence[TradeoffRun]) -> list[TradeoffRun]:
    """Return arms that show membership, but with a value no higher than on the control without membership."""
    measured_arms = [a for a in arms if a.told]
    return [
        a for a in measured_arms if a.told and a.told.verdict == "above" and a.auroc[0] <= _never_seen(measured_arms)[1]
    ]


def _bytes(axes: Any, arms: Sequence[TradeoffRun]) -> None:
    most = max(a.sent for a in arms) / 1e6 or 1.0
    for y, a in enumerate(arms):
        axes.barh(y, a.sent / 1e6, height=0.22, color=COLOURS[4])
        axes.annotate(f"{a.sent / 1e6:.2f} MB", (0, y), (2, -13), textcoords="offset points", ha="left", va="center")
    axes.set(title="Sent by sites", xlim=(0, 1.05 * most), xlabel="MB, \u2190 better")


def tradeoff_caption(arms: Sequence[TradeoffRun]) -> str:
    """Describe the picture in words."""
    first = next((a for a in arms if a.told), None)
    if first is None or first.told is None:
        return "Quality: open circle untrained, full circle after the last round. No attack is shown."
    inside = ", ".join(a.name for a in _in_band(arms[:MOST_ARMS]))
    weak = (
        f" An open point's mean ({inside}) is within the blue band: the attack scores as high on models that never "
        "saw the examples."
    )
    which = "the mean over the sites" if first.over_sites() else "its strongest finding"
    return (
        "Quality: open circle untrained, full circle after the last round, on examples that no site has. An attacker "
        "who reads what the server receives is shown an example that a site trained on and one that it did not "
        f"({first.told.attack}, {which}, 95 %). A diamond is the worst site, which a mean hides. Blue band: the same "
        "attack on models that never saw the examples, the widest of all runs. Orange band: on memorized examples. An "
        "orange point shows membership; a blue one is not distinguishable from guessing, which does not prove safety."
        f"{weak if inside else ''} One run each: do not cite these results."
    )
