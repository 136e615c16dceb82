"""Check docs/results.md: compare each claim's figures, intervals and verdict with the values in the file that it links
to.

A claim is a list item with a comment that gives the measurement, the verdict and the intervals, separated by " | ".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from benchmarks.check import reference
from benchmarks.check.report import FileCheck
from benchmarks.check.result_file import SHARES, read_rows
from benchmarks.check.sentences import NUMBER, read_number, rounding_of

_CLAIM = re.compile(r"^- (.+) \(\[([\w/]+)\]\(reference/results/\w+\.md\)\)\n  <!-- (.+) -->$", re.MULTILINE)
_METRIC = re.compile(rf"`([^`]+)` (.+): ({NUMBER})(?: .+)?")
_CUTS = ((0.0, operator.lt), (1.0, operator.gt), (100.0, operator.gt))
_WORDS = {" does not hold here.": "refuted", " holds here.": "holds", "not decided.": "", "not told apart.": ""}


def check_page(text: str, results: Mapping[str, Mapping[str, Any]], name: str = "docs/results.md") -> FileCheck:
    """Return the comparisons for the page; `results` maps file names to results."""
    check = FileCheck(name)
    claims = _CLAIM.findall(text)
    check.compare(
        f"{len(claims)} claims are read of {text.count('<!--')} comments", 0 < len(claims) == text.count("<!--")
    )
    for sentence, preset, comment in claims:
        result = results.get(preset.replace("/", "_"))
        if result is None:
            check.mismatches.append(f"{preset}: no result")
            continue
        measured, verdict, intervals = (part.strip() for part in comment.split(" | "))
        figures = read_rows(result)
        expected: list[tuple[float, float] | tuple[str, str] | None] = []
        for item in measured.split("; "):
            if item.startswith('"'):
                expected.append(_check_quote(check, preset, item.strip('"'), verdict, result["verdicts"]))
            elif match := _METRIC.fullmatch(item):
                figure = figures.get(match[1], {}).get(match[2])
                if figure is None:
                    check.mismatches.append(f"{preset}: no figure for {item}")
                    continue
                mean, low, high = figure.mean, figure.low, figure.high
                if len(figure.seeds) > 1:
                    mean = reference.compute_mean(figure.seeds)
                    if match[2] in SHARES:
                        low, high = reference.compute_share_interval(round(sum(figure.seeds)), len(figure.seeds))
                    elif figure.has_seeds_interval():
                        low, high = mean - figure.seeds_half, mean + figure.seeds_half
                check.compare(f"{preset}: {item} (computed: {mean:.6g})", is_rounded(match[3], mean))
                expected.append((low, high))
            else:
                check.unchecked.append(f"{preset}: {item}")
        _check_intervals(check, f"{preset}: {sentence[:60]}", intervals, [each for each in expected if each])
    return check


def _check_quote(
    check: FileCheck, preset: str, quote: str, verdict: str, sentences: list[str]
) -> tuple[str, str] | None:
    """Compare a quoted sentence with the file's sentences, which are also recomputed; return its interval."""
    found = [s for s in sentences if quote in s and not re.match(r"[\d.]\d", s[s.index(quote) + len(quote) :])]
    check.compare(f'{preset}: no sentence has "{quote}"', bool(found))
    if not found:
        return None
    word = next((word for end, word in _WORDS.items() if found[0].endswith(end)), None)
    if word is not None:
        check.compare(f"{preset}: {verdict}, but: {found[0]}", verdict.startswith(word) and word != "")
    rest = found[0][found[0].index(quote) + len(quote) :]
    match = re.match(rf" (?:\[|\(95 % interval )({NUMBER})(?:,| to) ({NUMBER})", rest)
    return (match[1].rstrip(","), match[2].rstrip(",")) if match else None


def _check_intervals(check: FileCheck, text: str, cell: str, expected: list[Any]) -> None:
    printed = [] if cell == "-" else [re.sub(" (points|nats)$", "", each).split(" to ") for each in cell.split("; ")]
    check.compare(f"{text}: {len(printed)} intervals for {len(expected)} figures", len(printed) == len(expected))
    for ends, wanted in zip(printed, expected, strict=False):
        for end, value in zip(ends, wanted, strict=True):
            if isinstance(value, str):
                check.compare(f"{text}: {end}, the sentence has {value}", end == value)
            else:
                # The page clips the interval of a share or a percentage to the possible range.
                is_cut = any(read_number(end) == at and side(value, at) for at, side in _CUTS)
                check.compare(f"{text}: {end} (computed: {value:.6g})", is_rounded(end, value) or is_cut)


def is_rounded(printed: str, value: float) -> bool:
    """Return whether a printed number equals `value` up to its rounding."""
    return abs(read_number(printed) - value) <= rounding_of(printed) * (1 + 1e-6) + 1e-9 * abs(value)
