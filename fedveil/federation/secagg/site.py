"""A site's half: it makes keys, masks its vector, and opens shares for a server that may lie.

| request | refused |
|---|---|
| to join | run keys that their owners did not sign; another run key under its own name; a threshold of not more than
  half of the holders, or below the site's own; signing keys that are not those of the roster that the site names |
| to mask | another membership than the one joined; prekeys that their owners did not sign; a prekey of its own that is
  spent, or is not the last one; a cohort, a part of it or a least sum below the site's own |
| to open shares | a sum, or a part of it that masks do not join to the rest, of fewer sites than the plan's or the
  site's least; one with more silent sites than holders may be silent (graph_connectivity.py); anything about a prekey
  older than the last one whose share it opened; another share, or the same for another plan or sum, of one prekey |

The site saves an answer before it sends it, so a crash does not make it answer twice. A prekey is spent
as soon as its site has masked with it, even if the round fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto, graph_connectivity, mask_streams, shamir
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.membership import PrekeyBundle, RoundPrekey, RunMember, RunMembership, roster_digest
from fedveil.federation.secagg.messages import (
    AttemptPlan,
    MembershipRequest,
    PrekeyRequest,
    UnmaskRequest,
    UnmaskResponse,
    UploadAttachment,
)
from fedveil.federation.secagg.pairwise_keys import (
    agree_key,
    encrypt_shares,
    mask_partners,
    mask_purpose,
    pairwise_mask,
    seed_purpose,
    self_mask,
)
from fedveil.federation.secagg.schema import MOST_SITES
from fedveil.federation.secagg.state import How, OpenedPrekey, SecAggStore, SiteSecAggState

log = logging.getLogger("fedveil.secure")


@dataclass(frozen=True)
class SiteRequirements:
    """The conditions under which a site takes part in a run's sums.

    Attributes:
        min_cohort: minimum number of sites in a cohort, and in a sum.
        min_threshold: minimum number of shares that reconstruct a secret.
        roster: digest of the federation's signing keys; "" means that the site trusts the keys that the
            server names.
        colluding: other holders that may work with a lying server, and must not be able to reconstruct a
            secret.
    """

    min_cohort: int = 2
    min_threshold: int = 2
    roster: str = ""
    colluding: int = 0


@dataclass(frozen=True)
class SecAggSite:
    """One site in one run.

    Attributes:
        run: its name with its id.
        name: by which the server knows the site.
        signing_key: private, 32 bytes.
    """

    run: str
    name: str
    signing_key: bytes
    store: SecAggStore
    demands: SiteRequirements = SiteRequirements()

    def hello(self, asked: MembershipRequest) -> RunMember:
        """Return this site's run key, created at the first call. Raises PolicyError for another run."""
        self._require_run(asked.run)
        with self.store.alone():
            state = self.store.load()
            if state is None:
                state = SiteSecAggState(run_key=os.urandom(crypto.KEY_BYTES).hex())
                self.store.save(state)
        return self._member(state)

    def _member(self, kept: SiteSecAggState) -> RunMember:
        public = crypto.public_key_of(bytes.fromhex(kept.run_key)).hex()
        signing = crypto.verifying_key(self.signing_key).hex()
        unsigned = RunMember(name=self.name, signing_key=signing, run_key=public, signature="0" * 128)
        signature = crypto.sign_bytes(self.signing_key, unsigned.text(self.run)).hex()
        return unsigned.model_copy(update={"signature": signature})

    def join(self, asked: PrekeyRequest) -> PrekeyBundle:
        """Return a prekey for a membership. Raises PolicyError or WireError as in the table above."""
        with self.store.alone():
            return self._joining(asked)

    def _joining(self, asked: PrekeyRequest) -> PrekeyBundle:
        membership = asked.membership
        self._require_run(membership.run)
        state = self._kept()
        own = membership.by_name.get(self.name)
        if own is None or own.run_key != self._member(state).run_key:
            raise PolicyError("secure: expected this site's own run key in the membership, found another, or none")
        for member in membership.members:
            if not member.is_genuine(self.run):
                raise WireError(f"secure: expected the run key of {member.name} with its signature, found another")
        self._require_roster(asked)
        self._require_threshold(membership)
        bundle, state = self._bundle(state.model_copy(update={"membership": membership}))
        self.store.save(state)
        return bundle

    def _require_roster(self, asked: PrekeyRequest) -> None:
        if not self.demands.roster:
            return
        if (digest := roster_digest(asked.roster)) != self.demands.roster:
            raise PolicyError(
                f"roster: this site permits {self.demands.roster}, found {digest}; compare it with the other sites: "
                "fedveil members roster"
            )
        for member in asked.membership.members:
            if asked.roster.get(member.name) != member.signing_key:
                raise PolicyError(f"roster: expected the signing key of {member.name} as listed, found another")

    def _require_threshold(self, membership: RunMembership) -> None:
        least = max(self.demands.min_threshold, (membership.count + self.demands.colluding) // 2 + 1)
        if membership.threshold < least:
            raise PolicyError(
                f"secure.threshold: this site permits at least {least} of {membership.count} holders, found "
                f"{membership.threshold}; raise it"
            )

    def _bundle(self, kept: SiteSecAggState) -> tuple[PrekeyBundle, SiteSecAggState]:
        """Return a new prekey under the joined membership, and the state to save before anything is sent."""
        membership = kept.membership
        assert membership is not None  # the callers' first line
        seed, number = os.urandom(crypto.SEED_BYTES), kept.prekeys
        private = crypto.private_key_from(seed)

        def purpose(holder: str) -> bytes:
            return seed_purpose(membership, self.name, number, holder)

        shares = encrypt_shares(kept, membership, self.name, seed, purpose)
        unsigned = RoundPrekey(
            site=self.name,
            number=number,
            key=crypto.public_key_of(private).hex(),
            shares=shares.digest,
            signature="0" * 128,
        )
        signature = crypto.sign_bytes(self.signing_key, unsigned.text(membership.digest)).hex()
        bundle = PrekeyBundle(prekey=unsigned.model_copy(update={"signature": signature}), shares=shares)
        return bundle, kept.model_copy(update={"prekeys": number + 1, "seed": seed.hex()})

    def begin(self, plan: AttemptPlan) -> None:
        """Check a plan before training. Raises PolicyError, WireError."""
        self._require_run(plan.run)
        state, membership = self._joined(plan)
        self._require_threshold(membership)
        least = max(self.demands.min_cohort, 2)
        for prekey in plan.prekeys:
            if not prekey.is_genuine(membership):
                raise WireError(f"secure: expected the prekey of {prekey.site} with its signature, found another")
        if plan.least < least or graph_connectivity.smallest_component(membership, plan.cohort) < plan.least:
            raise PolicyError(
                f"secure.min-sites: this site takes part in sums of at least {least} sites joined by masks, found "
                f"{plan.least} in a cohort of {len(plan.cohort)}; raise it, the cohort or secure.graph-degree"
            )
        own = plan.prekey_of(self.name)
        seed = state.seed
        if (
            own is None
            or not seed
            or own.key != crypto.public_key_of(crypto.private_key_from(bytes.fromhex(seed))).hex()
        ):
            raise PolicyError(
                "secure: expected this site's last prekey, unused, found another, or none; a prekey is for one "
                "attempt: request a new one"
            )

    def mask(self, plan: AttemptPlan, vector: Integers) -> UploadAttachment:
        """Mask a vector in place and use up the prekey. Raises as `begin`."""
        with self.store.alone():
            self.begin(plan)
            state, membership = self._joined(plan)
            private = crypto.private_key_from(bytes.fromhex(state.seed))
            bundle, after = self._bundle(state)
            self.store.save(after)  # from here on the old prekey is spent
        secret = os.urandom(shamir.SECRET_BYTES)
        pairs = [
            pairwise_mask(plan, self.name, other.site, private, bytes.fromhex(other.key))
            for other in mask_partners(plan, membership, self.name)
        ]
        mask_streams.add_masks(vector, [self_mask(secret, plan, self.name), *pairs])

        def purpose(holder: str) -> bytes:
            return mask_purpose(plan, self.name, holder)

        shares = encrypt_shares(state, membership, self.name, secret, purpose)
        return UploadAttachment(mask=hashlib.sha256(secret).hexdigest(), shares=shares, next=bundle)

    def unmask(self, asked: UnmaskRequest) -> UnmaskResponse:
        """Return this holder's shares, of one secret per site, without those that it cannot decrypt.

        Raises:
            PolicyError, WireError: as in the table above; no share is revealed.
        """
        with self.store.alone():
            return self._unmasking(asked)

    def _unmasking(self, asked: UnmaskRequest) -> UnmaskResponse:
        plan = asked.plan
        self._require_run(plan.run)
        state, membership = self._joined(plan)
        in_sum = set(asked.in_sum)
        least = max(plan.least, self.demands.min_cohort, 2)
        fits = len(in_sum) == len(asked.in_sum) and in_sum <= set(plan.cohort) <= membership.by_name.keys()
        if not fits or graph_connectivity.smallest_component(membership, in_sum) < least:
            raise PolicyError(
                f"secure: expected a sum of at least {least} sites of the plan joined by masks, found {len(in_sum)}; "
                "no share is opened"
            )
        if (missing := len(plan.cohort) - len(in_sum)) > (most := graph_connectivity.max_dropouts(membership)):
            raise PolicyError(
                f"secure: expected at most {most} silent sites of {len(plan.cohort)}, found {missing}: holders given "
                "different sums could expose a single site's upload; no share is opened"
            )
        share_owners = {site for site in plan.cohort if self.name in membership.holders(site)}
        if asked.heard.keys() != share_owners & in_sum or asked.silent.keys() != share_owners - in_sum:
            raise PolicyError(
                "secure: expected each site whose share it holds, either in the sum or silent, found others; no "
                "share is opened"
            )
        own = plan.prekey_of(self.name)
        if own is not None and self.name not in in_sum and own.number < state.prekeys - bool(state.seed):
            raise PolicyError(
                "secure: this site has masked an upload for the plan, but is listed as silent; no share is opened"
            )
        opened: dict[How, dict[str, str]] = {"heard": {}, "silent": {}}
        answered = dict(state.answered)
        both: tuple[tuple[How, dict[str, str]], ...] = (("heard", asked.heard), ("silent", asked.silent))
        for how, closed in both:
            for site, share in closed.items():
                run_key, now = self._noted(state, membership, asked, site, how)
                answered[run_key] = now
                try:
                    opened[how][site] = self._opened(state, membership, plan, site, how, bytes.fromhex(share)).hex()
                except WireError as error:  # that site's own fault, or the server's: the others' shares are good
                    log.warning("%s", error)
        if len(answered) > MOST_SITES:
            raise PolicyError(
                f"secure: this site opens shares of at most {MOST_SITES} keys in a run, found more; start a new run"
            )
        self.store.save(state.model_copy(update={"answered": answered}))
        return UnmaskResponse(heard=opened["heard"], silent=opened["silent"])

    def _noted(
        self, kept: SiteSecAggState, membership: RunMembership, asked: UnmaskRequest, site: str, how: How
    ) -> tuple[str, OpenedPrekey]:
        prekey = asked.plan.prekey_of(site)
        if prekey is None or not prekey.is_genuine(membership):
            raise WireError(f"secure: expected the prekey of {site} with its signature, found another")
        run_key = membership.by_name[site].run_key
        now, before = OpenedPrekey(number=prekey.number, how=how, context=asked.context), kept.answered.get(run_key)
        if before is not None and (now.number < before.number or (now.number == before.number and now != before)):
            raise PolicyError(
                f"secure: this site has opened its share of {site} for another list of sites, found a second "
                "request; it never opens both halves"
            )
        return run_key, now

    def _opened(
        self, kept: SiteSecAggState, membership: RunMembership, plan: AttemptPlan, site: str, how: How, closed: bytes
    ) -> bytes:
        prekey = plan.prekey_of(site)
        assert prekey is not None
        if how == "heard":
            purpose = mask_purpose(plan, site, self.name)
        else:
            purpose = seed_purpose(membership, site, prekey.number, self.name)
        try:
            return crypto.decrypt_share(agree_key(kept, membership, site, purpose), closed, purpose)
        except WireError as error:
            raise WireError(f"secure: {site}: {error}; it is left out") from None

    def _require_run(self, run: str) -> None:
        if run != self.run:
            raise PolicyError(f"secure: expected keys for the run {self.run}, found {run}")

    def _kept(self) -> SiteSecAggState:
        state = self.store.load()
        if state is None:
            raise PolicyError("secure: expected this site's run key, found none; it was lost: request a new one")
        return state

    def _joined(self, plan: AttemptPlan) -> tuple[SiteSecAggState, RunMembership]:
        state = self._kept()
        if state.membership is None or state.membership.digest != plan.membership:
            raise PolicyError(
                "secure: expected the membership that this site joined last, found another; repeat the setup"
            )
        return state, state.membership
