"""Secure aggregation in one process: every statement and every vector as over the wire, and the same sums."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fedveil.config import SecureConfig
from fedveil.federation.secagg import crypto, mask_streams
from fedveil.federation.secagg.flatten import FixedPointSums
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.messages import UnmaskRequest, UnmaskResponse
from fedveil.federation.secagg.pairwise_keys import mask_partners, negate_mask, pairwise_mask
from fedveil.federation.secagg.server import SecAggConfig, SecAggCoordinator
from fedveil.federation.secagg.site import SecAggSite, SiteRequirements
from fedveil.federation.secagg.state import MemorySecAggStore
from fedveil.federation.secagg.unmasking import UnmaskingAttempt


def secagg_config_of(config: SecureConfig) -> SecAggConfig:
    """Return the secure aggregation settings of a run config."""
    return SecAggConfig(
        config.min_sites, config.threshold, config.graph_degree, config.ring_bits, config.max_weight, config.clip_bound
    )


@dataclass
class InProcessSecureSums:
    """The keys of a server and of all its sites.

    Attributes:
        sites: by name.
        last: the attempt that began last.
    """

    run: str
    settings: SecAggConfig
    names: Collection[str]
    demands: SiteRequirements = SiteRequirements()
    sites: dict[str, SecAggSite] = field(default_factory=dict)
    last: UnmaskingAttempt | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            self.sites[name] = SecAggSite(
                self.run, name, os.urandom(crypto.KEY_BYTES), MemorySecAggStore(), self.demands
            )
        roster = {name: crypto.verifying_key(site.signing_key).hex() for name, site in self.sites.items()}
        self.coordinator = SecAggCoordinator(self.run, self.settings, roster)

    def begin(self, round_: int, attempt: int, cohort: Collection[str]) -> UnmaskingAttempt:
        """Begin an attempt with these sites, after setting up all sites."""
        coordinator = self.coordinator
        for name, site in self.sites.items():
            if name not in coordinator.members:
                coordinator.admit(name, site.hello(coordinator.hello()))
        setup = coordinator.settle_on(self.sites)
        for name, site in self.sites.items():
            if name not in coordinator.bundles:
                coordinator.keep(name, site.join(setup))
        self.last = coordinator.attempt(round_, attempt, cohort)
        return self.last

    def pair_masks(self, site: str) -> dict[str, mask_streams.MaskStream]:
        """Return, by partner, what removes each pairwise mask of the site in the last attempt; call it before masking.

        A server never knows all of them. Attacks remove them to measure what they find without masks.
        """
        attempt, site_state = self.last, self.sites[site].store.load()
        assert attempt is not None, "call begin first"
        assert site_state is not None
        private = crypto.private_key_from(bytes.fromhex(site_state.seed))
        return {
            other.site: negate_mask(pairwise_mask(attempt.plan, site, other.site, private, bytes.fromhex(other.key)))
            for other in mask_partners(attempt.plan, attempt.membership, site)
        }

    def sums(
        self,
        attempt: UnmaskingAttempt,
        summed: MaskedUploadCodec,
        clear: Mapping[str, Mapping[str, str]],
        deaf: Iterable[str] = (),
    ) -> FixedPointSums:
        """Return the sums of the attempt's uploads; sites in `deaf` do not respond. Raises QuorumError, WireError."""
        for holder, asked in attempt.questions().items():
            if holder not in deaf:
                opened = self.sites[holder].unmask(UnmaskRequest.from_bytes(asked.to_bytes()))
                attempt.answer(holder, UnmaskResponse.from_bytes(opened.to_bytes()))
        for site, attached in attempt.uploads.items():
            if attached.next is not None:
                self.coordinator.keep(site, attached.next)
        return FixedPointSums(summed.slots, summed.ring(attempt.plan), attempt.total(), clear)
