"""The standard error of an area under the ROC curve, by Hanley and McNeil (1982)."""

from __future__ import annotations

import math


def hanley_mcneil(area: float, members: int, non_members: int) -> float:
    """Return the standard error of an AUROC of `area`, by the numbers of members and non-members."""
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (members - 1) * (q1 - area**2) + (non_members - 1) * (q2 - area**2)
    return math.sqrt(variance / (members * non_members))
