"""Draws the figures of docs/results.md from committed results: mean and 95 % interval, no run.

`python -m fedveil.benchmarks.figures`, in a checkout, writes docs/pictures/results-*.png.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import places

COPIED = {"random-binary": "random_binary_accuracy.png", "system": "core_scale.png"}  # which presets draw themselves


@dataclass(frozen=True)
class Figure:
    """What one picture shows: for each series a row and a metric at each place.

    Attributes:
        preset: whose result is drawn.
        unit: of every figure in it.
        places: names down the axis.
        series: of each series, (row, metric) for each place; None where the result has none.
        guess: where a line marks that nothing was learned or told; None = no line.
    """

    preset: str
    unit: str
    places: tuple[str, ...]
    series: Mapping[str, tuple[tuple[str, str] | None, ...]]
    guess: float | None = None


@dataclass(frozen=True)
class Front:
    """Methods between two figures of theirs, each with its interval: what is bought with what.

    Attributes:
        preset: whose result is drawn.
        units: of the two axes.
        series: of each method, at most ten, (row, metric) for each axis.
        guess: on the second axis, where nothing is told.
    """

    preset: str
    units: tuple[str, str]
    series: Mapping[str, tuple[tuple[str, str], ...]]
    guess: float


_LORA = ("FedAvg", "FedRand", "FFA-LoRA", "FedSA-LoRA", "RoLoRA", "LA-LoRA", "FedEx-LoRA", "FLoRA")
FRONTS = {
    "lora": Front(
        "lora/attacks",
        ("loss on test rows, nats a token: server's model", "AUROC of members, from what a site sent"),
        {name: ((f"{name} server", "Caltech test loss"), (f"{name} client", "Caltech alignment")) for name in _LORA},
        guess=0.5,
    )
}
_ATTACKS = ("caption 10%", "loss", "calibrated", "alignment")
_OF_DP_FPL = (
    "zero-shot", "PromptFL", "FedOTP without transport", "FedPGP without contrast", "DP-FPL, no noise",
    "DP-FPL, epsilon 8", "DP-FPL, epsilon 8, noise only",
)  # fmt: skip
_BITS = ("w = 1", "w = 2", "w = 3", "w = 4")
FIGURES = {
    "fedrand": Figure(
        "fedrand/table4",
        "AUROC",
        _ATTACKS,
        {name: tuple((name, a) for a in _ATTACKS) for name in ("overfitted FedAvg", "FedAvg client", "FedRand client")}
        | {
            "round 0": (("round 0", "caption 10%"), ("round 0", "loss"), None, None)
        },  # calibrated, all its rows are alike
        guess=0.5,
    ),
    "dp-fpl": Figure(
        "dp_fpl/table2",
        "per cent right",
        _OF_DP_FPL,
        {
            "own classes": tuple((row, "local") for row in _OF_DP_FPL),
            "neighbours' classes": tuple((row, "neighbour") for row in _OF_DP_FPL),
        },
    ),
    "fedqsn": Figure(
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


def found(figure: Figure | Front) -> dict[str, list[dict[str, float] | None]]:
    """Mean, low and high of each series at each place. Raises KeyError where the result lacks one."""
    file = places.folder("benchmarks/results") / f"{figure.preset.replace('/', '_')}.json"
    result: dict[str, Any] = json.loads(file.read_text())
    by_name = {row["name"]: row["metrics"] for row in result["rows"]}
    return {name: [by_name[at[0]][at[1]] if at else None for at in ats] for name, ats in figure.series.items()}


def digest(figure: Figure | Front) -> str:
    """Of what is drawn. The picture carries it, so that a test sees one that is older than its result."""
    words = [figure.unit, figure.places] if isinstance(figure, Figure) else [figure.units]
    return hashlib.sha256(json.dumps([*words, found(figure)]).encode()).hexdigest()


def draw(figure: Figure, file: Path) -> None:
    """Writes the figure as a PNG, the first place at the top."""
    from matplotlib.figure import Figure as Canvas

    drawn = Canvas(figsize=(9, 1.2 + 0.55 * len(figure.places)), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    series = found(figure)
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
    axes.set_xlabel(f"{figure.unit} ({figure.preset}, 95 % intervals as the file has them)")
    axes.grid(axis="x", alpha=0.3)
    drawn.legend(loc="outside right upper", fontsize=8)
    drawn.savefig(file, metadata={"Software": None, "Description": digest(figure)})


def draw_front(front: Front, file: Path) -> None:
    """Writes the front as a PNG: better is left and down."""
    from matplotlib.figure import Figure as Canvas

    drawn = Canvas(figsize=(9, 5.2), dpi=110, layout="constrained")
    axes = drawn.add_subplot()
    for (name, points), mark in zip(found(front).items(), "osD^vP*Xph", strict=False):
        x, y = (point for point in points if point)
        sides = [[[p["mean"] - p["low"]], [p["high"] - p["mean"]]] for p in (x, y)]
        axes.errorbar(
            [x["mean"]],
            [y["mean"]],
            xerr=sides[0],
            yerr=sides[1],
            fmt=mark,
            markersize=7,
            capsize=2,
            lw=0.9,
            label=name,
        )
    axes.axhline(front.guess, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"{front.units[0]} ({front.preset}, 95 % intervals)")
    axes.set_ylabel(front.units[1])
    axes.grid(alpha=0.3)
    drawn.legend(loc="outside right upper", fontsize=8)
    drawn.savefig(file, metadata={"Software": None, "Description": digest(front)})


def main() -> None:
    """Draws all of them, and copies those that presets draw. Raises ConfigError outside a checkout."""
    pictures = places.folder("docs/pictures")
    for name, figure in FIGURES.items():
        draw(figure, pictures / f"results-{name}.png")
    for name, front in FRONTS.items():
        draw_front(front, pictures / f"results-{name}.png")
    for name, file in COPIED.items():
        shutil.copyfile(places.folder("benchmarks/results") / file, pictures / f"results-{name}.png")


if __name__ == "__main__":
    main()
