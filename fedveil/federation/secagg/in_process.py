"""Secure aggregation in one process, with every statement and every vector as over the wire, and the same sums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fedveil.config import SecureConfig
from fedveil.contract.entry_table import EntryTable
from fedveil.federation.secagg import crypto, derivations, mask_streams
from fedveil.federation.secagg.flatten import FixedPointSums
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.masked_upload import MaskedUploadCodec
from fedveil.federation.secagg.messages import UploadAttachment
from fedveil.federation.secagg.plan import AttemptPlan
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements
from fedveil.federation.secagg.roster import SigningKeyRoster
from fedveil.federation.secagg.schema import SecAggMessage
from fedveil.federation.secagg.server import SecAggConfig, SecAggCoordinator
from fedveil.federation.secagg.site import SecAggSite
from fedveil.federation.secagg.state import MemorySecAggStore
from fedveil.federation.secagg.unmasking import UnmaskingAttempt, negate_mask

Statement = TypeVar("Statement", bound=SecAggMessage)

_CONFIG = hashlib.sha256(b"in process").hexdigest()  # all sites are in this process, so none can get a different config


def secagg_config_of(config: SecureConfig) -> SecAggConfig:
    """Return the secure aggregation settings of a run config."""
    return SecAggConfig(
        config.min_sites, config.threshold, config.graph_degree, config.ring_bits, config.max_weight,
        config.clip_bound, config.max_colluders, config.noise, config.whole_cohort,
    )  # fmt: skip


@dataclass
class InProcessSecureSums:
    """The keys of a server and all its sites.

    Attributes:
        sites: the sites by name.
        last: the most recent attempt.
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
        self.roster = SigningKeyRoster(signing_keys=roster).to_bytes().decode()
        self.coordinator = SecAggCoordinator(self.run, self.settings, _CONFIG, roster)

    def begin(
        self, round_: int, attempt: int, cohort: Collection[str], entries: EntryTable | None = None
    ) -> UnmaskingAttempt:
        """Ask these sites for prekeys, then begin an attempt with them and a table of each site's entries."""
        for name in cohort:
            if name not in self.coordinator.ready:
                self.coordinator.admit(name, self.sites[name].ready(self.coordinator.request()))
        table, digest = (entries.to_text(), entries.digest) if entries else ("", "")
        self.last = self.coordinator.attempt(round_, attempt, cohort, broadcast="", table=table, entries=digest)
        return self.last

    def terms(self, plan: AttemptPlan, table: str = "", has_table: bool = False) -> RoundTerms:
        """Return every site's terms for a client round.

        Args:
            table: text of the plan's table of entries.
            has_table: whether the method plans entries.
        """
        settings = self.settings
        return RoundTerms(
            self.run, plan.round, plan.attempt, settings.bits, settings.most_weight, settings.bound, settings.noise,
            settings.least, settings.colluding, settings.threshold, settings.neighbours, _CONFIG,
            roster=self.roster, table=table, has_table=has_table, is_alike=False, is_whole=settings.is_whole,
        )  # fmt: skip

    def mask(self, site: str, plan: AttemptPlan, vector: Integers) -> UploadAttachment:
        """Mask a site's vector in place. Raises the same errors as `SecAggSite.mask`."""
        return self.sites[site].mask(plan, self.terms(plan), vector)

    def pair_masks(self, site: str) -> dict[str, mask_streams.MaskStream]:
        """Return, by partner, the streams that remove the site's last pairwise masks; call this before masking.

        A server never knows all of them. Attacks remove them to measure results without masks.
        """
        attempt, site_state = self.last, self.sites[site].store.load()
        assert attempt is not None, "call begin first"
        assert site_state is not None
        assert site_state.next is not None
        private, plan = bytes.fromhex(site_state.next.private), attempt.plan
        masks = {}
        for other in plan.partners(site):
            shared = crypto.exchange_keys(private, bytes.fromhex(plan.by_name[other].key))
            secret = derivations.pair_secret(shared, plan.digest, site, other)
            masks[other] = negate_mask(derivations.pairwise_mask(secret, plan.digest, site, other))
        return masks

    def sums(
        self,
        attempt: UnmaskingAttempt,
        summed: MaskedUploadCodec,
        clear: Mapping[str, Mapping[str, str]],
        deaf: Iterable[str] = (),
    ) -> FixedPointSums:
        """Return the sums of the attempt's uploads; sites in `deaf` do not respond. Raises QuorumError, WireError."""
        self.unmask(attempt, deaf)
        for site, attached in attempt.uploads.items():
            self.coordinator.keep(site, attempt.plan, attached.next)
        return FixedPointSums(summed.slots, summed.ring(attempt.plan), attempt.total(), clear)

    def unmask(self, attempt: UnmaskingAttempt, deaf: Iterable[str] = ()) -> None:
        """Close the list of an attempt and reveal its shares; sites in `deaf` do not respond.

        Raises:
            QuorumError: there are too few uploads or signatures of the list.
        """
        attempt.close()
        if attempt.needs_agreement:
            for site, asked in attempt.agree_requests().items():
                if site not in deaf:
                    attempt.take_agreement(site, _over_the_wire(self.sites[site].agree(_over_the_wire(asked))))
        for site, wanted in attempt.open_requests().items():
            if site not in deaf:
                attempt.take_opening(site, _over_the_wire(self.sites[site].open(_over_the_wire(wanted))))


def _over_the_wire(statement: Statement) -> Statement:
    return type(statement).from_bytes(statement.to_bytes())
