"""Which sites a sum must have, so that it is a sum of many whatever a server tells the holders.

The parts of a sum are sites that masks in pairs join, directly or through others.

With all pairs, a sum is one part. With neighbours, sites that are missing may cut the circle: the masks of a part then
cancel within it, and whoever takes its own masks off sees the sum of that part alone. So each part must have as many
sites as a sum.

A server that deviates may tell each holder of another sum. What it can open then is a set of sites of which t holders
have been told "in the sum", while of each other site t holders have been told "silent". So no holder opens a sum in
which more sites are missing than holders may be silent, N - t. With c sites that work with the server, the N - c honest
holders then call at most (N - c) (N - t) sites silent, and it takes t - c of them for each one that is left out.
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


def most_silent(membership: Membership) -> int:
    """How many sites of a cohort may be missing in its sum: as many as holders may be; any number with neighbours."""
    return len(membership.members) if membership.neighbours else membership.count - membership.threshold


def fewest_honest(holders: int, threshold: int, colluding: int, cohort: int) -> int:
    """Honest sites, at least, in whatever a deviating server can open of a round, all who collude being in its cohort.

        (m - c) - floor((N - c) (N - t) / (t - c)),   m the cohort's sites

    0 where it can open what it likes.
    """
    needed = threshold - colluding
    if needed <= 0 or 2 * threshold <= holders + colluding:
        return 0
    return max(0, cohort - colluding - (holders - colluding) * (holders - threshold) // needed)
