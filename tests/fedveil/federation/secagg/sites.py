"""Runs of a few sites whose vectors are a few integers, and a server that can ask them for what it likes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from fedveil.federation.secagg import crypto, shamir
from fedveil.federation.secagg.in_process import InProcessSecureSums
from fedveil.federation.secagg.messages import AttemptPlan, UnmaskRequest, UploadAttachment
from fedveil.federation.secagg.schema import SecAggMessage
from fedveil.federation.secagg.server import SecAggConfig
from fedveil.federation.secagg.site import SiteRequirements
from fedveil.federation.secagg.unmasking import UnmaskingAttempt

RUN = "run-31415"


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
        uploads[site] = (hidden, local.sites[site].mask(attempt.plan, hidden))
    return uploads


def add(attempt: UnmaskingAttempt, uploads: Mapping[str, tuple[np.ndarray, UploadAttachment]]) -> None:
    """Adds them up."""
    for site, (hidden, attached) in uploads.items():
        attempt.add(site, hidden, attached)


def unmasked(local: InProcessSecureSums, attempt: UnmaskingAttempt, deaf: Iterable[str] = ()) -> np.ndarray:
    """The sum, from what all holders but the deaf ones answer."""
    for holder, asked in attempt.questions().items():
        if holder not in deaf:
            attempt.answer(holder, local.sites[holder].unmask(asked))
    return attempt.total()


def changed(statement, **update):
    """The statement with other values, checked as one that has come over the wire."""
    return type(statement).from_bytes(type(statement).model_validate(statement.model_dump() | update).to_bytes())


def signed(statement: SecAggMessage, key: bytes, text: bytes):
    """The same with a signature."""
    return changed(statement, signature=crypto.sign_bytes(key, text).hex())


def question(
    plan: AttemptPlan, attempt: UnmaskingAttempt, holder: str, in_sum: Collection[str], uploads
) -> UnmaskRequest:
    """What a server that has these uploads asks a holder, if it says that `in_sum` are the ones in the sum."""
    of = attempt.membership.holders
    mine = [site for site in plan.cohort if holder in of(site)]
    return UnmaskRequest(
        plan=plan,
        in_sum=tuple(sorted(in_sum)),
        heard={s: uploads[s][1].shares.closed[holder] for s in mine if s in in_sum and s in uploads},
        silent={s: attempt.bundles[s].shares.closed[holder] for s in mine if s not in in_sum},
    )


def combined(attempt: UnmaskingAttempt, site: str, shares: Mapping[str, str]) -> bytes:
    """What shares of `site` by holder open."""
    places = {holder: i + 1 for i, holder in enumerate(attempt.membership.holders(site))}
    first = list(shares.items())[: attempt.membership.threshold]
    return shamir.combine_shares({places[holder]: bytes.fromhex(share) for holder, share in first})


def stranger() -> bytes:
    """A signing key that nobody knows."""
    return os.urandom(crypto.KEY_BYTES)
