"""The claims covered by the signature on an instruction or a reply, and their only encoding.

    signed = b"fedveil instruction 1\n" + canonical JSON of `InstructionClaims`
             b"fedveil reply 1\n"       + canonical JSON of `ReplyClaims`

Canonical JSON is one object with exactly the fields of the class, sorted, without spaces, in ASCII. Its values are
strings and whole numbers. The verifier builds the claims from values that it knows or has measured. A message never
contains claims, so nothing has to be parsed, and no message can state what its own signature covers.

Formal guarantees, as long as Ed25519 and SHA-256 are secure and the private keys stay secret, against an adversary that
controls the network, the SuperLink and every site but the signer:
- an instruction that verifies was made by the holder of the instruction key for this site, node, Flower run, round and
  attempt, with this bundle, run config, order and message;
- a reply that verifies was made by the holder of the site's signing key, in answer to exactly this instruction, which
  has its own nonce;
- a signature of one class does not verify for claims of the other, or for any other text that FedVeil signs.

| case | result |
|---|---|
| the key has small order | nothing verifies (fedveil.federation.secagg.crypto) |
| the signature record has a different version, key or type | WireError |
| the same instruction arrives twice | both verify; the site limits how often it answers an instruction (max-retries) |
| a value with a lone surrogate, or a number of 2^53 or more | WireError, before anything is signed |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fedveil.errors import WireError
from fedveil.federation.secagg import crypto
from fedveil.sanitize import sanitize

RECORD = "signature"  # name of the record that carries the signature in an instruction or a reply
VERSION = 1
CLOCK_SECONDS = 300  # maximum difference between a site's clock and the server's
KINDS = {"train": "train", "query.secure": "secure"}  # by Flower message type
_GREATEST = 1 << 53
_DOWN = {"version": int, "key": str, "signature": str, "issued": int, "until": int, "nonce": str}
_UP = {"version": int, "key": str, "signature": str}


class _Claims:
    """The common form of both classes. `PURPOSE` is the first line of the signed bytes."""

    PURPOSE: ClassVar[str]

    def signed_bytes(self) -> bytes:
        """Return the bytes that are signed. Raises WireError for a value without a canonical form."""
        values = self.as_evidence()
        for name, value in values.items():
            if type(value) is int and 0 <= value < _GREATEST:
                continue
            if type(value) is not str or not _is_text(value):
                raise WireError(f"signature: {name}: expected text or a number below 2^53, found {sanitize(value, 80)}")
        return self.PURPOSE.encode() + json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the signed bytes, 64 hex digits."""
        return hashlib.sha256(self.signed_bytes()).hexdigest()

    def as_evidence(self) -> dict[str, str | int]:
        """Return all fields by name, for a line of an audit log: the signature can be checked from it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class InstructionClaims(_Claims):
    """The claims of an instruction.

    Attributes:
        federation: 32 hex digits, drawn once for each federation.
        flower_run, node: Flower's IDs, in decimal, so that nothing from an earlier run or from before a resume counts.
        run, round, attempt, site: the instruction's values.
        kind: "train" or "secure", matching the Flower message type.
        app: SHA-256 of the bundle.
        config: digest of the flat run config.
        order, settings: digests of the records `order` and `config`.
        content: digest of the message.
        issued, until: seconds since 1970.
        nonce: 32 random hex digits, drawn for each instruction.
    """

    PURPOSE = "fedveil instruction 1\n"

    federation: str
    flower_run: str
    node: str
    run: str
    round: int
    attempt: int
    site: str
    kind: str
    app: str
    config: str
    order: str
    settings: str
    content: str
    issued: int
    until: int
    nonce: str


@dataclass(frozen=True)
class ReplyClaims(_Claims):
    """The claims of a reply.

    Attributes:
        federation .. app: as in the instruction that this reply answers.
        content: digest of the upload.
        instruction: digest of the instruction's claims.
        log: head of the site's audit log after the line about this reply, "LINES:HASH".
    """

    PURPOSE = "fedveil reply 1\n"

    federation: str
    flower_run: str
    node: str
    run: str
    round: int
    attempt: int
    site: str
    kind: str
    app: str
    content: str
    instruction: str
    log: str


def answer_claims(asked: InstructionClaims, content: str, log: str) -> ReplyClaims:
    """Return the claims of a reply to an instruction."""
    return ReplyClaims(
        asked.federation, asked.flower_run, asked.node, asked.run, asked.round, asked.attempt, asked.site, asked.kind,
        asked.app, content, asked.digest, log,
    )  # fmt: skip


def key_id(public: str) -> str:
    """Return the short name, 16 hex digits, of a hex public key."""
    return hashlib.sha256(b"fedveil key 1\n" + bytes.fromhex(public)).hexdigest()[:16]


def sign(claims: InstructionClaims | ReplyClaims, private: bytes) -> dict[str, str | int]:
    """Return the signature record, without an instruction's times and nonce. `private`: 32 bytes."""
    signature = crypto.sign_bytes(private, claims.signed_bytes())
    return {"version": VERSION, "key": key_id(crypto.verifying_key(private).hex()), "signature": signature.hex()}


def is_signed(claims: InstructionClaims | ReplyClaims, public: str, record: Mapping[str, Any]) -> bool:
    """Return whether a parsed signature record is a valid signature of these claims under a hex public key."""
    signature = bytes.fromhex(record["signature"])
    return bool(record["key"] == key_id(public)) and crypto.is_signed(
        bytes.fromhex(public), signature, claims.signed_bytes()
    )


def read_signature(record: Mapping[str, Any], is_instruction: bool) -> dict[str, Any]:
    """Check the form of a signature record, not the signature itself, and return the record. Raises WireError."""
    form = _DOWN if is_instruction else _UP
    if set(record) != set(form) or any(type(record[name]) is not kind for name, kind in form.items()):
        raise WireError(f"signature: the record does not consist of {', '.join(form)}")
    if record["version"] != VERSION:
        raise WireError(f"signature: version: expected {VERSION}, found {record['version']}")
    lengths = {"key": 16, "signature": 128, "nonce": 32}
    if any(not _is_hex(record[name], length) for name, length in lengths.items() if name in form):
        raise WireError("signature: key, signature and nonce must be hexadecimal digits of the right length")
    return dict(record)


def _is_hex(text: str, length: int) -> bool:
    return len(text) == length and not set(text) - set("0123456789abcdef")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
