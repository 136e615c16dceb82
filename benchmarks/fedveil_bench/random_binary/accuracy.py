"""Measure a ViT's accuracy by epoch, with methods that withhold gradient entries, and how often entries move.

| base | the model starts | the images |
|---|---|---|
| scratch | from random weights | unchanged |
| pre-trained | from weights trained on a public part, which no client has, or from a named folder; with a new random
  head | unchanged |
| position | from random weights, without position embeddings | faint, with a square whose position is the class. With
  fixed position embeddings, the model cannot see the order of patches, so this is the control that must fail |

| metric | meaning |
|---|---|
| accuracy | percent of the test images, for the server's model after the last epoch; `curve` has every epoch |
| entries moved | mean share of epochs in which a weight entry changed |
| expected | the share according to Eq. 13, corrected: 1 - R^N |
| count distance | total variation between how often entries moved (`counts`) and Binomial(epochs, 1 - R^N); for locked
  masks, between `counts` and all or nothing |

Intervals are 95%: for accuracy, over test images and seeds (see `resampling`); for all other metrics, over seeds.

The runner splits work by base, method and seed into pieces (federation.py). Pieces already in the pieces file are
not repeated, and several processes can share one file. Bases follow one another, and all methods run for one seed
before the next seed. If `--minutes` ended the run early, the table says how many training runs it has; two methods are
then compared on the seeds that both have.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fedveil.attacks.statistics import confidence_interval
from fedveil_bench.common import data, resampling, resumable_rows, verdicts
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.common.verdicts import ClaimSentence
from fedveil_bench.random_binary import federation, figures
from fedveil_bench.random_binary.vit import from_scratch
from fedveil_bench.runner import BenchOptions, BenchOutcome

IN_PIECES = True  # so that --minutes is allowed
_TEST = 6  # names the random draws
_OF_A_ROW = ("data", "classes", "clients", "epochs", "exchanges", "test_rows", "fields", "model", "config")
Piece = Mapping[str, Any]
Settings = Mapping[str, Any]


def run_benchmark(settings: dict[str, Any], options: BenchOptions) -> BenchOutcome:
    """Measure a row for each base and method over the finished seeds; return the outcome with its figures."""
    asked = list(_asked(settings, options))
    with tempfile.TemporaryDirectory() as folder:
        vit = from_scratch(settings["model"], settings["classes"], Path(folder) / "vit")
        # The methods for a base and a seed run one after another, so caching a single starting point is enough.
        begun = lru_cache(1)(lambda base, seed: federation.prepare_start(settings, vit, base, seed, options))

        def measure(base: str, method: str, seed: int) -> dict[str, Any]:
            chosen = settings["methods"][method]
            found = federation.run_row(settings, vit, chosen, begun(base, seed), seed, options)
            options.say(f"{base}, {method}, seed {seed}: {' '.join(f'{a:.1f}' for a in found['curve'])}")
            return {"base": base, "method": method, "seed": seed, **found}

        measures: dict[str, Callable[[], dict[str, Any]]] = {
            _name(settings, *which): partial(measure, *which) for which in asked
        }
        found = resumable_rows.measure_rows(options.pieces, measures, options.minutes)
    return build_outcome(found, settings, len(asked))


def list_requirements(settings: Settings) -> list[data.DataRequirement]:
    """Return the requirements: the images, and the weight folders that the bases name."""
    named = [of["task.model"] for of in settings["bases"].values() if "task.model" in of]
    return [data.DataRequirement(settings["data"], ("train", "test")), *map(data.DataRequirement, named)]


def _asked(settings: Settings, options: BenchOptions) -> Iterator[tuple[str, str, int]]:
    """Yield each base, method and seed."""
    for base, of in settings["bases"].items():
        for seed in range(options.seeds or of["seeds"]):
            yield from ((base, method, seed) for method in of["methods"])


def _name(settings: Settings, base: str, method: str, seed: int) -> str:
    """Return a piece's name: base, method, seed, and a digest of every setting that affects its figures."""
    of_base = {key: value for key, value in settings["bases"][base].items() if key not in ("seeds", "methods")}
    parts = [{key: settings[key] for key in _OF_A_ROW}, of_base, settings["methods"][method]]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{base}, {method}, seed {seed}, settings {digest}"


