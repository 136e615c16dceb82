"""The parts of a sum: sites that masks in pairs join, directly or through others.

With all pairs, a sum is one part. With neighbours, sites that are missing may cut the circle: the masks of a part then
cancel within it, and whoever takes its own masks off sees the sum of that part alone. So each part must have as many
sites as a sum.
"""

from __future__ import annotations

from collections.abc import Collection

from fedveil.federation.secure.membership import Membership


def smallest(membership: Membership, sites: Collection[str]) -> int:
    """How many sites the smallest part of these has; 0 of none."""
    left, sizes = set(sites), [0] if not sites else []
    while left:
        found, size = [left.pop()], 0
        while found:
            size += 1
            near = left.intersection(membership.holders(found.pop()))
            left -= near
            found += near
        sizes.append(size)
    return min(sizes)
