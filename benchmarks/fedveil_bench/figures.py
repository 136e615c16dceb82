"""Draw the figures for docs/results.md from committed results, with means and 95% intervals, without running anything.

`python -m fedveil_bench.figures`, in a checkout, writes docs/pictures/results-*.png.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil_bench import folders

# Bounds of metrics, by their names in a result. Intervals are symmetric (Student's t over few seeds) and may extend
# beyond the bounds: files contain them as computed, while figures and pages show only the possible part.
_POSSIBLE = {
    re.compile(r"(\w+ )?(alignment|calibrated|LiRA|caption \d+%)(, wrong site)?|AUROC, .+|rows"): (0.0, 1.0),
    re.compile(r"local|neighbour|right(, .+)?|(qa |ood )?accuracy"): (0.0, 100.0),
}
COPIED = {"random-binary": "random_binary_accuracy.png", "system": "core_scale.png"}  # drawn by the presets themselves


@dataclass(frozen=True)
class ResultFigure:
    """The content of one figure: for each series, a row and a metric at each place.

    Attributes:
        preset: the preset whose result is drawn.
        unit: the unit of all values.
        places: names along the vertical axis.
        series: (row, metric) for each place in each series; None if the result lacks that metric.
        guess: position of the line for a random guess, or None for no line.
    """

    preset: str
    unit: str
    places: tuple[str, ...]
    series: Mapping[str, tuple[tuple[str, str] | None, ...]]
    guess: float | None = None


@dataclass(frozen=True)
class ParetoFront:
    """A tradeoff: methods by two of their metrics, each with its interval.

    Attributes:
        preset: the preset whose result is drawn.
        units: the units of the two axes.
        series: for each method (at most ten), the (row, metric) for each axis.
        guess: position of a random guess on the second axis.
        base: (row, metric) for the first axis before any training. A method that ends there has no model of its own at
            the server: it is drawn next to the base's line, hollow and without an interval on that axis.
    """

    preset: str
    units: tuple[str, str]
    series: Mapping[str, tuple[tuple[str, str], ...]]
    guess: float
    base: tuple[str, str]


@dataclass(frozen=True)
class ResultCurves:
    """A metric of the server's model by round and by bytes, for each row of a result with a `curve` of the metric.

    Attributes:
        preset: the preset whose result is drawn; if it has no curves, no figure is drawn.
        metric: the drawn metric.
        unit: unit of the metric, for the axis.
    """

    preset: str
    metric: str
    unit: str


CURVES = {
    "fedrand-curves": ResultCurves("fedrand/quality", "loss", "loss on test rows, nats a token"),
    "fedrand-curves-pictures": ResultCurves("fedrand/table1", "qa test loss", "loss on test rows, nats a token"),
}
_LORA = ["FedAvg", "FedRand", "FFA-LoRA", "FedSA-LoRA", "RoLoRA", "LA-LoRA", "FedEx-LoRA", "FLoRA", "HetLoRA"]
_LORA += ["FedProx", "SCAFFOLD"]
_MARKS = list(zip("osD^vP*XphH", [*(f"C{i}" for i in range(10)), "black"], strict=True))
FRONTS = {
    "lora": ParetoFront(
        "lora/attacks",
        ("loss on test rows, nats a token: server's model", "AUROC of members, from what a site sent"),
        {name: ((f"{name} server", "Caltech test loss"), (f"{name} client", "Caltech alignment")) for name in _LORA},
        guess=0.5,
        base=("round 0", "Caltech test loss"),
    )
}
_ATTACKS = ("caption 10%", "loss", "calibrated", "alignment")
_OF_DP_FPL = (
    "zero-shot", "PromptFL", "FedOTP without transport", "FedPGP without contrast", "DP-FPL, no noise",
    "DP-FPL, epsilon 8", "DP-FPL, epsilon 8, noise only",
)  # fmt: skip
_ALONE, _TWICE = "one client alone", tuple(f"{name}, 2 x rounds" for name in ("FedRand", "RoLoRA", "FFA-LoRA"))
_ON_TEXTS = (_ALONE, *_LORA, *_TWICE)
_OWN = {_ALONE: "loss", "FedSA-LoRA": "client_loss"}  # rows without a model at the server


def _on_texts(preset: str) -> ResultFigure:
    series = {
        "server's model": tuple(None if row in _OWN else (row, "loss") for row in _ON_TEXTS),
        "a client's own": tuple((row, _OWN[row]) if row in _OWN else None for row in _ON_TEXTS),
    }
    return ResultFigure(preset, "loss on test rows, nats a token", _ON_TEXTS, series)


_BITS = ("w = 1", "w = 2", "w = 3", "w = 4")
FIGURES = {
    "fedrand": ResultFigure(
        "fedrand/table4",
        "AUROC",
        _ATTACKS,
        {name: tuple((name, a) for a in _ATTACKS) for name in ("overfitted FedAvg", "FedAvg client", "FedRand client")}
        | {
            "round 0": (("round 0", "caption 10%"), ("round 0", "loss"), None, None)
        },  # under the calibrated attack, all rows look alike
        guess=0.5,
    ),
    **{f"lora-{texts}": _on_texts(f"lora/{texts}") for texts in ("quality", "viggo", "dart")},
    "dp-fpl": ResultFigure(
        "dp_fpl/table2",
        "per cent right",
        _OF_DP_FPL,
        {
            "own classes": tuple((row, "local") for row in _OF_DP_FPL),
            "neighbours' classes": tuple((row, "neighbour") for row in _OF_DP_FPL),
        },
    ),
    "fedqsn": ResultFigure(
        "fedqsn/table2",
        "loss, nats a token",
        (*_BITS, "public base", "public base, fine-tuned"),
        {
            "server's model": (*((f"{w} global", "loss") for w in _BITS), None, None),
            "proxy as received": (*((f"{w} proxy", "loss") for w in _BITS), None, None),
            "proxy after local training": (*((f"{w} tuned", "loss") for w in _BITS), None, None),
            "base": (*(None for _ in _BITS), ("public base", "loss"), ("public base, fine-tuned", "loss")),
        },
    ),
}


def find_metric_bounds(metric: str) -> tuple[float, float]:
    """Return the lowest and the highest value that a metric can have."""
    return next((bounds for name, bounds in _POSSIBLE.items() if name.fullmatch(metric)), (-math.inf, math.inf))


def _file(preset: str) -> Path:
    return folders.require_results() / f"{preset.replace('/', '_')}.json"


def _metrics(preset: str) -> dict[str, Any]:
    return {row["name"]: row["metrics"] for row in json.loads(_file(preset).read_text())["rows"]}


def read_curves(of: ResultCurves) -> dict[str, list[tuple[int, float, dict[str, float]]]]:
    """Return, by row, the points (round, MB up and down so far, metric); empty without a result or curves."""
    if not _file(of.preset).is_file():
        return {}
    found = {
        row["name"].removesuffix(" server"): [
            (at["round"], (at["upload_bytes"] + at["download_bytes"]) / 1e6, at["metrics"][of.metric])
            for at in row.get("curve", [])
            if of.metric in at["metrics"]
        ]
        for row in json.loads(_file(of.preset).read_text())["rows"]
    }
    return {name: curve for name, curve in found.items() if curve}


def read_intervals(figure: ResultFigure | ParetoFront) -> dict[str, list[dict[str, float] | None]]:
    """Return the mean, low and high of each series at each place. Raises KeyError if the result lacks one."""
    by_name = _metrics(figure.preset)

    def within(row: str, metric: str) -> dict[str, float]:
        (least, most), of = find_metric_bounds(metric), by_name[row][metric]
        return {**of, "low": max(of["low"], least), "high": min(of["high"], most)}

    return {name: [within(*at) if at else None for at in ats] for name, ats in figure.series.items()}


def base_of(front: ParetoFront) -> float:
    """Return the first axis's value before any training."""
    row, metric = front.base
    return float(_metrics(front.preset)[row][metric]["mean"])


