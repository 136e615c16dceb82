"""Compare metrics and give verdicts: which is higher, and whether a claim or an order holds.

A verdict that two methods differ is an error if they do not differ. All verdicts in a table (a preset's claims, an
order's pairs) are corrected together with Holm's method, so that at most one table in twenty has such an error. All
other verdicts are "not told apart" or "not decided", and support neither side. One or two seeds decide nothing.

| claim | holds if the difference lies | does not hold if it lies |
|---|---|---|
| lower, higher | below 0, above 0 | above 0, below 0 |
| equal | -margin to margin | either side |
| not lower, not higher | above -margin, below margin | below -margin, above margin |

A claim that two methods are equal must therefore state its margin.

A control is judged like a claim about the difference between its figure and chance (0.5 for an AUROC), and may also be
undecided:

| the control must be | held if its figure minus chance lies | NOT HELD if it lies |
|---|---|---|
| won | above margin | below it |
| lost | within -margin to margin | beyond either |
| not won | below margin | above it |

A control to win must hold over the seeds. A control to lose is tested over the rows, for these training runs only: if
something reveals these rows, the table is invalid, even if other seeds would show nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedveil.attacks.statistics import holm_correction
from fedveil.errors import ConfigError
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric

ALPHA = 0.04  # for all verdicts in a table together; it leaves room below 5% for non-normal variation between seeds
HOLDS, FAILS, OPEN = "holds here", "does not hold here", "not decided"
HELD, NOT_HELD = "held", "NOT HELD"
CHANCE = 0.5  # for an AUROC
# What the intervals in a table cover. With a single test set, a different one could give a different difference.
ROWS_AND_SEEDS, SEEDS, ONE_TEST_SET = "rows and seeds", "seeds", "seeds, one test set"
CONTROL_MARGIN = 0.05  # default for an AUROC: a tenth of the distance from chance to certainty
Must = Literal["won", "lost", "not won"]
_CLAIMS = ("lower", "higher", "equal", "not lower", "not higher")
_NEED_MARGIN = ("equal", "not lower", "not higher")


@dataclass(frozen=True)
class ClaimSentence:
    """A statement about a figure, with its p-value.

    Attributes:
        word: the verdict if the difference is significant.
        p: the p-value of that verdict.
        otherwise: the verdict if the difference is not significant.
    """

    word: str
    p: float
    otherwise: str


def judge_sign(
    d: ResampledMetric, below: str = "lower", above: str = "higher", otherwise: str = "not told apart"
) -> ClaimSentence:
    """Judge on which side of 0 a difference lies."""
    return ClaimSentence(below if d.value < 0 else above, resampling.p_value(d), otherwise)


def judge_claim(d: ResampledMetric, claim: Mapping[str, Any]) -> ClaimSentence:
    """Judge whether a difference matches `claim`, a table in a preset with the key "is" and, for some, "margin".

    Raises:
        ConfigError: the claim is unknown, or lacks a required margin.
    """
    asked, margin = claim["is"], claim.get("margin", 0.0)
    if asked not in _CLAIMS:
        raise ConfigError(f"claims.is: expected one of {', '.join(_CLAIMS)}, found {asked}; correct the claim")
    if (asked in _NEED_MARGIN) != (margin > 0):
        expected = "above 0" if asked in _NEED_MARGIN else "none"
        raise ConfigError(f'claims.margin of "{asked}": expected {expected}, found {margin:g}; correct the claim')
    low = -math.inf if asked in ("lower", "not higher") else -margin
    high = math.inf if asked in ("higher", "not lower") else margin
    bounds = [at for at in (low, high) if math.isfinite(at)]
    if low < d.value < high:
        return ClaimSentence(HOLDS, max(resampling.p_value(d, at) for at in bounds), OPEN)
    nearest = min(bounds, key=lambda at: abs(d.value - at))
    return ClaimSentence(FAILS, resampling.p_value(d, nearest), OPEN)


def judge_control(
    figure: ResampledMetric, must: Must, margin: float = CONTROL_MARGIN, chance: ResampledMetric | None = None
) -> ClaimSentence:
    """Judge whether a control meets its requirement.

    Args:
        margin: an attack that learns nothing stays within this distance from chance; a winning attack must exceed it.
        chance: the score of a random guess, paired with `figure`; by default CHANCE.
    """
    gain = resampling.subtract_metrics(figure, chance or resampling.from_constant(CHANCE))
    if must == "won":
        said = judge_claim(resampling.subtract_metrics(gain, resampling.from_constant(margin)), {"is": "higher"})
    else:
        claim = {"is": "equal" if must == "lost" else "not higher", "margin": margin}
        said = judge_claim(resampling.of_rows(gain), claim)
    return replace(said, word=HELD if said.word == HOLDS else NOT_HELD)


def describe_control_range(must: Must, margin: float = CONTROL_MARGIN) -> str:
    """Return, in words, the range in which a control's AUROC must lie."""
    low, high = f"{CHANCE - margin:g}", f"{CHANCE + margin:g}"
    return {"won": f"above {high}", "lost": f"within {low} to {high}", "not won": f"below {high}"}[must]


