"""The keys of one end of a relay: one secret of 32 bytes, and the two public keys that follow from it.

    relay.key    32 bytes, which only its owner can read
    relay.pub    "fedveil-relay-1 <64 hex digits> <64 hex digits>": Ed25519 to check signatures, X25519 to seal for it

Each end has the other's relay.pub, and both people have compared the fingerprint over another way: whoever can exchange
the file unseen can stand in the other end's place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fedveil import sealed
from fedveil.errors import ConfigError
from fedveil.federation.secure import keys
from fedveil.foreign import shown
from fedveil.records.files import write_atomic

SECRET, PUBLIC = "relay.key", "relay.pub"
_FORM = re.compile(r"fedveil-relay-1 ([0-9a-f]{64}) ([0-9a-f]{64})\n?")
_MOST_BYTES = 1024


def about(purpose: str, *parts: str) -> bytes:
    """One text of a purpose and its parts, such that different parts never give the same one."""
    return json.dumps(["fedveil relay 1", purpose, *parts], separators=(",", ":")).encode()


@dataclass(frozen=True)
class Public:
    """What the other end knows.

    Attributes:
        verifying: Ed25519, 32 bytes.
        sealing: X25519, 32 bytes.
    """

    verifying: bytes
    sealing: bytes

    def __str__(self) -> str:
        return f"fedveil-relay-1 {self.verifying.hex()} {self.sealing.hex()}"

    @property
    def id(self) -> str:
        """16 hex digits that tell this end from others."""
        return self._digest.hex()[:16]

    @property
    def fingerprint(self) -> str:
        """For people: SHA-256 in the form that ssh-keygen has."""
        return "SHA256:" + base64.b64encode(self._digest).decode().rstrip("=")

    @property
    def _digest(self) -> bytes:
        return hashlib.sha256(str(self).encode()).digest()


@dataclass(frozen=True)
class Secret:
    """What one end alone has.

    Attributes:
        key: 32 bytes.
    """

    key: bytes = field(repr=False)

    @property
    def public(self) -> Public:
        """Its public half."""
        return Public(keys.verifying_key(self.signing), keys.public_of(self.opening))

    @property
    def signing(self) -> bytes:
        """The private Ed25519 key."""
        return keys.derived(self.key, about("signing"))

    @property
    def opening(self) -> bytes:
        """The private X25519 key."""
        return keys.derived(self.key, about("sealing"))

    @classmethod
    def of(cls, file: Path) -> Self:
        """Raises ConfigError for a file that is no such key, or that others can read."""
        return cls(sealed.read_key(file, "--relay-key", "fedveil relay init makes one", "fedveil relay init"))


def make(folder: Path) -> Public:
    """Writes relay.key and relay.pub. Raises ConfigError where there is one: what was sealed for it needs it."""
    secret = folder / SECRET
    if secret.exists():
        raise ConfigError(f"{secret}: expected none yet, found one; move it away, and give the other end the new half")
    write_atomic(secret, os.urandom(keys.KEY_BYTES))
    public = Secret.of(secret).public
    (folder / PUBLIC).write_text(f"{public}\n")
    return public


def read_public(file: Path) -> Public:
    """The other end's relay.pub. Raises ConfigError for a file that is none."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"--peer: expected the other end's {PUBLIC}, found none at {file} ({type(error).__name__}); "
            "fedveil relay init makes it there"
        ) from None
    found = _FORM.fullmatch(text)
    public = Public(*map(bytes.fromhex, found.groups())) if found else None
    if public is None or not keys.is_point(public.sealing):
        raise ConfigError(
            f'--peer: expected {file} to hold "fedveil-relay-1" and two keys of 64 hex digits, found '
            f"{shown(text, 60)!r}; copy the other end's {PUBLIC} anew"
        )
    return public
