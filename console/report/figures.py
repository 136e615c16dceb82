"""Curves as inline SVG. Text and axes take the page's own colour, so they read in a light and in a dark page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

INK = "#010203"  # replaced by `currentColor`
COLOURS = ("#3a8fd9", "#e69f00", "#1fa187", "#cc79a7", "#8e7cc3", "#d55e00")  # read on white and on black
MARKERS = "osD^vP"


@dataclass(frozen=True)
class Curve:
    """One line: (x, y) points under a label. `colour` keeps a run's colour the same in every figure."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int


def svg(title: str, x_label: str, y_label: str, curves: Sequence[Curve], integer_x: bool = False) -> str:
    """The curves as an SVG element; "" when no curve has a point."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    style = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10, "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with mpl.rc_context(style):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            x, y = zip(*curve.points, strict=True)
            colour, marker = COLOURS[curve.colour % len(COLOURS)], MARKERS[curve.colour % len(MARKERS)]
            axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=curve.label)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.grid(color=INK, alpha=0.12, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if integer_x:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(curves) > 1:
            axes.legend(frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), title)


def _inline(text: str, title: str) -> str:
    """Without prolog, metadata and a fixed size, and with ids that no other figure of the page has."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'url\(#|xlink:href="#', lambda match: f"{match.group()}{prefix}-", text)
    return text.replace(INK, "currentColor").replace("<svg", '<svg role="img"', 1)
