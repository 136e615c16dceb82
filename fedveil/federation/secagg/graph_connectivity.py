"""Check that masks connect the honest sites in a sum, whichever c sites collude with the server.

If all pairs share a mask, the masks always do. With neighbors on a circle, the honest sites fall into two parts if
there are two windows of k / 2 consecutive places that contain no honest site and leave sites of the sum on both sides:
the masks of each part then cancel on their own. Every signer of a list sees the whole list and checks this, so that it
is not left to chance.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from fedveil.federation.secagg.plan import AttemptPlan


def is_connected(plan: AttemptPlan, sites: Collection[str], colluding: int) -> bool:
    """Return whether masks still connect these sites after any `colluding` of them are removed."""
    if not plan.neighbours:
        return True
    count, width, chosen = len(plan.circle), plan.neighbours // 2, set(sites)
    present = [site in chosen for site in plan.circle]
    before = [0, *accumulate(present + present)]  # the circle twice, so that each window and arc is one range

    def within(start: int, length: int) -> int:
        return before[start + length] - before[start]

    for first in range(count):
        for gap in range(1, count - 2 * width):  # places between the end of the first window and the second window
            second = first + width + gap
            arc, other_arc = within(first + width, gap), within((second + width) % count, count - 2 * width - gap)
            if arc and other_arc and within(first, width) + within(second % count, width) <= colluding:
                return False
    return True


def fewest_partners(plan: AttemptPlan, sites: Collection[str]) -> int:
    """Return the smallest number of partners that any site has within `sites`; 0 if `sites` is empty."""
    chosen = set(sites)
    return min((len(chosen.intersection(plan.partners(site))) for site in chosen), default=0)
