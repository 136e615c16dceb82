"""Check a table that was built from pieces, which are committed next to it."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.check import reference
from benchmarks.check.report import FileCheck

_REPLICATES = 2000
_BOOTSTRAP = 0.15  # maximum difference between two bootstraps of the same rows, relative to the half-width


def check_pieces(check: FileCheck, result: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Compare the file with the pieces: their number, their commits, their outcomes, and the scores of their rows."""
    last = {
        piece.get("number", piece.get("name")): piece for piece in pieces
    }  # a later attempt replaces an earlier one
    for sentence in result["verdicts"]:
        if match := re.match(r"(\d+) of (\d+) points ended as the undisturbed run does; in (\d+)", sentence):
            equal = sum(piece["end"] == "equal" for piece in last.values())
            killed = sum(bool(piece["killed"]) for piece in last.values())
            found = (equal, len(last), killed)
            check.compare(f"{sentence} The pieces have {found}.", found == tuple(map(int, match.groups())))
        elif sentence.startswith("By commit: "):
            _compare_commits(check, sentence, [piece["commit"] for piece in last.values()])
        elif match := re.match(r"Trainings: (\d+) of (\d+); by commit: ", sentence):
            check.compare(f"{sentence} The pieces are {len(pieces)}.", int(match[1]) == len(pieces))
            _compare_commits(check, sentence, [piece["commit"] for piece in pieces])
    if "right" in pieces[0]:
        _check_accuracies(check, result, pieces)


def _compare_commits(check: FileCheck, sentence: str, commits: Sequence[str]) -> None:
    said = {commit: int(count) for count, commit in re.findall(r"(\d+) of ([0-9a-f]+\+?)(?=[,.])", sentence)}
    found = Counter(commits)
    check.compare(f"{sentence} The pieces have {dict(found)}.", said == found)


def _check_accuracies(check: FileCheck, result: Mapping[str, Any], pieces: Sequence[Mapping[str, Any]]) -> None:
    """Compare each accuracy and its interval with a separate bootstrap over the rows that all seeds share."""
    sums: dict[str, list[NDArray[np.float64]]] = {}
    for piece in sorted(pieces, key=lambda piece: piece["seed"]):
        sums.setdefault(f"{piece['base']}, {piece['method']}", []).append(unpack_bits(piece["right"]))
    drawn: dict[int, NDArray[np.float64]] = {}
    for row in result["rows"]:
        found, metric = sums[row["name"]], row["metrics"]["accuracy"]
        count = metric["n"] // len(found)
        scores = np.array([100.0 * bits[:count] for bits in found])
        seeds = scores.mean(1)
        is_equal = np.allclose(seeds, metric["seeds"], rtol=0, atol=1e-9)
        check.compare(f"{row['name']}: the seeds are {seeds}, the file has {metric['seeds']}", bool(is_equal))
        if count not in drawn:
            rng = np.random.default_rng(0)
            drawn[count] = rng.multinomial(count, np.full(count, 1 / count), size=_REPLICATES).astype(float)
        low, high = compute_bootstrap_interval(scores, drawn[count])
        for end, value in (("low", low), ("high", high)):
            is_near = abs(metric[end] - value) <= _BOOTSTRAP * abs(metric[end] - metric["mean"])
            check.compare(f"{row['name']}: {end} is near {value}, the file has {metric[end]}", bool(is_near))


def compute_bootstrap_interval(scores: NDArray[np.float64], drawn: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `scores` (seeds, rows); `drawn` (replicates, rows) has the resamples."""
    replicates = drawn @ scores.mean(0) / scores.shape[1]
    mean, half = float(scores.mean()), reference.compute_half_width(scores.mean(1).tolist())
    low, high = (float(at) for at in np.quantile(replicates, (0.025, 0.975)))
    return mean - math.hypot(half, mean - low), mean + math.hypot(half, high - mean)


def unpack_bits(text: str) -> NDArray[np.float64]:
    """Return the bits of a base64 text, 1 for each row that was classified correctly."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8)).astype(float)