def list_control_verdicts(found: Sequence[tuple[str, ClaimSentence]]) -> list[str]:
    """Return a sentence for each control in a table, ending in its verdict, and a sentence about the correction."""
    told_ = [
        f"{text}: {word}." for (text, _), word in zip(found, decide_words([said for _, said in found]), strict=True)
    ]
    return [*told_, f"Verdicts on controls are corrected for {len(found)} controls (Holm)."] if found else []


def claim_in_words(claim: Mapping[str, Any]) -> str:
    """Return a preset's claim as text, with its margin."""
    return f"it {claim['is']}" + (f" (within {claim['margin']:g})" if "margin" in claim else "")


def claims_of(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a preset's claims; a claim without a required margin gets the margin from the settings, if any."""
    shared = {"margin": settings["margin"]} if "margin" in settings else {}
    return [(shared if claim["is"] in _NEED_MARGIN else {}) | claim for claim in settings.get("claims", [])]


def judge_claims(
    rows: Mapping[str, Mapping[str, ResampledMetric]], claims: Sequence[Mapping[str, Any]], form: str = "+.3f"
) -> list[tuple[str, ClaimSentence]]:
    """Return each claim in a preset and whether it holds, for one metric of two rows, paired by resample and seed.

    A claim's "than" is the name of another row, or a number to compare every seed with.

    Raises:
        ConfigError: a claim names a row or metric that the table does not have.
    """
    found = []
    for claim in claims:
        metric, mine, other = (claim[key] for key in ("metric", "row", "than"))
        for name in (mine, other):
            if isinstance(name, str) and metric not in rows.get(name, {}):
                raise ConfigError(
                    f'claims: expected a row with that metric, found no "{name}" with "{metric}"; correct the claim'
                )
        against = rows[other][metric] if isinstance(other, str) else resampling.from_constant(float(other))
        d = resampling.subtract_metrics(rows[mine][metric], against)
        than = f"that of {other}" if isinstance(other, str) else f"{other:g}"
        text = f"{metric} of {mine} less {than}: {resampling.format_interval(resampling.compute_interval(d), form)}"
        found.append((f"{text}; the claim has {claim_in_words(claim)}", judge_claim(d, claim)))
    return found


def decide_words(said: Sequence[ClaimSentence]) -> list[str]:
    """Return the verdict for each claim, corrected for the others."""
    corrected = holm_correction([each.p for each in said])
    return [each.word if p <= ALPHA else each.otherwise for each, p in zip(said, corrected, strict=True)]


def all_of(
    differences: Sequence[ResampledMetric], side: Literal["lower", "higher"], word: str, otherwise: str
) -> ClaimSentence:
    """Judge whether all differences are on the given side of 0. All must hold, so no correction is needed."""
    found = [judge_sign(d) for d in differences]
    return ClaimSentence(word, max(each.p if each.word == side else 1.0 for each in found), otherwise)


def list_verdicts(found: Sequence[tuple[str, ClaimSentence]], seeds: int, over: str = ROWS_AND_SEEDS) -> list[str]:
    """Return one sentence per text, ending in its verdict, and a sentence about the correction.

    Args:
        over: what the intervals cover, in words.
    """
    said = [each for _, each in found]
    told_ = [f"{text}: {word}." for (text, _), word in zip(found, decide_words(said), strict=True)]
    return [*told_, describe_correction(f"{len(said)} comparisons", seeds, over)] if found else []


def describe_correction(comparisons: str, seeds: int, over: str = ROWS_AND_SEEDS) -> str:
    """Return the sentence below a table that explains how its verdicts were reached."""
    text = f"Intervals are of 95 % each, over {over}; verdicts are corrected for {comparisons} (Holm)"
    few = f"; {seeds} {'seed is' if seeds == 1 else 'seeds are'} too few to decide"
    return f"{text}{few if 0 < seeds < resampling.SEEDS_TO_DECIDE else ''}."


def describe_ordering(figures: Mapping[str, ResampledMetric], order: Sequence[str], what: str) -> str:
    """Return a sentence that says whether `figures` are in the paper's order, from highest to lowest."""
    names = [name for name in order if name in figures]
    pairs = [(high, low) for i, high in enumerate(names) for low in names[i + 1 :]]
    differences = [resampling.subtract_metrics(figures[high], figures[low]) for high, low in pairs]
    found = decide_words([judge_sign(d) for d in differences])
    held, turned = found.count("higher"), found.count("lower")
    reversed_ = [
        f"{high} over {low} ({resampling.format_interval(resampling.compute_interval(d), '+.3g')})"
        for (high, low), d, word in zip(pairs, differences, found, strict=True)
        if word == "lower"
    ]
    said = f"{what}: the paper's order {' > '.join(names)} "
    if held == len(pairs):
        return said + f"holds in all {held} pairs."
    if not held and not turned:
        return said + f"is not decided: no pair of {len(pairs)} is told apart."
    return said + (
        f"{'does not hold' if turned else 'holds in part'}: {held} of {len(pairs)} pairs hold, {turned} are reversed"
        f"{': ' + '; '.join(reversed_) if reversed_ else ''}, {len(pairs) - held - turned} are not told apart."
    )