def build_outcome(found: Sequence[Piece], settings: Settings, asked: int) -> BenchOutcome:
    """Build the table from these pieces. `asked`: the number of pieces in the complete table."""
    groups: dict[tuple[str, str], dict[int, Piece]] = {}
    for piece in found:
        groups.setdefault((piece["base"], piece["method"]), {})[piece["seed"]] = piece
    laws = {method: _law(settings, method) for method in settings["methods"] if "rate" in settings["methods"][method]}
    rows = [_row(list(of.values()), settings, laws.get(method)) for (_, method), of in groups.items()]
    commits = ", ".join(f"{n} of {name}" for name, n in Counter(piece["commit"] for piece in found).items()) or "none"
    said = [
        *_claims(groups, settings),
        *_counted(groups, laws),
        f"Trainings: {len(found)} of {asked}; by commit: {commits}.",
    ]
    steps = settings["epochs"] * settings["exchanges"]
    done = f"this run: {settings['clients']} clients, {steps} steps of the server in {settings['epochs']} epochs"
    return BenchOutcome(rows, said, [done], {"png": figures.draw_figure(rows, laws)} if rows else {})


def _row(of: Sequence[Piece], settings: Settings, law: Sequence[float] | None) -> dict[str, Any]:
    metrics = {"accuracy": resampling.compute_interval(_accuracy(of, settings))}
    if law is not None:
        epochs = settings["epochs"]
        moved = [sum(k * share for k, share in enumerate(piece["counts"])) / epochs for piece in of]
        expected = sum(k * share for k, share in enumerate(law)) / epochs
        metrics["entries moved"] = confidence_interval(moved)
        metrics["expected"] = {"mean": expected, "low": expected, "high": expected, "n": 1}
        metrics["count distance"] = confidence_interval([_distance(piece["counts"], law) for piece in of])
    base, method = of[0]["base"], of[0]["method"]
    return {
        "name": f"{base}, {method}", "base": base, "method": method, "metrics": metrics,
        "curve": [confidence_interval(points) for points in zip(*(piece["curve"] for piece in of), strict=True)],
        "counts": [statistics.fmean(shares) for shares in zip(*(piece["counts"] for piece in of), strict=True)],
        "upload_bytes": round(statistics.fmean(piece["upload_bytes"] for piece in of)),
        "seconds": round(statistics.fmean(piece["seconds"] for piece in of), 1),
    }  # fmt: skip


def _accuracy(of: Sequence[Piece], settings: Settings) -> ResampledMetric:
    right = [federation.unpack_correct(piece["right"], settings["test_rows"]) for piece in of]
    return resampling.over_seeds([resampling.resample_mean(each, _TEST) for each in right])


def _claims(groups: Mapping[tuple[str, str], Mapping[int, Piece]], settings: Settings) -> list[str]:
    found: list[tuple[str, ClaimSentence]] = []
    seeds = 0
    for claim in settings["claims"]:
        for base in claim["bases"]:
            mine, other = (groups.get((base, claim[side]), {}) for side in ("row", "than"))
            if not (both := sorted(set(mine) & set(other))):
                continue
            seeds = max(seeds, len(both))
            d = resampling.subtract_metrics(
                *(_accuracy([side[seed] for seed in both], settings) for side in (mine, other))
            )
            shown = resampling.format_interval(resampling.compute_interval(d), "+.1f")
            text = (
                f"Accuracy of {base}, {claim['row']} less that of {claim['than']}: {shown} points, seeds: {len(both)}; "
            )
            text += "a control, which must have " if claim.get("control") else "the paper has "
            found.append((text + verdicts.claim_in_words(claim), verdicts.judge_claim(d, claim)))
    return verdicts.list_verdicts(found, seeds)


def _law(settings: Settings, method: str) -> list[float]:
    """Return the expected share of entries for each number of epochs in which they move (Eq. 13, corrected)."""
    chosen, epochs = settings["methods"][method], settings["epochs"]
    missed = chosen["rate"] ** settings["clients"]
    if "never" in chosen["fields"]:
        return [missed, *[0.0] * (epochs - 1), 1 - missed]
    return [math.comb(epochs, k) * (1 - missed) ** k * missed ** (epochs - k) for k in range(epochs + 1)]


def _distance(counts: Sequence[float], law: Sequence[float]) -> float:
    """Return the total variation distance: 0 for equal distributions, 1 for disjoint ones."""
    return sum(abs(a - b) for a, b in zip(counts, law, strict=True)) / 2


def _counted(groups: Mapping[tuple[str, str], Mapping[int, Piece]], laws: Mapping[str, Sequence[float]]) -> list[str]:
    """Describe how far the counts are from their laws, and how often a method's own law fits best."""
    apart, nearest = dict[str, float](), 0
    for (base, method), of in groups.items():
        for seed, piece in of.items() if method in laws else ():
            distances = {name: _distance(piece["counts"], law) for name, law in laws.items()}
            apart[f"{base}, {method}, seed {seed}"] = distances[method]
            nearest += distances[method] <= min(distances.values())
    if not apart:
        return []
    most = max(apart, key=lambda name: apart[name])
    return [
        f"How often entries moved, compared with the corrected Eq. 13: at most {apart[most]:.2g} apart (total "
        f"variation; {most}); nearest to the law of its own method, of {len(laws)}, in {nearest} of {len(apart)} "
        "trainings."
    ]
