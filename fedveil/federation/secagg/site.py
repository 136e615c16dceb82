"""The site's half: create keys, mask the vector, agree to one list of a sum's sites, and reveal shares for it.

The server may lie, repeat, restart and show different things to different sites. The rules are in plan_checks.py.

| request | answer | refused |
|---|---|---|
| keys | the unused prekey, the same until it is used | another run |
| to mask | the masked vector, with shares under this plan's keys; the prekey is spent | T1 to T9, T11 |
| to agree | the signature of the list; the same if asked again about this list | a plan other than the one it masked
  for, a second list for that plan, A3, A4 |
| to open | a share of each secret that the sum needs; the same if asked again | as for agreeing, and O3, O4 |

The site saves its new state before it answers, so a crash does not make it answer twice. After saving and before
answering, it writes a line to its audit log; it also writes a line for each refusal:

| event | content |
|---|---|
| masked | run, round, attempt, p, numbers of the plan, digests of everything that the plan binds |
| signed | p, L, number of sites in the sum, missing sites |
| opened | the same; also the list's valid signatures, rows that could not be read, distance to the last opened sum |
| sum-refused | the request, the broken rule's number, the reason |

The site masks at most once for a plan, even if the round fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fedveil.errors import PolicyError, WireError
from fedveil.federation.secagg import crypto, derivations, mask_streams, plan_checks, shamir
from fedveil.federation.secagg.mask_streams import Integers
from fedveil.federation.secagg.messages import (
    AgreeRequest,
    AgreeResponse,
    KeysRequest,
    KeysResponse,
    OpenRequest,
    OpenResponse,
    UploadAttachment,
    sign_statement,
)
from fedveil.federation.secagg.plan import AttemptPlan, Prekey, agreed_text, list_digest
from fedveil.federation.secagg.plan_checks import RoundTerms, SiteRequirements
from fedveil.federation.secagg.refusals import AuditLogWriter, ignore_entry, log_refusals, number_refusals
from fedveil.federation.secagg.state import Fence, LivePlan, SecAggStore, SiteSecAggState, UnspentPrekey

log = logging.getLogger("fedveil.secure")


@dataclass(frozen=True)
class SecAggSite:
    """One site in one run.

    Attributes:
        run: the run's name with its ID.
        name: the server's name for the site.
        signing_key: the private key, 32 bytes.
        boot: returns the ID of the machine's current boot, or "" if the system has none. Raises StateError.
        audit_log: appends a line to the site's audit log. If it raises StateError, the site does not answer.
    """

    run: str
    name: str
    signing_key: bytes
    store: SecAggStore
    demands: SiteRequirements = SiteRequirements()
    boot: Callable[[], str] = str
    audit_log: AuditLogWriter = ignore_entry

    def log_refusals(self, request: str, plan: AttemptPlan | None = None) -> AbstractContextManager[None]:
        """Return a context that writes each refusal of a request to the audit log."""
        return log_refusals(self.audit_log, request, self._identify(plan))

    def _identify(self, plan: AttemptPlan | None) -> Mapping[str, Any]:
        about: dict[str, Any] = {"run": self.run, "site": self.name}
        if plan is None:
            return about
        return {**about, "round": plan.round, "attempt": plan.attempt, "plan": plan.digest}

    def ready(self, asked: KeysRequest) -> KeysResponse:
        """Return the unused prekey, creating it at the first request. Raises PolicyError for a different run."""
        with self.log_refusals("keys"), self.store.alone():
            if asked.run != self.run:
                with number_refusals("K1"):
                    raise PolicyError(f"secure: the request is for run {asked.run}, but this site is in {self.run}")
            state = self._load()
            if state.next is None:
                state = _with_new_prekey(state)
                self.store.save(state)
        prekey = self._prekey_of(state)
        assert prekey is not None
        return KeysResponse(prekey=prekey, after=state.fence.masked, signed=state.fence.signed)

    def begin(self, plan: AttemptPlan, terms: RoundTerms) -> None:
        """Check a plan before training. Raises PolicyError, WireError, StateError."""
        with self.log_refusals("mask", plan), self.store.alone():
            self._boot()  # if it cannot be read, masking would fail after training
            self._check_plan(self._load(), plan, terms)

    def _check_plan(self, state: SiteSecAggState, plan: AttemptPlan, terms: RoundTerms) -> None:
        own = crypto.verifying_key(self.signing_key).hex()
        plan_checks.require_terms(plan, terms)
        plan_checks.require_roster(plan, terms, self.demands)
        plan_checks.require_own_key(plan, terms, self.name, own)
        plan_checks.require_distinct_keys(plan)
        plan_checks.require_unspent(plan, self.name, self._prekey_of(state))
        plan_checks.require_numbers(plan, self.demands)
        plan_checks.require_later(plan, state)
        plan_checks.require_continued_state(terms, state)
        # Checks that need a signature per site, or whose cost is quadratic in the number of sites, come last.
        plan_checks.require_genuine_prekeys(plan)
        plan_checks.require_graph(plan)
        plan_checks.require_entries(plan, terms)

    def mask(self, plan: AttemptPlan, terms: RoundTerms, vector: Integers) -> UploadAttachment:
        """Mask a vector in place and spend the prekey. Raises the same errors as `begin`."""
        with self.log_refusals("mask", plan), self.store.alone():
            state = self._load()
            self._check_plan(state, plan, terms)
            assert state.next is not None  # T4
            p, partners = plan.digest, plan.partners(self.name)
            private = bytes.fromhex(state.next.private)
            shared = {
                other: crypto.exchange_keys(private, bytes.fromhex(plan.by_name[other].key))
                for other in {*partners, *plan.holders(self.name)}
            }
            rows = {
                dealer: derivations.row_key(shared[dealer], p, dealer, self.name).hex()
                for dealer in plan.cohort
                if self.name in plan.holders(dealer)
            }
            live: LivePlan | None = LivePlan(plan=p, rows=rows, boot=self._boot(), phase="masked", list="", answer=None)
            if plan.is_whole:  # there is nothing to sign or reveal
                live = None
            fence = self._fence_after(state, plan, terms)
            after = _with_new_prekey(state.model_copy(update={"live": live, "fence": fence}))
            self.store.save(after)  # the old prekey's private half is overwritten before anything leaves
            self.audit_log("masked", {**self._identify(plan), **_describe_plan(plan)})
        pairs = {other: derivations.pair_secret(shared[other], p, self.name, other) for other in partners}
        masks = [derivations.pairwise_mask(pairs[other], p, self.name, other) for other in partners]
        holders, own = plan.holders(self.name), ""
        shares: Sequence[Sequence[bytes]] = []
        if not plan.is_whole:
            secret = os.urandom(shamir.SECRET_BYTES)
            own = derivations.own_secret_digest(secret, p, self.name)
            masks.append(derivations.own_mask(secret, p, self.name))
            shares = shamir.split_secrets([secret, *(pairs[o] for o in partners)], plan.threshold, len(holders))
        mask_streams.add_masks(vector, masks)
        following = self._prekey_of(after)
        assert following is not None
        return sign_statement(
            UploadAttachment(
                plan=p,
                own=own,
                pairs={o: derivations.pair_secret_digest(s, p, self.name, o) for o, s in pairs.items()},
                rows={
                    holder: derivations.encrypt_row(
                        derivations.row_key(shared[holder], p, self.name, holder), row, p, self.name, holder
                    )
                    for holder, row in zip(holders, shares, strict=True)
                },
                shares={
                    holder: tuple(
                        derivations.share_digest(share, p, self.name, holder, other)
                        for other, share in zip(("", *partners), row, strict=True)
                    )
                    for holder, row in zip(holders, shares, strict=True)
                },
                vector=hashlib.sha256(vector.data).hexdigest(),
                next=following,
                signature="0" * 128,
            ),
            self.name,
            self.signing_key,
        )

    def _fence_after(self, state: SiteSecAggState, plan: AttemptPlan, terms: RoundTerms) -> Fence:
        """Return the fence for a site that masks for a plan."""
        return state.fence.model_copy(
            update={
                "masked": (plan.round, plan.attempt),
                "kept": state.fence.kept or terms.state == "continues",
                # If only some sites send an entry, a second attempt could isolate one site's part of it; and the sum
                # of a whole cohort opens without a signature.
                "signed": plan.round if plan.entries or plan.is_whole else state.fence.signed,
            }
        )

    def agree(self, asked: AgreeRequest) -> AgreeResponse:
        """Sign the list of a sum's sites. If this raises PolicyError or StateError, nothing is signed."""
        plan, listed = asked.plan, list_digest(asked.plan.digest, asked.in_sum)
        with self.log_refusals("agree", plan), self.store.alone():
            state = self._load()
            with number_refusals("A1"):
                live = self._live(state, plan)
            if live.phase == "masked":
                self._check_list(plan, asked.table, asked.in_sum)
                live = live.model_copy(update={"phase": "signed", "list": listed})
                self._save_agreed(state, plan, live)
            elif live.list != listed:
                with number_refusals("A2"):
                    raise _second_list()
            self.audit_log("signed", {**self._identify(plan), **_describe_list(plan, asked.in_sum)})
        signature = crypto.sign_bytes(self.signing_key, agreed_text(plan, listed)).hex()
        return AgreeResponse(plan=plan.digest, list=listed, signature=signature)

    def open(self, asked: OpenRequest) -> OpenResponse:
        """Return this holder's shares for one list, without those that it cannot decrypt.

        Raises:
            PolicyError, StateError: no share is revealed.
        """
        plan, listed = asked.plan, list_digest(asked.plan.digest, asked.in_sum)
        with self.log_refusals("open", plan), self.store.alone():
            state = self._load()
            with number_refusals("O1"):
                live = self._live(state, plan)
            if live.phase != "masked" and live.list != listed:
                with number_refusals("O2"):
                    raise _second_list()
            about = {**self._identify(plan), **_describe_list(plan, asked.in_sum)}
            if live.answer is not None:
                self.audit_log("opened", {**about, "repeated": True})
                return live.answer
            if live.phase == "masked":  # opening implies agreeing
                self._check_list(plan, asked.table, asked.in_sum)
            signatures = plan_checks.require_certificate(plan, asked.in_sum, listed, asked.agreed)
            plan_checks.require_rows(plan, asked.in_sum, self.name, asked.rows)
            answer = self._opened(live, asked, listed)
            opened = live.model_copy(update={"phase": "opened", "list": listed, "rows": {}, "answer": answer})
            self._save_agreed(state.model_copy(update={"last_sum": tuple(asked.in_sum)}), plan, opened)
            distance = len(set(asked.in_sum) ^ set(state.last_sum)) if state.last_sum else None
            self.audit_log("opened", {**about, "signatures": signatures, "unread": answer.unread, "distance": distance})
        if distance is not None and 0 < distance < (honest := plan.least_in_sum - plan.colluding):
            log.warning(
                "this sum's sites differ from the last sum's by %d, fewer than %d: the two sums together reveal data "
                "about few sites, and only noise (dp.*) bounds that", distance, honest,
            )  # fmt: skip
        return answer

    def _opened(self, live: LivePlan, asked: OpenRequest, listed: str) -> OpenResponse:
        plan, p = asked.plan, asked.plan.digest
        own: dict[str, str] = {}
        pairs: dict[str, dict[str, str]] = {}
        unread: list[str] = []
        for dealer in sorted(asked.rows):
            partners = plan.partners(dealer)
            try:
                shares = derivations.decrypt_row(
                    bytes.fromhex(live.rows[dealer]), asked.rows[dealer], 1 + len(partners), p, dealer, self.name
                )
            except WireError as error:  # the dealer's or the server's fault; the other shares are good
                log.warning("secure: %s: %s; it is left out", dealer, error)
                unread.append(dealer)
                continue
            own[dealer] = shares[0].hex()
            silent = {
                other: share.hex()
                for other, share in zip(partners, shares[1:], strict=True)
                if other not in asked.in_sum
            }
            if silent:
                pairs[dealer] = silent
        response = OpenResponse(plan=p, list=listed, own=own, pairs=pairs, unread=tuple(unread), signature="0" * 128)
        return sign_statement(response, self.name, self.signing_key)

    def _check_list(self, plan: AttemptPlan, table: str, in_sum: Collection[str]) -> None:
        plan_checks.require_listed(plan, in_sum, self.name, self.demands)
        with number_refusals("A4"):
            plan_checks.require_connected(plan, in_sum)
        plan_checks.require_entries_of_sum(plan, table, in_sum)

    def _save_agreed(self, state: SiteSecAggState, plan: AttemptPlan, live: LivePlan) -> None:
        fence = state.fence.model_copy(update={"signed": plan.round})
        self.store.save(state.model_copy(update={"live": live, "fence": fence}))

    def _live(self, state: SiteSecAggState, plan: AttemptPlan) -> LivePlan:
        """A1 and O1. Return the live plan. Raises PolicyError for a different plan, or if this boot has no plan."""
        if plan.run != self.run or state.live is None or state.live.plan != plan.digest:
            raise PolicyError(
                "secure: this is not the plan for which this site last masked an update; no share is opened"
            )
        return state.live

    def _boot(self) -> str:
        with number_refusals("T9"):
            return self.boot()

    def _load(self) -> SiteSecAggState:
        """Return the stored state without a plan from another boot, because the state may be an old copy."""
        state = self.store.load() or SiteSecAggState()
        if state.live is not None and state.live.boot != self._boot():
            state = state.model_copy(update={"live": None})
            self.store.save(state)
        return state

    def _prekey_of(self, state: SiteSecAggState) -> Prekey | None:
        """Return the signed public half of the unused prekey."""
        if state.next is None:
            return None
        unsigned = Prekey(
            site=self.name,
            signing_key=crypto.verifying_key(self.signing_key).hex(),
            number=state.next.number,
            key=crypto.public_key_of(bytes.fromhex(state.next.private)).hex(),
            signature="0" * 128,
        )
        signature = crypto.sign_bytes(self.signing_key, unsigned.text(self.run)).hex()
        return unsigned.model_copy(update={"signature": signature})


def _describe_plan(plan: AttemptPlan) -> Mapping[str, Any]:
    """Return the parts of a plan that a site's audit log records: its numbers, and the digests that it binds."""
    return {
        "cohort": len(plan.members),
        "quorum": plan.quorum,
        "threshold": plan.threshold,
        "colluding": plan.colluding,
        "honest": plan.least_in_sum - plan.colluding,
        "roster": plan.roster,
        "config": plan.config,
        "app": plan.app,
        "broadcast": plan.broadcast,
        "entries": plan.entries,
    }


def _describe_list(plan: AttemptPlan, in_sum: Collection[str]) -> Mapping[str, Any]:
    """Return the facts about a list that a site's audit log records: digest, number of sites, and missing sites."""
    missing = [site for site in plan.cohort if site not in in_sum]
    return {"list": list_digest(plan.digest, in_sum), "summed": len(in_sum), "missing": missing}


def _with_new_prekey(state: SiteSecAggState) -> SiteSecAggState:
    made = UnspentPrekey(number=state.number, private=os.urandom(crypto.KEY_BYTES).hex())
    return state.model_copy(update={"next": made, "number": state.number + 1})


def _second_list() -> PolicyError:
    return PolicyError("secure: this site has already agreed to another list for this plan; it never opens two")
