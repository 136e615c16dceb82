"""Check a sentence about the paper's order of methods: how many of its pairs hold, and how many are reversed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from benchmarks.check import claims
from benchmarks.check.claims import Verdict
from benchmarks.check.figure import Figure, subtract
from benchmarks.check.report import FileCheck

_ORDER = re.compile(
    r"(.+) of (.*) \((higher|lower) first\): the paper's order (.+?) (holds|does not hold|is not decided)"
)


def check_order(check: FileCheck, rows: Mapping[str, Mapping[str, Figure]], sentence: str) -> bool:
    """Compare the sentence with the rows; return whether it is about an order.

    The pairs' intervals are not printed. If they cover rows and seeds, the verdicts are known only within the bounds of
    the rows' part, and the counts must be possible.
    """
    if not (match := _ORDER.match(sentence)):
        return False
    metric, view, better, names, word = match.groups()
    order = names.split(" > ")
    figures = [rows[f"{name} {'' if view == 'the method' else view}".strip()][metric] for name in order]
    family = []
    for (high, above), (low, below) in itertools.combinations(zip(order, figures, strict=True), 2):
        mine, other = (above, below) if better == "higher" else (below, above)
        verdict, p_values = claims.judge_side(subtract(mine, other), "lower", "higher")
        family.append(Verdict(f"{high} over {low}", "", verdict, "not told apart", p_values))
    possible = claims.find_possible_words(family)
    pairs = len(family)
    held, turned = (pairs, 0) if "holds in all" in sentence else (0, 0)
    if counts := re.search(r"(\d+) of (\d+) pairs hold, (\d+) are reversed", sentence):
        held, turned = int(counts[1]), int(counts[3])
    for count, side in ((held, "higher"), (turned, "lower")):
        least = sum(words == {side} for words in possible)
        most = sum(side in words for words in possible)
        said = f"{sentence} ({side}: computed {least} to {most} of {pairs} pairs)"
        (check.compare if least == most else check.bound)(said, least <= count <= most)
    expected = "holds" if held and not turned else "does not hold" if turned else "is not decided"
    check.compare(f"{sentence} (computed: {expected})", word == expected)
    return True
