"""A run with secure aggregation before it runs: what would leave a site, how exactly, and against whom it holds."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.config import RunConfig, SecureConfig
from fedveil.errors import ConfigError
from fedveil.federation import rules
from fedveil.federation.exchange import Exchange
from fedveil.federation.secure.claim import Claim
from fedveil.federation.secure.forms import HOLDER_CHARACTERS
from fedveil.federation.summed.local import settings_of
from fedveil.federation.summed.ring import Ring
from fedveil.federation.summed.uploads import Summed


@dataclass(frozen=True)
class Masked:
    """An upload of a run.

    Attributes:
        sites: that take part.
        length: integers of a vector.
        in_clear: names of the words that the method's payload carries beside it.
    """

    secure: SecureConfig
    sites: int
    holders: int
    threshold: int
    ring: Ring
    length: int
    in_clear: tuple[str, ...]

    @classmethod
    def of(cls, exchange: Exchange, config: RunConfig, sites: int = 0) -> Masked:
        """Of a run with so many sites; 0: the fewest with which it begins. Raises ConfigError."""
        secure, cohort = config.secure, config.cohort
        rules.check_secure(secure, config.aggregate, cohort)
        fewest = max(secure.min_sites, cohort.min_sites)
        count = sites or max(fewest, cohort.sites)
        if count < fewest:
            raise ConfigError(
                f"--sites: expected at least {fewest}, with which the run begins, found {sites}; name more"
            )
        settings = settings_of(secure)
        holders = settings.holders(count)
        threshold = settings.shares(holders)
        if threshold > holders:
            raise ConfigError(
                f"secure.threshold: expected at most {holders}, the holders among {count} sites, found {threshold}; "
                "lower it, or name the sites with --sites"
            )
        try:
            ring = Ring(secure.ring_bits, count, secure.max_examples, secure.bound)
        except ValueError as error:
            raise ConfigError(f"secure.ring-bits: {error}; take 64, or a smaller secure.max-examples") from None
        length = Summed.of(exchange, 0, secure.ring_bits).slots.length
        return cls(
            secure,
            count,
            holders,
            threshold,
            ring,
            length,
            tuple(sorted(word.name for word in exchange.layout.scalars if word.direction == "up")),
        )

    @property
    def bytes(self) -> int:
        """Of an upload's fields, at most."""
        return self.length * self.ring.bits // 8 + self.holders * HOLDER_CHARACTERS

    def words(self, roster: bool) -> list[str]:
        """What leaves the site and against whom that holds; `roster`: the site's policy names one."""
        secure, ring = self.secure, self.ring
        claim = Claim(self.holders, self.threshold, secure.min_sites, roster, self.holders == self.sites)
        clear = f"; and the words {', '.join(self.in_clear)}" if self.in_clear else ""
        counts = (
            "every site counts alike, whatever number of rows it has (secure.max-examples = 1)"
            if secure.max_examples == 1
            else f"a site counts for its examples, at most {secure.max_examples:,}, which are in the sum too"
        )
        return [
            "What would leave this site each time, masked, to be read in a sum with others alone:",
            f"  {self.length:,} integers modulo 2^{ring.bits}: with the keys that it needs at most "
            f"{self.bytes:,} bytes",
            f"  in the clear: that it takes part, public keys, and shares that one site each can open{clear}",
            "  not sent: its number of examples, and losses, steps and seconds of its training",
            f"  values are clipped to +-{secure.bound:g} here; rounding moves a mean by at most {ring.step:.2g}",
            f"  {counts}",
            f"With {self.sites} sites, of whom {self.holders} hold shares of a site's secrets and {self.threshold} "
            f"open one, and sums of {secure.min_sites} sites or more:",
            *(f"  {line}" for line in claim.words),
        ]
