"""Draw curves as inline SVG. Text and axes use the page's color, so they are readable on light and dark pages.

A figure uses attributes instead of inline styles, which a page may forbid.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from fedveil.sanitize import sanitize

INK = "#010203"  # replaced by `currentColor`
COLOURS = ("#3a8fd9", "#e69f00", "#1fa187", "#cc79a7", "#8e7cc3", "#d55e00")  # readable on white and on black
MARKERS = "osD^vP"
_OF_RUNS = (2, 3, 4, 1, 0, 5)  # other figures use blue and orange for attack results
_DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)), (0, (1, 1)), (0, (9, 3)))  # shows overlaps
MOST_CURVES = len(COLOURS)  # per figure, because one more would look like the first


@dataclass(frozen=True)
class ChartCurve:
    """A line: (x, y) points with a label. `colour` gives a run the same look in all figures."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int


def curves_svg(title: str, x_label: str, y_label: str, curves: Sequence[ChartCurve], integer_x: bool = False) -> str:
    """Return the first MOST_CURVES non-empty curves as an SVG element; "" if there are none."""
    from matplotlib.ticker import MaxNLocator

    every = [curve for curve in curves if curve.points]
    if not every:
        return ""
    curves = every[:MOST_CURVES]
    ends = "; ".join(map(_words, curves))
    left = f" (first {len(curves)} of {len(every)})" if len(every) > len(curves) else ""
    thin = integer_x and any(b[0] - a[0] > 1 for curve in curves for a, b in pairwise(curve.points))
    if thin:
        x_label, ends = f"{x_label} (dotted: no value between)", f"{ends}; no value for some {x_label}"

    def draw(axes: Any) -> None:
        for curve in curves:
            _line(axes, curve, thin)
        axes.set(title=title + left, xlabel=x_label, ylabel=y_label)
        axes.grid(color=INK, alpha=0.12, linewidth=0.8)
        if integer_x:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(curves) > 1:
            axes.legend(frameon=False)

    return draw_curves(title, (4.6, 3.1), f"{title}. {y_label} over {x_label}: {ends}.", draw)


def _line(axes: Any, curve: ChartCurve, thin: bool) -> None:
    """Draw a curve's points and the line between them; if `thin`, dotted across gaps of more than 1."""
    look = curve.colour % MOST_CURVES
    style = {"color": COLOURS[_OF_RUNS[look]], "marker": MARKERS[look], "markersize": 4.5}
    x, y = zip(*curve.points, strict=True)
    if not thin:
        axes.plot(x, y, linewidth=1.8, linestyle=_DASHES[look], label=sanitize(curve.label, 80), **style)
        return
    axes.plot(x, y, linestyle="none", label=sanitize(curve.label, 80), **style)
    for (x0, y0), (x1, y1) in pairwise(curve.points):
        is_gap = x1 - x0 > 1
        dashes = (0, (1, 3)) if is_gap else _DASHES[look]
        axes.plot((x0, x1), (y0, y1), color=style["color"], linewidth=1.2 if is_gap else 1.8, linestyle=dashes)


def _words(curve: ChartCurve) -> str:
    """Return the text alternative for a curve."""
    (first, start), (last, end) = curve.points[0], curve.points[-1]
    return f"{sanitize(curve.label, 80)} from {start:.4g} at {first:.4g} to {end:.4g} at {last:.4g}"


def draw_curves(name: str, size: tuple[float, float], words: str, draw: Callable[[Any], None]) -> str:
    """Draw on empty axes with `draw` and return the figure as an SVG element.

    Args:
        name: the figure's name, unique within its page.
        size: width and height in inches (72 points each).
        words: the text alternative for readers who cannot see the figure.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    with mpl.rc_context({**style, "text.parse_math": False}):  # labels are names from other users
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), name, words)


def _inline(text: str, name: str, words: str) -> str:
    """Return the SVG without prolog, metadata and fixed size, and with IDs that are unique within the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    prefix = re.sub(r"\W+", "-", name.lower())
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'url\(#|xlink:href="#', lambda match: f"{match.group()}{prefix}-", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _attributes, text).replace(INK, "currentColor")
    about = f'role="img" aria-label="{escape(words)}" stroke-linejoin="round" stroke-linecap="butt"'
    return text.replace("<svg", f"<svg {about}", 1)


def _attributes(style: re.Match[str]) -> str:
    """Convert a style to attributes of its element, without the font, so that the page's own font applies."""
    pairs = (pair.partition(":") for pair in style[1].split(";"))
    return "".join(
        f' {name.strip()}="{value.strip()}"' for name, _, value in pairs if name.strip() not in ("", "font-family")
    )
