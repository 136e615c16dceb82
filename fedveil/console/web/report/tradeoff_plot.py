"""Draw the runs' tradeoff (tradeoff.py): a dot per site, the worst site's figure, test loss, and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedveil.attacks.audit import delong
from fedveil.console.web.report.line_chart import COLOURS, INK, draw_curves
from fedveil.console.web.report.tradeoff import TradeoffRun, chance_of_runs

MOST_ARMS = 8
_DOT, _BAND, _LOSS, _SENT = COLOURS[5], 0.16, COLOURS[2], COLOURS[4]


def tradeoff_svg(arms: Sequence[TradeoffRun], name: str = "trade") -> str:
    """Return the picture for the first MOST_ARMS arms as an SVG element; "" for fewer than two."""
    arms = arms[:MOST_ARMS]
    if len(arms) < 2:
        return ""

    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        panels = figure.subplots(1, 3, sharey=True, width_ratios=(1.9, 0.8, 0.7))
        figure.get_layout_engine().set(wspace=0.06)  # otherwise the ends of neighboring axes touch
        _attacker(panels[0], arms)
        _quality(panels[1], arms)
        _bytes(panels[2], arms)
        for axes in panels:
            axes.set_ylim(len(arms) - 0.5, -0.7)
            axes.set_yticks([])
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.title.set_fontweight("bold")
        for y, a in enumerate(arms):
            panels[0].text(0.0, y - 0.36, a.name, transform=panels[0].get_yaxis_transform(), weight="bold", va="center")
        _legend(figure, arms)

    return draw_curves(name, (6.2, 1.7 + 0.72 * len(arms)), f"What an attacker learns. {_told(arms)}", draw)


def _legend(figure: Any, arms: Sequence[TradeoffRun]) -> None:
    """Draw the legend, so that the picture can stand on its own."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = [
        Line2D([], [], marker="o", markersize=8, color="none", markerfacecolor=_DOT, markeredgewidth=0,
               label="worst site"),
        Line2D([], [], marker="o", color="none", markerfacecolor="none", markeredgecolor=_DOT, label="other sites"),
        Line2D([], [], color=INK, linewidth=2, label="mean, 99 %"),
        Patch(color=INK, alpha=_BAND, lw=0, label="worst site by chance, in 19 of 20"),
    ]  # fmt: skip
    if any(s.is_void for a in arms for s in a.sites):
        marks.append(Line2D([], [], marker="x", color="none", markeredgecolor=INK, label="site not judged"))
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5,
                  columnspacing=1.2, handletextpad=0.5)  # fmt: skip


def _told(arms: Sequence[TradeoffRun]) -> str:
    """Return the text alternative for readers who cannot see the picture."""
    asked = "How often an attacker picks the training example from a pair at the worst site (a coin toss: 50): "
    return asked + "; ".join(
        f"{a.name} {a.words}{_mean_words(a)}, test loss {'not scored' if a.after is None else f'{a.after:.2f}'}, "
        f"{a.sent / 1e6:.2f} MB sent"
        for a in arms
    )


def _mean_words(a: TradeoffRun) -> str:
    return f" (mean over the sites {100 * a.mean.value:.0f})" if a.mean and a.worst else ""


def _attacker(axes: Any, arms: Sequence[TradeoffRun]) -> None:
    axes.axvspan(50, 100 * chance_of_runs(arms), color=INK, alpha=_BAND, lw=0)
    axes.axvline(50, color=INK, alpha=0.6, linewidth=0.9)
    lowest = 50.0
    for y, a in enumerate(arms):
        if a.worst is None:
            axes.text(75, y, a.words, ha="center", va="center", style="italic")
            continue
        if a.mean and a.is_judged_whole:
            low, high = (100 * x for x in a.mean.interval(delong.ALPHA, 0.0))
            axes.plot((low, high), (y, y), color=INK, linewidth=2, solid_capstyle="butt", zorder=1)
            lowest = min(lowest, low)
        for site in a.sites:
            value = 100 * site.auroc
            lowest = min(lowest, value)
            if site.is_void:
                axes.plot((value,), (y,), "x", markersize=6, color=INK)
            elif site is not a.worst:
                axes.plot((value,), (y,), "o", markersize=5.5, markerfacecolor="none", markeredgecolor=_DOT)
        axes.plot((100 * a.worst.auroc,), (y,), "o", markersize=8, color=_DOT, markeredgewidth=0)
        axes.annotate(a.words, (100 * a.worst.auroc, y), (0, 11), textcoords="offset points", ha="center", va="center",
                      weight="bold")  # fmt: skip
    axes.set(title="Attacker is right, times in 100", xlim=(min(40.0, lowest - 2), 107))
    axes.set_xticks([t for t in range(0, 101, 10) if t >= min(40.0, lowest - 2)])
    axes.set_xlabel("\u2190 better (50: coin toss)")


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
        axes.plot((a.after,), (y,), "o", markersize=8, color=_LOSS, markeredgewidth=0)
        axes.annotate(f"{a.after:.2f}", (a.after, y), (0, -13), textcoords="offset points", ha="center", va="center")
    axes.margins(x=0.2)
    axes.xaxis.set_inverted(True)
    axes.set(title="Test loss", xlabel="better \u2192")


def _bytes(axes: Any, arms: Sequence[TradeoffRun]) -> None:
    most = max(a.sent for a in arms) / 1e6 or 1.0
    for y, a in enumerate(arms):
        axes.barh(y, a.sent / 1e6, height=0.22, color=_SENT)
        axes.annotate(f"{a.sent / 1e6:.2f}", (0, y), (2, -13), textcoords="offset points", ha="left", va="center")
    axes.set(title="MB sent", xlim=(0, 1.05 * most), xlabel="\u2190 better")


def tradeoff_caption(arms: Sequence[TradeoffRun]) -> str:
    """Return the picture's caption."""
    first = next((a for a in arms if a.attack), None)
    quality = "Test loss, on examples that no site has: open circle untrained, filled circle after the last round."
    if first is None:
        return f"{quality} No attack is shown."
    return (
        "An attacker who reads what the server receives is shown two examples, one that a site trained on and one that "
        f"no site has, and picks one by {first.attack}. Each dot is a site, the filled dot is the worst site, and the "
        "bar is the mean over the sites with its 99 % interval. The gray band is what chance alone gives the worst "
        "site in 19 of 20 demos. "
        f"{quality} There is only one run each, so do not cite these results."
    )
