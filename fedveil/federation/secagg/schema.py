"""The form of all messages between sites except the vectors: JSON with fixed fields, bounded before it is read.

Keys, shares and signatures are hex digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import override

from fedveil.errors import WireError
from fedveil.sanitize import sanitize

MOST_BYTES = 64 << 20
MOST_SITES = 10_000
ALL_PAIRS = 100  # number of sites up to which each site has a mask with every other site
MOST_NEIGHBORS = 254  # a share has one of 255 places
MOST_HOLDERS = MOST_NEIGHBORS  # maximum number of holders of one site's secrets
MOST_ROW_BYTES = 12 + 16 * (1 + MOST_NEIGHBORS) + 16  # nonce, shares of a site's own secret and of its pairs', tag

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Key
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Share = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
ShareDigest = Share
Row = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", min_length=88, max_length=2 * MOST_ROW_BYTES)]
Number = Annotated[int, Field(ge=0, lt=1 << 53)]
RosterDigest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]

S = TypeVar("S", bound="SecAggMessage")


class SecAggMessage(BaseModel):
    """A value of a fixed form."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @override
    def model_copy(self: S, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> S:
        """Return a copy, without the cached digest of the original."""
        copy = super().model_copy(update=update, deep=deep)
        for name in set(copy.__dict__) - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy

    def to_bytes(self) -> bytes:
        """Return the canonical JSON encoding."""
        return json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls: type[S], data: bytes | memoryview) -> S:
        """Parse the message. Raises WireError if the data do not match this schema."""
        if len(data) > MOST_BYTES:
            raise WireError(f"{cls.__name__}: expected at most {MOST_BYTES} bytes, found {len(data)}")
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError as error:
            raise describe_malformed(cls.__name__, error) from None

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the encoding."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def describe_malformed(what: str, error: ValidationError) -> WireError:
    """Return an error that describes the problem without the offending value."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = sanitize(".".join(map(str, first["loc"])), 100)
    return WireError(f"{what}: {where}: malformed ({first['type']})")
