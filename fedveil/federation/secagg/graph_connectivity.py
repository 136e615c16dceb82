"""Check that the sites of a sum are connected by masks, so that each sum covers many sites.

The components of a sum are sites that pairwise masks connect, directly or through other sites.

With all pairs, a sum is one component. With neighbors, missing sites may cut the circle. The masks of a
component then cancel within it, and removing its sites' own masks reveals the sum of that component
alone. So each component must have as many sites as a sum.

A holder answers only for a sum in which at most N - t sites are missing, as many as there may be
unresponsive holders. This bounds how far the sums of different holders can differ.
"""

from __future__ import annotations

from collections.abc import Collection

from fedveil.federation.secagg.membership import RunMembership


def smallest_component(membership: RunMembership, sites: Collection[str]) -> int:
    """Return the number of sites in the smallest component of these; 0 if there are none."""
    left, sizes = set(sites), [0] if not sites else []
    while left:
        frontier, size = [left.pop()], 0
        while frontier:
            size += 1
            near = left.intersection(membership.holders(frontier.pop()))
            left -= near
            frontier += near
        sizes.append(size)
    return min(sizes)


def max_dropouts(membership: RunMembership) -> int:
    """Return how many cohort sites may be missing from a sum: N - t, or any number with neighbors."""
    return len(membership.members) if membership.neighbours else membership.count - membership.threshold
