"""Warnings about privacy settings that give almost no protection. Imports neither torch nor dp-accounting.

| setting | why it gives almost no protection |
|---|---|
| delta of 0.01 or more | publishing all examples with that probability satisfies it |
| delta above 1 / examples | publishing one example, drawn at random, satisfies it |
| a noise multiplier for which one use of an example has an epsilon above 100 | the noise hides nothing |
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedveil.contract.privacy import OWN_SHARE, Adjacency, PrivacyBudget, PrivacyGuarantee, SamplingPlan

__all__ = ["MAX_RECOMMENDED_EPSILON", "delta_warnings", "noise_warnings", "privacy_warnings"]

MAX_RECOMMENDED_EPSILON = 8.0  # over all of a site's runs together; docs/deploy/site-policy.md recommends 3
LARGE_DELTA, LARGE_EPSILON = 0.01, 100.0


def privacy_warnings(claim: PrivacyGuarantee | None, examples: Iterable[int] = ()) -> list[str]:
    """Return a sentence for each setting of a guarantee that gives almost no protection.

    Args:
        examples: the sites' numbers of examples, where known.
    """
    if claim is None:
        return []
    budget = claim.budget
    plan = SamplingPlan(rounds=1, steps=1, batch=1, examples=2, neighbours=budget.neighbours)
    return [
        *delta_warnings(budget.delta, examples),
        *noise_warnings((step.multiplier for step in claim.privacy_spent(plan) if step.kind != OWN_SHARE), budget),
    ]


def delta_warnings(delta: float, examples: Iterable[int] = ()) -> list[str]:
    """Return a sentence for a delta that gives almost no protection."""
    usual = "use min(1e-6, 1 / (10 x examples))"
    if delta >= LARGE_DELTA:
        return [
            f"delta {delta:g} is at least {LARGE_DELTA:g}: with that probability nothing at all is promised, so a "
            "run that "
            f"publishes all examples with a probability of {100 * delta:g} % would satisfy it; {usual}"
        ]
    smallest = max(examples, default=0)
    if smallest and delta > 1 / smallest:
        return [
            f"delta {delta:g} is above 1 / {smallest:,}, for a site with {smallest:,} examples: a run that publishes "
            f"one of them, drawn at random, would satisfy it; {usual}"
        ]
    return []


def noise_warnings(multipliers: Iterable[float], budget: PrivacyBudget) -> list[str]:
    """Return a sentence about noise so weak that a single use of an example exceeds an epsilon of 100."""
    least = min(multipliers, default=math.inf)
    if math.isinf(least):
        return []
    if least > 0:
        mu = (2 if budget.neighbours is Adjacency.REPLACE_ONE else 1) / least
        far, near = LARGE_EPSILON / mu + mu / 2, mu / 2 - LARGE_EPSILON / mu
        if _normal_cdf(near) - math.exp(LARGE_EPSILON) * _normal_cdf(-far) <= budget.delta:
            return []
    return [
        f"a noise multiplier of {least:g} hides nothing: a single step on all examples has an epsilon above "
        f"{LARGE_EPSILON:g} at delta {budget.delta:g}; fedveil privacy plan --epsilon E computes what an epsilon needs"
    ]


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
