"""The sites of a run with their keys, and the holders of their shares. Sites sign with their signing keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property

from pydantic import Field, model_validator

from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.schema import (
    MOST_SITES,
    ClosedShare,
    Digest,
    Key,
    Name,
    Number,
    SecAggMessage,
    ShareDigest,
    Signature,
)


class RunMember(SecAggMessage):
    """A site with the key to which shares for it are encrypted in one run.

    Attributes:
        signing_key: Ed25519 key by which the other sites know it.
        run_key: X25519.
        signature: signature of run, name and run key.
    """

    name: Name
    signing_key: Key
    run_key: Key
    signature: Signature

    def text(self, run: str) -> bytes:
        """Return the bytes that the member signs."""
        return crypto.context_bytes("run key", run, self.name, self.run_key)

    def is_genuine(self, run: str) -> bool:
        """Return whether the run key is valid and signed by the owner of the signing key."""
        return _is_signed(self.signing_key, self.signature, self.text(run)) and _is_point(self.run_key)


class RunMembership(SecAggMessage):
    """The sites that hold shares of each other's secrets.

    Attributes:
        run: its name with its id.
        neighbours: k, the number of sites with which a site has masks and shares; 0 means all, including itself.
        threshold: t, the number of shares that reconstruct a secret.
        members: sorted by name.
    """

    run: Name
    neighbours: int = Field(ge=0, le=MOST_SITES)
    threshold: int = Field(ge=1, le=MOST_SITES)
    members: tuple[RunMember, ...] = Field(min_length=1, max_length=MOST_SITES, strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> RunMembership:
        names = [member.name for member in self.members]
        if names != sorted(set(names)):
            raise ValueError("expected each name once, sorted")
        if self.neighbours % 2 or self.neighbours >= len(names):
            raise ValueError("expected an even number of neighbors, below the number of members")
        if self.threshold > self.count:
            raise ValueError("expected a threshold of at most the holders")
        return self

    @property
    def count(self) -> int:
        """Return N, the number of holders of each site's secrets."""
        return self.neighbours or len(self.members)

    @cached_property
    def by_name(self) -> Mapping[str, RunMember]:
        """Return the members by name."""
        return {member.name: member for member in self.members}

    @cached_property
    def _circle(self) -> list[str]:
        """Return the members in an order determined by all their run keys together."""
        place = {
            name: hashlib.sha256(crypto.context_bytes("circle", self.digest, name)).digest() for name in self.by_name
        }
        return sorted(self.by_name, key=lambda name: place[name])

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self._circle)}

    def holders(self, site: str) -> list[str]:
        """Return the holders of shares of a site's secrets, sorted: all members, or its neighbors on the circle."""
        if not self.neighbours:
            return list(self.by_name)
        at, half = self._place[site], self.neighbours // 2
        offsets = [*range(-half, 0), *range(1, half + 1)]
        return sorted(self._circle[(at + offset) % len(self._circle)] for offset in offsets)


class RoundPrekey(SecAggMessage):
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
        """Return the bytes that the site signs; `membership` is the membership's digest."""
        return crypto.context_bytes("prekey", membership, self.site, self.number, self.key, self.shares)

    def is_genuine(self, membership: RunMembership) -> bool:
        """Return whether the prekey is valid and the member of that name signed it for this membership."""
        member, text = membership.by_name.get(self.site), self.text(membership.digest)
        return member is not None and _is_signed(member.signing_key, self.signature, text) and _is_point(self.key)


class EncryptedShares(SecAggMessage):
    """Shares of one secret.

    Attributes:
        closed: by holder, each encrypted to its holder.
        digests: by holder, to detect a wrong share before it is used.
    """

    closed: dict[Name, ClosedShare] = Field(max_length=MOST_SITES)
    digests: dict[Name, ShareDigest] = Field(max_length=MOST_SITES)

    def are_for(self, holders: list[str]) -> bool:
        """Return whether exactly these holders, sorted, have a share each."""
        return list(self.closed) == holders == list(self.digests)


class PrekeyBundle(SecAggMessage):
    """A prekey with the shares of its seed."""

    prekey: RoundPrekey
    shares: EncryptedShares


class SigningKeyRoster(SecAggMessage):
    """The signing keys of all sites of a federation.

    Attributes:
        signing_keys: by name.
    """

    signing_keys: dict[Name, Key] = Field(max_length=MOST_SITES)


def roster_digest(roster: Mapping[str, str]) -> str:
    """Return the digest of names and signing keys, by which sites refer to a roster."""
    return "sha256:" + hashlib.sha256(crypto.context_bytes("roster", json.dumps(sorted(roster.items())))).hexdigest()


def _is_signed(key: str, signature: str, text: bytes) -> bool:
    return crypto.is_signed(bytes.fromhex(key), bytes.fromhex(signature), text)


def _is_point(key: str) -> bool:
    return crypto.is_point(bytes.fromhex(key))
