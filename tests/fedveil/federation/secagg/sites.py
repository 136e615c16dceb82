"""Runs of a few sites whose vectors are a few integers, and a server that can ask them for what it likes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from fedveil.federation.secagg import crypto, messages
from fedveil.federation.secagg.in_process import InProcessSecureSums
from fedveil.federation.secagg.messages import AgreeRequest, OpenRequest, UploadAttachment
from fedveil.federation.secagg.plan import AttemptPlan, Prekey
from fedveil.federation.secagg.plan_checks import SiteRequirements
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.unmasking import UnmaskingAttempt

RUN = "run-31415"
Uploads = Mapping[str, tuple[np.ndarray, UploadAttachment]]


def names(count: int) -> list[str]:
    """s00, s01, ..."""
    return [f"s{i:02}" for i in range(count)]


def run(sites: Collection[str], demands: SiteRequirements = SiteRequirements(), **settings) -> InProcessSecureSums:
    """Sites with keys, of which at least two make a sum."""
    return InProcessSecureSums(RUN, SecAggConfig(**({"least": 2} | settings)), sites, demands)


def drawn(length: int, seed: int, bits: int = 32) -> np.ndarray:
    """A vector of uniform integers."""
    return np.random.default_rng(seed).integers(0, 1 << bits, length, dtype=np.uint64).astype(f"<u{bits // 8}")


def masked(
    local: InProcessSecureSums, attempt: UnmaskingAttempt, vectors: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, UploadAttachment]]:
    """What these sites upload; nothing of it has been added yet."""
    uploads = {}
    for site, vector in vectors.items():
        hidden = vector.copy()
        uploads[site] = (hidden, local.mask(site, attempt.plan, hidden))
    return uploads


def add(attempt: UnmaskingAttempt, uploads: Uploads) -> None:
    """Adds them up."""
    for site, (hidden, attached) in uploads.items():
        attempt.add(site, hidden, attached)


def unmasked(local: InProcessSecureSums, attempt: UnmaskingAttempt, deaf: Iterable[str] = ()) -> np.ndarray:
    """The sum, from what all sites of the list but the deaf ones answer."""
    local.unmask(attempt, deaf)
    return attempt.total()


def changed(statement, **update):
    """The statement with other values, checked as one that has come over the wire."""
    return type(statement).from_bytes(type(statement).model_validate(statement.model_dump() | update).to_bytes())


def signed(statement, site: str, key: bytes):
    """An upload or an opening with this signature, whatever it says."""
    return messages.sign_statement(statement, site, key)


def signed_prekey(prekey: Prekey, key: bytes, run_: str = RUN) -> Prekey:
    """A prekey with the signature of this key for a run."""
    return changed(prekey, signature=crypto.sign_bytes(key, prekey.text(run_)).hex())


def with_members(plan: AttemptPlan, **instead: Prekey | None) -> AttemptPlan:
    """The plan with other prekeys; None leaves a site out."""
    members = [instead.get(member.site, member) for member in plan.members]
    return changed(plan, members=[member.model_dump() for member in members if member is not None])


def agree_request(plan: AttemptPlan, in_sum: Collection[str], table: str = "") -> AgreeRequest:
    """The request to sign a list."""
    return AgreeRequest(plan=plan, table=table, in_sum=tuple(sorted(in_sum)))


def agreed(local: InProcessSecureSums, plan: AttemptPlan, in_sum: Collection[str], *by: str) -> dict[str, str]:
    """Signatures of a list, by these sites or all of it."""
    asked = agree_request(plan, in_sum)
    return {site: local.sites[site].agree(asked).signature for site in by or sorted(in_sum)}


def open_request(
    plan: AttemptPlan, holder: str, in_sum: Collection[str], uploads: Uploads, agreed: Mapping[str, str] = {}
) -> OpenRequest:
    """What a server that has these uploads asks a holder, if it says that `in_sum` are the ones in the sum."""
    rows = {s: uploads[s][1].rows[holder] for s in sorted(in_sum) if s in uploads and holder in uploads[s][1].rows}
    return OpenRequest(plan=plan, table="", in_sum=tuple(sorted(in_sum)), agreed=dict(agreed), rows=rows)


def stranger() -> bytes:
    """A signing key that nobody knows."""
    return os.urandom(crypto.KEY_BYTES)
