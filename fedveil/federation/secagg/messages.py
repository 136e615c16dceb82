"""The server's requests to sites and the sites' answers, except the vectors."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fedveil.errors import WireError
from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.derivations import protocol_context
from fedveil.federation.secagg.plan import AttemptPlan, OptionalDigest, Prekey
from fedveil.federation.secagg.schema import (
    MOST_BYTES,
    MOST_HOLDERS,
    MOST_NEIGHBORS,
    MOST_SITES,
    Digest,
    Name,
    Number,
    Row,
    SecAggMessage,
    Share,
    ShareDigest,
    Signature,
    describe_malformed,
)

_MOST_TABLE = 8 << 20  # characters

Position = tuple[Number, Number]  # round, attempt
PairDigests = dict[Name, Digest]

A = TypeVar("A", "UploadAttachment", "OpenResponse")


class KeysRequest(SecAggMessage):
    """Asks a site for its unused prekey; the answer is a `KeysResponse`."""

    kind: Literal["keys"] = "keys"
    run: Name


class KeysResponse(SecAggMessage):
    """A site's unused prekey.

    Attributes:
        after: last round and attempt for which the site masked; None if it has not masked yet.
        signed: the last round in which the site signed a list of a sum's sites.
    """

    kind: Literal["ready"] = "ready"
    prekey: Prekey
    after: Annotated[Position | None, Field(strict=False)]
    signed: Number | None


class UploadAttachment(SecAggMessage):
    """The part of an upload that accompanies the masked vector.

    Attributes:
        plan: the plan's digest p.
        own: digest of b, the secret of the site's own mask; "" if only the whole cohort's sum can be revealed.
        pairs: for each partner, the digest of the secret that the site shares with it.
        rows: for each holder, the encrypted shares of all these secrets; empty if only the whole cohort's sum can be
            revealed.
        shares: for each holder, the digests of its shares, in the order of the row.
        vector: SHA-256 of the masked vector's bytes.
        next: the site's next prekey.
        signature: signature of the plan, the site and all fields above.
    """

    kind: Literal["attached"] = "attached"
    plan: Digest
    own: OptionalDigest
    pairs: PairDigests = Field(max_length=MOST_SITES)
    rows: dict[Name, Row] = Field(max_length=MOST_HOLDERS)
    shares: dict[Name, Annotated[tuple[ShareDigest, ...], Field(max_length=1 + MOST_NEIGHBORS, strict=False)]] = Field(
        max_length=MOST_HOLDERS
    )
    vector: Digest
    next: Prekey
    signature: Signature

    def text(self, site: str) -> bytes:
        """Return the bytes that the site signs."""
        return protocol_context("upload", self.plan, site, _unsigned_digest(self))


class AgreeRequest(SecAggMessage):
    """Asks a site to sign the only list of the sites in a sum; the answer is an `AgreeResponse`.

    Attributes:
        table: the text of the table of entries; "" if the plan has none.
    """

    kind: Literal["agree"] = "agree"
    plan: AttemptPlan
    table: str = Field(max_length=_MOST_TABLE)
    in_sum: tuple[Name, ...] = Field(max_length=MOST_SITES, strict=False)


class AgreeResponse(SecAggMessage):
    """A site's signature of a list.

    Attributes:
        plan: the plan's digest p.
        list: the list's digest L.
    """

    kind: Literal["agreed"] = "agreed"
    plan: Digest
    list: Digest
    signature: Signature


class OpenRequest(SecAggMessage):
    """Asks a holder for its shares of the sites in a sum; the answer is an `OpenResponse`.

    Attributes:
        agreed: signatures of the list, by site; empty if the list is the whole cohort.
        rows: rows of shares for this holder, by the site that made them.
    """

    kind: Literal["open"] = "open"
    plan: AttemptPlan
    table: str = Field(max_length=_MOST_TABLE)
    in_sum: tuple[Name, ...] = Field(max_length=MOST_SITES, strict=False)
    agreed: dict[Name, Signature] = Field(max_length=MOST_SITES)
    rows: dict[Name, Row] = Field(max_length=MOST_HOLDERS)


class OpenResponse(SecAggMessage):
    """A holder's shares.

    Attributes:
        plan: the plan's digest p.
        list: the list's digest L.
        own: for each site in the sum, the share of its own mask's secret.
        pairs: for each site in the sum and each of its silent partners, the share of the pair's secret.
        unread: sites whose rows could not be decrypted.
        signature: signature of the plan, the list, the holder and all fields above.
    """

    kind: Literal["opened"] = "opened"
    plan: Digest
    list: Digest
    own: dict[Name, Share] = Field(max_length=MOST_HOLDERS)
    pairs: dict[Name, Annotated[dict[Name, Share], Field(max_length=MOST_NEIGHBORS)]] = Field(max_length=MOST_HOLDERS)
    unread: tuple[Name, ...] = Field(max_length=MOST_HOLDERS, strict=False)
    signature: Signature

    def text(self, holder: str) -> bytes:
        """Return the bytes that the holder signs."""
        return protocol_context("opened", self.plan, self.list, holder, _unsigned_digest(self))


def _unsigned_digest(statement: UploadAttachment | OpenResponse) -> str:
    unsigned = statement.model_copy(update={"signature": ""})
    return hashlib.sha256(unsigned.to_bytes()).hexdigest()


def sign_statement(statement: A, site: str, signing_key: bytes) -> A:
    """Return the statement, signed by `site`."""
    signature = crypto.sign_bytes(signing_key, statement.text(site)).hex()
    return statement.model_copy(update={"signature": signature})


def is_signed_by(statement: UploadAttachment | OpenResponse, member: Prekey) -> bool:
    """Return whether the member of a plan signed the statement."""
    key, signature = bytes.fromhex(member.signing_key), bytes.fromhex(statement.signature)
    return crypto.is_signed(key, signature, statement.text(member.site))


SecAggRequest = KeysRequest | AgreeRequest | OpenRequest

_REQUESTS: TypeAdapter[SecAggRequest] = TypeAdapter(Annotated[SecAggRequest, Field(discriminator="kind")])


def parse_request(data: bytes) -> SecAggRequest:
    """Parse a server's request to a site. Raises WireError for any other form."""
    if len(data) > MOST_BYTES:
        raise WireError(f"secure request: expected at most {MOST_BYTES} bytes, found {len(data)}")
    try:
        return _REQUESTS.validate_json(data)
    except ValidationError as error:
        raise describe_malformed("secure request", error) from None
