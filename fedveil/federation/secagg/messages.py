"""The server's requests to sites and the sites' answers, apart from the vectors."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from fedveil.errors import WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.membership import EncryptedShares, PrekeyBundle, RoundPrekey, RunMembership
from fedveil.federation.secagg.schema import (
    MOST_BYTES,
    MOST_SITES,
    ClosedShare,
    Digest,
    Key,
    Name,
    Number,
    SecAggMessage,
    Share,
    describe_malformed,
)


class AttemptPlan(SecAggMessage):
    """The plan of an attempt at a round, the same for all of its sites; its digest is the context of keys and shares.

    Attributes:
        membership: its digest.
        bits, most_weight, bound: parameters of the ring; the cohort's size is its maximum number of summands.
        least: minimum number of sites in a sum.
        prekeys: prekeys of the cohort's sites, sorted by name.
    """

    run: Name
    round: Number
    attempt: Number
    membership: Digest
    bits: Literal[32, 64]
    most_weight: int = Field(ge=1, le=100_000_000)
    bound: float = Field(gt=0, le=1e9)
    least: int = Field(ge=1, le=MOST_SITES)
    prekeys: tuple[RoundPrekey, ...] = Field(min_length=1, max_length=MOST_SITES, strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> AttemptPlan:
        if self.cohort != sorted(set(self.cohort)):
            raise ValueError("expected each site once, sorted")
        return self

    @property
    def cohort(self) -> list[str]:
        """Return the names of the cohort's sites."""
        return [prekey.site for prekey in self.prekeys]

    def prekey_of(self, site: str) -> RoundPrekey | None:
        """Return the prekey of a site; None if the site is not in the cohort."""
        return next((prekey for prekey in self.prekeys if prekey.site == site), None)


class UploadAttachment(SecAggMessage):
    """The part of an upload that accompanies the masked vector.

    Attributes:
        mask: digest of b, the secret of the site's own mask, for checking the reconstructed secret.
        shares: of b.
        next: the site's next prekey.
    """

    mask: Digest
    shares: EncryptedShares
    next: PrekeyBundle | None


class MembershipRequest(SecAggMessage):
    """Asks a site for its run key; the answer is a `RunMember`."""

    kind: Literal["hello"] = "hello"
    run: Name


class PrekeyRequest(SecAggMessage):
    """Asks a member for a prekey; the answer is a `PrekeyBundle`.

    Attributes:
        roster: signing keys of all sites of the federation by name, connected or not.
    """

    kind: Literal["setup"] = "setup"
    membership: RunMembership
    roster: dict[Name, Key] = Field(max_length=MOST_SITES)


class UnmaskRequest(SecAggMessage):
    """Asks a holder for its shares; the answer is `UnmaskResponse`.

    Attributes:
        heard: shares of b of the sites that are in the sum, closed to this holder.
        silent: shares of the prekeys' seeds of the cohort's other sites.
    """

    kind: Literal["unmask"] = "unmask"
    plan: AttemptPlan
    in_sum: tuple[Name, ...] = Field(max_length=MOST_SITES, strict=False)
    heard: dict[Name, ClosedShare] = Field(max_length=MOST_SITES)
    silent: dict[Name, ClosedShare] = Field(max_length=MOST_SITES)

    @cached_property
    def context(self) -> str:
        """Return the digest of plan and sum, which a holder answers only once."""
        return hashlib.sha256(crypto.context_bytes("sum", self.plan.digest, *sorted(self.in_sum))).hexdigest()


class UnmaskResponse(SecAggMessage):
    """A holder's shares."""

    heard: dict[Name, Share] = Field(max_length=MOST_SITES)
    silent: dict[Name, Share] = Field(max_length=MOST_SITES)


_QUESTIONS: TypeAdapter[MembershipRequest | PrekeyRequest | UnmaskRequest] = TypeAdapter(
    Annotated[MembershipRequest | PrekeyRequest | UnmaskRequest, Field(discriminator="kind")]
)


def parse_request(data: bytes) -> MembershipRequest | PrekeyRequest | UnmaskRequest:
    """Parse a server's request to a site. Raises WireError for any other form."""
    if len(data) > MOST_BYTES:
        raise WireError(f"question: expected at most {MOST_BYTES} bytes, found {len(data)}")
    try:
        return _QUESTIONS.validate_json(data)
    except ValidationError as error:
        raise describe_malformed("question", error) from None
