"""Check that masks connect the honest sites of a sum, whichever c sites work with the server.

With all pairs they always do. With neighbors on a circle, the honest sites fall apart if two windows of k / 2
consecutive places, between which sites of the sum remain on both sides, have no other honest site in them: the masks
of each part then cancel on their own. Every signer of a list sees the whole list, so this is checked rather than left
to chance.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

from fedveil.federation.secagg.plan import AttemptPlan


def is_connected(plan: AttemptPlan, sites: Collection[str], colluding: int) -> bool:
    """Return whether these sites stay connected by masks without any `colluding` of them."""
    if not plan.neighbours:
        return True
    count, width, chosen = len(plan.circle), plan.neighbours // 2, set(sites)
    present = [site in chosen for site in plan.circle]
    before = [0, *accumulate(present + present)]  # the circle twice, so that each window and arc is one range

    def within(start: int, length: int) -> int:
        return before[start + length] - before[start]

    for first in range(count):
        for gap in range(1, count - 2 * width):  # places between the end of the first window and the second one
            second = first + width + gap
            arc, other_arc = within(first + width, gap), within((second + width) % count, count - 2 * width - gap)
            if arc and other_arc and within(first, width) + within(second % count, width) <= colluding:
                return False
    return True


def fewest_partners(plan: AttemptPlan, sites: Collection[str]) -> int:
    """Return the smallest number of partners within `sites` that one of them has; 0 if there are none."""
    chosen = set(sites)
    return min((len(chosen.intersection(plan.partners(site))) for site in chosen), default=0)
