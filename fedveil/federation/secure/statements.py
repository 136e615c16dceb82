"""What a server asks of sites, and what they answer, beside the vectors."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from fedveil.errors import WireError
from fedveil.federation.secure import keys
from fedveil.federation.secure.forms import (
    MOST_BYTES,
    MOST_SITES,
    ClosedShare,
    Digest,
    Key,
    Name,
    Number,
    Share,
    Statement,
    malformed,
)
from fedveil.federation.secure.membership import Bundle, Membership, Prekey, Shares


class Plan(Statement):
    """An attempt at a round, the same for all of its sites; its digest is the context of all that it is for.

    Attributes:
        membership: its digest.
        bits, most_weight, bound: of the ring; its most summands are the cohort's sites.
        least: sites that a sum must have.
        prekeys: of the cohort's sites, sorted by name.
    """

    run: Name
    round: Number
    attempt: Number
    membership: Digest
    bits: Literal[32, 64]
    most_weight: int = Field(ge=1, le=100_000_000)
    bound: float = Field(gt=0, le=1e9)
    least: int = Field(ge=1, le=MOST_SITES)
    prekeys: tuple[Prekey, ...] = Field(min_length=1, max_length=MOST_SITES, strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.cohort != sorted(set(self.cohort)):
            raise ValueError("expected each site once, sorted")
        return self

    @property
    def cohort(self) -> list[str]:
        """The names of its sites."""
        return [prekey.site for prekey in self.prekeys]

    def prekey_of(self, site: str) -> Prekey | None:
        """The prekey of a site; None if it is not in the cohort."""
        return next((prekey for prekey in self.prekeys if prekey.site == site), None)


class Attached(Statement):
    """What an upload carries beside the masked vector.

    Attributes:
        mask: digest of b, the secret of the site's own mask, so that the one that is rebuilt can be checked.
        shares: of b.
        next: the site's next prekey.
    """

    mask: Digest
    shares: Shares
    next: Bundle | None


class Hello(Statement):
    """Asks a site for its run key; the answer is a `Member`."""

    kind: Literal["hello"] = "hello"
    run: Name


class Setup(Statement):
    """Asks a member for a prekey; the answer is a `Bundle`.

    Attributes:
        roster: signing keys of all sites of the federation by name, connected or not.
    """

    kind: Literal["setup"] = "setup"
    membership: Membership
    roster: dict[Name, Key] = Field(max_length=MOST_SITES)


class Unmask(Statement):
    """Asks a holder for its shares; the answer is `Opened`.

    Attributes:
        heard: shares of b of the sites that are in the sum, closed to this holder.
        silent: shares of the prekeys' seeds of the cohort's other sites.
    """

    kind: Literal["unmask"] = "unmask"
    plan: Plan
    in_sum: tuple[Name, ...] = Field(max_length=MOST_SITES, strict=False)
    heard: dict[Name, ClosedShare] = Field(max_length=MOST_SITES)
    silent: dict[Name, ClosedShare] = Field(max_length=MOST_SITES)

    @cached_property
    def context(self) -> str:
        """The digest of plan and sum: what a holder answers once."""
        return hashlib.sha256(keys.about("sum", self.plan.digest, *sorted(self.in_sum))).hexdigest()


class Opened(Statement):
    """A holder's shares."""

    heard: dict[Name, Share] = Field(max_length=MOST_SITES)
    silent: dict[Name, Share] = Field(max_length=MOST_SITES)


_QUESTIONS: TypeAdapter[Hello | Setup | Unmask] = TypeAdapter(
    Annotated[Hello | Setup | Unmask, Field(discriminator="kind")]
)


def question_of(data: bytes) -> Hello | Setup | Unmask:
    """What a server asks a site. Raises WireError for another form."""
    if len(data) > MOST_BYTES:
        raise WireError(f"question: expected at most {MOST_BYTES} bytes, found {len(data)}")
    try:
        return _QUESTIONS.validate_json(data)
    except ValidationError as error:
        raise malformed("question", error) from None
