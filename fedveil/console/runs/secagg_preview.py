"""Preview secure aggregation for a run: what would leave a site, its precision, and which adversaries it resists."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.config import RunConfig, SecureConfig
from fedveil.errors import ConfigError, QuorumError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.adversary_model import AdversaryModel
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.in_process import secagg_config_of
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec, most_attached
from fedveil.federation.secagg.plan_checks import SiteRequirements


@dataclass(frozen=True)
class MaskedUploadPreview:
    """A preview of a run's masked upload.

    Attributes:
        sites: number of participating sites.
        neighbours: number of sites with which a site shares masks; 0 means all.
        quorum: sites that must agree to a sum; 0 if only whole-cohort sums can be opened.
        threshold: number of shares that reveal a secret.
        length: number of integers in a vector.
        in_clear: names of the values that the method sends unmasked.
        partial: the method's `has_single_site_entries`.
        broadcasts_bound: whether the method sends all sites the same broadcast and sites keep no private state.
        plans_entries: the method's `plans_entries`.
    """

    secure: SecureConfig
    sites: int
    neighbours: int
    quorum: int
    threshold: int
    ring: FixedPointRing
    length: int
    in_clear: tuple[str, ...]
    partial: bool
    broadcasts_bound: bool
    plans_entries: bool

    @classmethod
    def from_exchange(cls, exchange: MessageExchange, config: RunConfig, sites: int = 0) -> MaskedUploadPreview:
        """Create the preview for this many sites; 0 means the run's minimum. Raises ConfigError for a bad config."""
        secure, cohort = config.secure, config.cohort
        aggregation_rules.check_secure(secure, config.aggregate, cohort)
        fewest = max(secure.min_sites, cohort.min_sites)
        count = sites or max(fewest, cohort.sites)
        if count < fewest:
            raise ConfigError(
                f"--sites: expected at least {fewest}, the minimum for the run to start, found {sites}; raise it"
            )
        aggregation_rules.check_entries(exchange.method, secure, cohort, sites)
        settings = secagg_config_of(secure)
        try:
            settings.check_cohort(count)
            neighbours, threshold = settings.graph(count)
        except QuorumError as error:
            raise ConfigError(f"{error}; or set the number of sites with --sites") from None
        try:
            ring = FixedPointRing(secure.ring_bits, count, secure.max_weight, secure.clip_bound)
        except ValueError as error:
            raise ConfigError(f"secure.ring-bits: {error}; use 64, or a smaller secure.max-weight") from None
        length = MaskedUploadCodec.from_exchange(exchange, 0, secure.ring_bits).slots.length
        return cls(
            secure,
            count,
            neighbours,
            settings.quorum(count),
            threshold,
            ring,
            length,
            tuple(sorted(word.name for word in exchange.layout.scalars if word.direction == "up")),
            exchange.method.has_single_site_entries,
            exchange.method.has_bound_broadcast,
            exchange.method.plans_entries,
        )

    @property
    def bytes(self) -> int:
        """Return the maximum size of an upload's fields."""
        partners = self.neighbours or self.sites - 1
        holders = (self.neighbours or self.sites) if self.quorum else 0
        return self.length * self.ring.bits // 8 + most_attached(holders, partners)

    @property
    def _condition(self) -> str:
        """Return the condition under which a sum is revealed."""
        if not self.quorum:
            return "all of which must send an upload, since no mask can be removed without it"
        return f"of which {self.quorum} must agree to a sum before its masks are removed"

    def words(self, demands: SiteRequirements) -> list[str]:
        """Return sentences on what leaves the site, and which adversaries this resists under the site's policy."""
        secure, ring = self.secure, self.ring
        claim = AdversaryModel(
            self.quorum, self.threshold, secure.min_sites, secure.max_colluders, self.neighbours, self.partial,
            self.broadcasts_bound, demands, self.plans_entries,
        )  # fmt: skip
        clear = f"; and the scalars {', '.join(self.in_clear)}" if self.in_clear else ""
        counts = (
            "every site counts equally, regardless of its number of examples (secure.max-weight = 1)"
            if secure.max_weight == 1
            else f"a site is weighted by its number of examples, at most {secure.max_weight:,}; the sum has their total"
        )
        shares = "shares that only their recipients can decrypt" if self.quorum else "digests of its pairwise secrets"
        return [
            "This site would send, each time, masked for a sum with other sites:",
            f"  {self.length:,} integers modulo 2^{ring.bits}: at most {self.bytes:,} bytes, including the keys",
            f"  unmasked: the fact that it takes part, public keys, and {shares}{clear}",
            "  not sent: its number of examples, and its training losses, steps and seconds",
            f"  values are clipped to +-{secure.clip_bound:g} here; rounding changes a mean by at most {ring.step:.2g}",
            f"  {counts}",
            f"With {self.sites} sites, {self._condition}, and sums of at least {claim.least_in_sum} sites:",
            *(f"  {line}" for line in claim.words),
        ]
