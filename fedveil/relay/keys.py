"""Keys for one end of a relay: a 32-byte secret, and the two public keys derived from it.

    relay.key    32 bytes, readable only by the owner
    relay.pub    "fedveil-relay-1 <64 hex digits> <64 hex digits>": Ed25519 to verify signatures, X25519 for encryption

Each end has the other end's relay.pub, and people at both ends compare the fingerprint over another channel.
Otherwise anyone who can replace the file unnoticed can impersonate the other end.
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

from fedveil import encrypted_files
from fedveil.errors import ConfigError
from fedveil.federation.secagg import crypto
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

SECRET, PUBLIC = "relay.key", "relay.pub"
_FORM = re.compile(r"fedveil-relay-1 ([0-9a-f]{64}) ([0-9a-f]{64})\n?")
_MOST_BYTES = 1024


def context_bytes(purpose: str, *parts: str) -> bytes:
    """Encode a purpose and its parts unambiguously: different parts never give the same bytes."""
    return json.dumps(["fedveil relay 1", purpose, *parts], separators=(",", ":")).encode()


@dataclass(frozen=True)
class PeerKeys:
    """The public keys of one end, known to the other end.

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
        """Return 16 hex digits that identify this end."""
        return self._digest.hex()[:16]

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint for people: a SHA-256 in ssh-keygen's format."""
        return "SHA256:" + base64.b64encode(self._digest).decode().rstrip("=")

    @property
    def _digest(self) -> bytes:
        return hashlib.sha256(str(self).encode()).digest()


@dataclass(frozen=True)
class EndpointSecret:
    """The secret of one end.

    Attributes:
        key: 32 bytes.
    """

    key: bytes = field(repr=False)

    @property
    def public(self) -> PeerKeys:
        """Return the public keys."""
        return PeerKeys(crypto.verifying_key(self.signing), crypto.public_key_of(self.opening))

    @property
    def signing(self) -> bytes:
        """Return the private Ed25519 key."""
        return crypto.derive_key(self.key, context_bytes("signing"))

    @property
    def opening(self) -> bytes:
        """Return the private X25519 key."""
        return crypto.derive_key(self.key, context_bytes("sealing"))

    @classmethod
    def from_file(cls, file: Path) -> Self:
        """Read a key file. Raises ConfigError if it is not a relay key, or if others can read it."""
        return cls(
            encrypted_files.read_key_file(file, "--relay-key", "make one with fedveil relay init", "fedveil relay init")
        )


def make_keys(folder: Path) -> PeerKeys:
    """Write relay.key and relay.pub. Raises ConfigError if a key exists, because messages encrypted for it need it."""
    secret = folder / SECRET
    if secret.exists():
        raise ConfigError(f"{secret}: a key already exists; move it away, and give the other end the new public key")
    write_atomic(secret, os.urandom(crypto.KEY_BYTES))
    public = EndpointSecret.from_file(secret).public
    (folder / PUBLIC).write_text(f"{public}\n")
    return public


def read_public(file: Path) -> PeerKeys:
    """Read the other end's relay.pub. Raises ConfigError for an invalid file."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"--peer: cannot read the other end's {PUBLIC} at {file} ({type(error).__name__}); "
            "make it there with fedveil relay init"
        ) from None
    match = _FORM.fullmatch(text)
    public = PeerKeys(*map(bytes.fromhex, match.groups())) if match else None
    if public is None or not crypto.is_point(public.sealing):
        raise ConfigError(
            f'--peer: expected {file} to contain "fedveil-relay-1" and two keys of 64 hex digits, found '
            f"{sanitize(text, 60)!r}; copy the other end's {PUBLIC} again"
        )
    return public
