"""Which adversary a run of secure aggregation holds against, and what keeps it from holding against a stronger one.

N holders of a site's secrets, of which t open one; a sum of at least K sites; c sites that work with the server.

| adversary | sees no more of the others than their sum, if |
|---|---|
| a server that keeps to the protocol, and c sites | c < t, and c <= K - 2: of one honest site, the sum is its upload |
| a server that does what it likes, and c sites | besides, 2 t > N + c, two honest sites in whatever it opens of a whole
  cohort (`parts.fewest_honest`), masks of all pairs, and sites that know each other's keys: a roster |

Both are of one sum. Two sums of nearly the same sites from the same weights differ by what the others sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.federation.secure.parts import fewest_honest


@dataclass(frozen=True)
class Claim:
    """What a membership gives.

    Attributes:
        holders: N.
        threshold: t.
        least: K.
        all_pairs: every site holds shares of every other one: no neighbours.
        with_roster: the site itself names the signing keys of all sites (`roster` of its policy).
    """

    holders: int
    threshold: int
    least: int
    with_roster: bool
    all_pairs: bool = True

    def __post_init__(self) -> None:
        if not (1 <= self.threshold <= self.holders and self.least >= 2):
            raise ValueError(
                f"expected a threshold of 1 to {self.holders} holders, and sums of 2 or more sites, found {self}"
            )

    @property
    def curious(self) -> int:
        """The most sites that may work with a server that keeps to the protocol."""
        return min(self.threshold - 1, self.least - 2)

    @property
    def deviating(self) -> int | None:
        """The most sites that may work with a server that does not; None: it may not deviate at all."""
        if not (self.with_roster and self.all_pairs):
            return None
        n, t = self.holders, self.threshold
        return max((c for c in range(self.least - 1) if fewest_honest(n, t, c, n) >= 2), default=None)

    @property
    def words(self) -> list[str]:
        """The claim, then what keeps it from being stronger."""
        found = [f"Holds against an honest but curious server {_with(self.curious)}."]
        if self.deviating is None:
            found.append(f"Does not hold against a server that deviates: {self._lacking}.")
        else:
            found.append(f"Holds against a server that deviates {_with(self.deviating)}.")
        if self.least - 2 < self.threshold - 1:
            found.append(
                f"Not against {_sites(self.least - 1)} with the server: a sum may be of {self.least} sites, and two of "
                "them must be honest (secure.min-sites, min-cohort)."
            )
        return found

    @property
    def _lacking(self) -> str:
        if 2 * self.threshold <= self.holders:
            return (
                f"threshold too low, {self.threshold} of {self.holders} holders open a secret, and two lists could "
                "find so many each"
            )
        if not self.all_pairs:
            return "with neighbours no holder sees the whole sum, so each can be told of another one"
        return "without a roster in every site policy the server could put keys of its own in the place of the sites'"


def weakest(attempts: Iterable[Mapping[str, Any]], least: int) -> Claim | None:
    """What a run held against in its weakest attempt, for sites whose policy names no roster; None without attempts.

    Args:
        attempts: what each noted as `unseen` (server_app/record.py).
        least: secure.min-sites.
    """
    found = [
        Claim(int(a["holders"]), int(a["threshold"]), least, with_roster=False) for a in attempts if "holders" in a
    ]
    return min(found, key=lambda claim: claim.curious, default=None)


def _with(sites: int) -> str:
    return f"and up to {_sites(sites)} with it" if sites else "alone"


def _sites(count: int) -> str:
    return f"{count} site" if count == 1 else f"{count} sites"
