"""The rules that turn a difference into a verdict, from the definitions in benchmarks/README.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.check import reference
from benchmarks.check.figure import Difference

HOLDS, FAILS, OPEN = "holds here", "does not hold here", "not decided"
Range = tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """A verdict before its correction.

    Attributes:
        text: the beginning of its sentence.
        printed: the verdict in the file.
        word: the verdict if the difference is significant.
        otherwise: the verdict if it is not.
        p_values: the lower and upper bound of the p-value.
    """

    text: str
    printed: str
    word: str
    otherwise: str
    p_values: Range


def judge_side(d: Difference, below: str, above: str) -> tuple[str, Range]:
    """Return which side of 0 a difference is on, with the p-value."""
    return (below if d.value < 0 else above), d.p_values()


def judge_claim(d: Difference, claim: str, margin: float) -> tuple[str, Range]:
    """Return the verdict on a claim if the difference is significant, with its p-value."""
    low = {"equal": -margin, "not lower": -margin, "higher": 0.0}.get(claim, -math.inf)
    high = {"equal": margin, "not higher": margin, "lower": 0.0}.get(claim, math.inf)
    bounds = [at for at in (low, high) if math.isfinite(at)]
    if low < d.value < high:
        every = [d.p_values(at) for at in bounds]
        return HOLDS, (max(least for least, _ in every), max(most for _, most in every))
    return FAILS, d.p_values(min(bounds, key=lambda at: abs(d.value - at)))


def judge_all(differences: Sequence[Difference]) -> Range:
    """Return the p-value for all differences being above 0: the largest p-value, or 1 if one difference is not."""
    every = [d.p_values() if d.value > 0 else (1.0, 1.0) for d in differences]
    return max(least for least, _ in every), max(most for _, most in every)


def find_possible_words(family: Sequence[Verdict]) -> list[set[str]]:
    """Return, for each verdict in a table, the words that are correct after Holm's correction.

    There is only one word, unless the file's rounding or an unknown rows' part leaves both possible.
    """
    ends = [reference.correct_by_holm([verdict.p_values[end] for verdict in family]) for end in (0, 1)]
    return [
        {verdict.word if p <= reference.ALPHA else verdict.otherwise for p in at}
        for verdict, at in zip(family, zip(*ends, strict=True), strict=True)
    ]