def compute_digest(figure: ResultFigure | ParetoFront | ResultCurves) -> str:
    """Return a digest of the content. The image file contains it, so that a test can detect an outdated figure."""
    if isinstance(figure, ResultCurves):
        return hashlib.sha256(json.dumps([figure.metric, figure.unit, read_curves(figure)]).encode()).hexdigest()
    words = [figure.unit, figure.places] if isinstance(figure, ResultFigure) else [figure.units, base_of(figure)]
    return hashlib.sha256(json.dumps([*words, read_intervals(figure)]).encode()).hexdigest()


def draw_figure(figure: ResultFigure, file: Path) -> None:
    """Write the figure as a PNG, with the first place at the top."""
    from matplotlib.figure import Figure as Canvas

    drawn = Canvas(figsize=(9, 1.2 + 0.55 * len(figure.places)), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    series = read_intervals(figure)
    for number, (name, points) in enumerate(series.items()):
        off = 0.16 * (number - (len(series) - 1) / 2)
        at = [(place + off, point) for place, point in enumerate(points) if point]
        means = [point["mean"] for _, point in at]
        sides = [[m - p["low"] for m, (_, p) in zip(means, at, strict=True)]]
        sides.append([p["high"] - m for m, (_, p) in zip(means, at, strict=True)])
        axes.errorbar(means, [y for y, _ in at], xerr=sides, fmt="o", markersize=4, capsize=2, label=name)
    if figure.guess is not None:
        axes.axvline(figure.guess, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(figure.places)), figure.places)
    axes.invert_yaxis()
    axes.set_xlabel(f"{figure.unit} ({figure.preset}, 95 % intervals)")
    axes.grid(axis="x", alpha=0.3)
    drawn.legend(loc="outside right upper", fontsize=8)
    drawn.savefig(file, metadata={"Software": None, "Description": compute_digest(figure)})


