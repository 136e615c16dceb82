"""What goes between the sites, through the server, beside the vectors.

Every statement is JSON of a fixed form, bounded before it is read; what is signed is signed by a site's signing key.
Keys, shares and signatures are hex digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedveil.errors import WireError
from fedveil.federation.secure import keys
from fedveil.foreign import shown

if TYPE_CHECKING:
    from fedveil.federation.secure.ring import Ring

MOST_BYTES = 64 << 20
MOST_SITES = 10_000
ALL_PAIRS = 32  # sites up to which everybody has a mask with everybody

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Key
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Share = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
ClosedShare = Annotated[str, Field(pattern=r"^[0-9a-f]{88}$")]  # nonce, share and tag
Number = Annotated[int, Field(ge=0, lt=1 << 53)]


S = TypeVar("S", bound="Statement")


class Statement(BaseModel):
    """A value of a fixed form."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """The one text of it."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def of(cls: type[S], data: bytes | memoryview) -> S:
        """The statement in these bytes. Raises WireError for another form."""
        if len(data) > MOST_BYTES:
            raise WireError(f"{cls.__name__}: expected at most {MOST_BYTES} bytes, found {len(data)}")
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError as error:
            raise _malformed(cls.__name__, error) from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


class Member(Statement):
    """A site with the key to which shares are closed for it in one run.

    Attributes:
        signing_key: Ed25519, by which the other sites know it.
        run_key: X25519.
        signature: of run, name and run key.
    """

    name: Name
    signing_key: Key
    run_key: Key
    signature: Signature

    def text(self, run: str) -> bytes:
        """What is signed."""
        return keys.about("run key", run, self.name, self.run_key)

    def is_genuine(self, run: str) -> bool:
        """Whether the owner of the signing key has said so, of a key that is one."""
        return _is_signed(self.signing_key, self.signature, self.text(run)) and _is_point(self.run_key)


class Membership(Statement):
    """The holders of each other's shares.

    Attributes:
        run: its name with its id.
        neighbours: k, sites with which a site has masks and shares; 0 = all, itself among them.
        threshold: t, shares that open a secret.
        members: sorted by name.
    """

    run: Name
    neighbours: int = Field(ge=0, le=MOST_SITES)
    threshold: int = Field(ge=1, le=MOST_SITES)
    members: tuple[Member, ...] = Field(min_length=1, max_length=MOST_SITES, strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> Membership:
        names = [member.name for member in self.members]
        if names != sorted(set(names)):
            raise ValueError("expected each name once, sorted")
        if self.neighbours % 2 or self.neighbours >= len(names):
            raise ValueError("expected an even number of neighbours, below the number of members")
        if self.threshold > self.count:
            raise ValueError("expected a threshold of at most the holders")
        return self

    @property
    def count(self) -> int:
        """N: holders of each site's secrets."""
        return self.neighbours or len(self.members)

    @cached_property
    def by_name(self) -> Mapping[str, Member]:
        """The members by name."""
        return {member.name: member for member in self.members}

    @cached_property
    def _circle(self) -> list[str]:
        """The members in an order that all their run keys decide together."""
        place = {name: hashlib.sha256(keys.about("circle", self.digest, name)).digest() for name in self.by_name}
        return sorted(self.by_name, key=lambda name: place[name])

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self._circle)}

    def holders(self, site: str) -> list[str]:
        """Who holds shares of a site's secrets, sorted: all members, or its neighbours on the circle."""
        if not self.neighbours:
            return list(self.by_name)
        at, half = self._place[site], self.neighbours // 2
        offsets = [*range(-half, 0), *range(1, half + 1)]
        return sorted(self._circle[(at + offset) % len(self._circle)] for offset in offsets)


class Prekey(Statement):
    """The public half of a key with which a site masks in one round, and no other.

    Attributes:
        number: counts the site's prekeys in the run; a later one has a higher number.
        key: X25519.
        shares: digest of the closed shares of its seed.
        signature: of all this and the membership.
    """

    site: Name
    number: Number
    key: Key
    shares: Digest
    signature: Signature

    def text(self, membership: str) -> bytes:
        """What is signed; `membership`: its digest."""
        return keys.about("prekey", membership, self.site, self.number, self.key, self.shares)

    def is_genuine(self, membership: Membership) -> bool:
        """Whether the member of that name has said so for this membership, of a key that is one."""
        member, text = membership.by_name.get(self.site), self.text(membership.digest)
        return member is not None and _is_signed(member.signing_key, self.signature, text) and _is_point(self.key)


class Shares(Statement):
    """Shares of one secret, each closed to its holder."""

    closed: dict[Name, ClosedShare] = Field(max_length=MOST_SITES)


class Bundle(Statement):
    """A prekey with the shares of its seed."""

    prekey: Prekey
    shares: Shares


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
    def ring(self) -> Ring:
        """Of its vectors. Raises WireError where no sum of so many sites fits."""
        from fedveil.federation.secure.ring import Ring  # it needs torch, which opening a share does not

        try:
            return Ring(self.bits, len(self.prekeys), self.most_weight, self.bound)
        except ValueError as error:
            raise WireError(f"secure: {error}") from None

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


class Roster(Statement):
    """The signing keys of all sites of a federation.

    Attributes:
        signing_keys: by name.
    """

    signing_keys: dict[Name, Key] = Field(max_length=MOST_SITES)


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
        raise _malformed("question", error) from None


def _malformed(what: str, error: ValidationError) -> WireError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = shown(".".join(map(str, first["loc"])), 100)
    return WireError(f"{what}: {where}: expected another form of it ({first['type']})")


def roster_digest(roster: Mapping[str, str]) -> str:
    """The digest of names and signing keys, by which sites tell each other which roster they mean."""
    return "sha256:" + hashlib.sha256(keys.about("roster", json.dumps(sorted(roster.items())))).hexdigest()


def _is_signed(key: str, signature: str, text: bytes) -> bool:
    return keys.is_signed(bytes.fromhex(key), bytes.fromhex(signature), text)


def _is_point(key: str) -> bool:
    return keys.is_point(bytes.fromhex(key))
