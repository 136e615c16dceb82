"""Secure aggregation in one process: every statement and every vector as over the wire, and the same sums."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fedveil.config import SecureConfig
from fedveil.federation.secure import keys, masks
from fedveil.federation.secure.agreed import negative, pair_mask, partners
from fedveil.federation.secure.kept import MemoryStore
from fedveil.federation.secure.server import Coordinator, Settings
from fedveil.federation.secure.site import Demands, Site
from fedveil.federation.secure.statements import Opened, Unmask
from fedveil.federation.secure.unmasking import Attempt
from fedveil.federation.summed.summands import RingSums
from fedveil.federation.summed.uploads import Summed


def settings_of(config: SecureConfig) -> Settings:
    """How a run adds up, as its config says."""
    return Settings(
        config.min_sites, config.threshold, config.neighbours, config.ring_bits, config.max_examples, config.bound
    )


@dataclass
class LocalSums:
    """The keys of a server and of all its sites.

    Attributes:
        sites: by name.
        last: the attempt that began last.
    """

    run: str
    settings: Settings
    names: Collection[str]
    demands: Demands = Demands()
    sites: dict[str, Site] = field(default_factory=dict)
    last: Attempt | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            self.sites[name] = Site(self.run, name, os.urandom(keys.KEY_BYTES), MemoryStore(), self.demands)
        roster = {name: keys.verifying_key(site.signing_key).hex() for name, site in self.sites.items()}
        self.coordinator = Coordinator(self.run, self.settings, roster)

    def begin(self, round_: int, attempt: int, cohort: Collection[str]) -> Attempt:
        """An attempt with these sites, all of which are set up."""
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

    def pair_masks(self, site: str) -> dict[str, masks.Mask]:
        """What will take off each mask that a site shares in the last attempt, by partner; before it has masked.

        No server knows all of them. Attacks take them off to see what they find where nothing is hidden.
        """
        attempt, kept = self.last, self.sites[site].store.load()
        assert attempt is not None, "begin comes first"
        assert kept is not None
        private = keys.private_of(bytes.fromhex(kept.seed))
        return {
            other.site: negative(pair_mask(attempt.plan, site, other.site, private, bytes.fromhex(other.key)))
            for other in partners(attempt.plan, attempt.membership, site)
        }

    def sums(
        self, attempt: Attempt, summed: Summed, clear: Mapping[str, Mapping[str, str]], deaf: Iterable[str] = ()
    ) -> RingSums:
        """The sums of the attempt's uploads; sites that are `deaf` open no share. Raises QuorumError, WireError."""
        for holder, asked in attempt.questions().items():
            if holder not in deaf:
                opened = self.sites[holder].unmask(Unmask.of(asked.to_bytes()))
                attempt.answer(holder, Opened.of(opened.to_bytes()))
        for site, attached in attempt.uploads.items():
            if attached.next is not None:
                self.coordinator.keep(site, attached.next)
        return RingSums(summed.slots, summed.ring(attempt.plan), attempt.total(), clear)
