"""The signing keys of all sites in a federation, which let sites verify each other's keys without trusting the
server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from pydantic import Field

from fedveil.federation.secagg import crypto
from fedveil.federation.secagg.schema import MOST_SITES, Key, Name, SecAggMessage


class SigningKeyRoster(SecAggMessage):
    """The signing keys of all sites in a federation.

    Attributes:
        signing_keys: signing keys by site name.
    """

    signing_keys: dict[Name, Key] = Field(max_length=MOST_SITES)


def roster_digest(roster: Mapping[str, str]) -> str:
    """Return the digest of names and signing keys that policies and plans use to refer to a roster."""
    return "sha256:" + hashlib.sha256(crypto.context_bytes("roster", json.dumps(sorted(roster.items())))).hexdigest()