def draw_front(of: ParetoFront) -> Any:
    """Return a canvas with the front; lower left is better."""
    from matplotlib.figure import Figure as Canvas

    drawn = Canvas(figsize=(9, 5.2), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    base = base_of(of)
    series = read_intervals(of)
    for (name, points), (mark, colour) in zip(series.items(), _MARKS[: len(series)], strict=True):
        x, y = (point for point in points if point)
        sides = [[[p["mean"] - p["low"]], [p["high"] - p["mean"]]] for p in (x, y)]
        is_base = x["mean"] == base
        axes.errorbar(
            [x["mean"]],
            [y["mean"]],
            xerr=None if is_base else sides[0],
            yerr=sides[1],
            fmt=mark,
            color=colour,
            markersize=7,
            markerfacecolor="none" if is_base else None,
            capsize=2,
            lw=0.9,
            label=f"{name}: no model\nat the server" if is_base else name,
        )
    axes.axvline(base, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate("the base, untouched", (base, 0.02), xycoords=("data", "axes fraction"), ha="right", fontsize=8)
    axes.axhline(of.guess, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"{of.units[0]} ({of.preset}, 95 % intervals)")
    axes.set_ylabel(of.units[1])
    axes.grid(alpha=0.3)
    drawn.legend(loc="outside right upper", fontsize=8)
    return drawn


def by_round_and_bytes(of: ResultCurves) -> Any:
    """Return a canvas with the curves: by round on the left, by bytes on the right."""
    from matplotlib.figure import Figure as Canvas

    drawn = Canvas(figsize=(10, 4.2), dpi=110, layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for panel, place, label in zip(panels, (0, 1), ("rounds", "MB up and down, all sites"), strict=True):
        for name, curve in read_curves(of).items():
            at = [point[place] for point in curve]
            panel.plot(at, [point["mean"] for *_, point in curve], marker=".", label=name)
            panel.fill_between(at, *([point[end] for *_, point in curve] for end in ("low", "high")), alpha=0.12)
        panel.set_xlabel(f"{label} ({of.preset}, 95 % intervals)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(of.unit)
    panels[0].legend(fontsize=8)
    return drawn


def main() -> None:
    """Draw all figures, and copy those drawn by presets. Raises ConfigError outside a checkout."""
    pictures = folders.require_results().parents[1] / "docs" / "pictures"
    for name, figure in FIGURES.items():
        draw_figure(figure, pictures / f"results-{name}.png")
    for name, of in FRONTS.items():
        draw_front(of).savefig(
            pictures / f"results-{name}.png", metadata={"Software": None, "Description": compute_digest(of)}
        )
    for name, curves in CURVES.items():
        if read_curves(curves):
            stamp = {"Software": None, "Description": compute_digest(curves)}
            by_round_and_bytes(curves).savefig(pictures / f"results-{name}.png", metadata=stamp)
    for name, file in COPIED.items():
        shutil.copyfile(folders.require_results() / file, pictures / f"results-{name}.png")


if __name__ == "__main__":
    main()
