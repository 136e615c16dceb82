"""Signed messages as evidence: the claims and signature from an audit log line, in a file that anyone can check.

    {"signature": 128 hex digits, "statement": "fedveil reply 1\\n{...}"}

`statement` is the signed text, in ASCII. A checker needs only this file and the signer's public key, not the log or a
FedVeil state folder.

Formal guarantee, as long as Ed25519 is secure: a file that verifies under a public key was signed by the holder of the
private key, who cannot deny the message that it names. It does not show that the message arrived or counted.

| file | result |
|---|---|
| a different public key, a changed byte in the statement or the signature | EvidenceError: not signed by this key |
| text signed by the key that is neither an instruction nor a reply (a request to register, a run) | EvidenceError |
| claims with missing or extra fields, in a different order, with spaces, or with a duplicate name | EvidenceError |
| a public key of small order, which verifies for many messages | EvidenceError: not signed by this key |
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.errors import WireError
from fedveil.federation.message_signatures.claims import InstructionClaims, ReplyClaims
from fedveil.federation.secagg import crypto
from fedveil.sanitize import sanitize

MOST_BYTES = 1 << 16  # maximum file size; the longest claims in a log take a quarter of it
_IN_LINE = {"instruction": InstructionClaims, "signed": ReplyClaims}  # the log line's field for each kind of claims
_SIGNATURE, _KEY = re.compile(r"[0-9a-f]{128}"), re.compile(r"[0-9a-f]{64}")


class EvidenceError(WireError):
    """A line without a signed message, or a file that does not prove what it should."""


@dataclass(frozen=True)
class Evidence:
    """A signed message.

    Attributes:
        claims: the signer's statements about the message.
        signature: 128 hex digits.
    """

    claims: InstructionClaims | ReplyClaims
    signature: str

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Evidence:
        """Return the signed message in an audit log line. Raises EvidenceError if there is none."""
        for field, kind in _IN_LINE.items():
            if field in line:
                return cls._from_fields(kind, line[field])
        raise EvidenceError(
            f"line {sanitize(line.get('n'), 20)}, {sanitize(line.get('event'), 40)}: it has no signed message; if "
            'messages are signed, they are in a site\'s "admitted" lines and a server\'s "accepted" lines'
        )

    @classmethod
    def _from_fields(cls, kind: type[InstructionClaims] | type[ReplyClaims], fields: Any) -> Evidence:
        names = {field.name for field in dataclasses.fields(kind)}
        if not isinstance(fields, Mapping) or set(fields) != names | {"key", "signature"}:
            raise EvidenceError("evidence: the fields are not those of one message's claims with key and signature")
        signature = fields["signature"]
        if type(signature) is not str or not _SIGNATURE.fullmatch(signature):
            raise EvidenceError("evidence: signature: expected 128 hex digits")
        claims = {field.name: fields[field.name] for field in dataclasses.fields(kind)}
        kinds = {field.name: int if field.type == "int" else str for field in dataclasses.fields(kind)}
        if any(type(claims[name]) is not kinds[name] for name in kinds):
            raise EvidenceError(
                "evidence: a claim has the wrong type; each must be text or a whole number, as its kind requires"
            )
        made = cls(kind(**claims), signature)
        made.claims.signed_bytes()  # raises WireError for a value without a canonical form
        return made

    @classmethod
    def from_json(cls, text: bytes) -> Evidence:
        """Return the signed message in a file. Raises EvidenceError unless the file has the form `to_json` writes."""
        try:
            content: Any = json.loads(text) if len(text) <= MOST_BYTES else {}
            statement, signature = content["statement"], content["signature"]
            kinds: tuple[type[InstructionClaims] | type[ReplyClaims], ...] = (InstructionClaims, ReplyClaims)
            kind = next(kind for kind in kinds if statement.startswith(kind.PURPOSE))
            fields = json.loads(statement.removeprefix(kind.PURPOSE))
            made = cls._from_fields(kind, {**fields, "key": "", "signature": signature})
            right = made.to_json().encode() == text.strip()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StopIteration, WireError):
            right = False
        if not right:
            raise EvidenceError(
                "evidence: this is not a file written by `fedveil log prove`, or it was changed; copy it unchanged"
            )
        return made

    def to_json(self) -> str:
        """Return the file's text, without a trailing newline."""
        statement = self.claims.signed_bytes().decode("ascii")
        return json.dumps({"signature": self.signature, "statement": statement}, sort_keys=True, indent=1)

    def require_signer(self, public: str) -> None:
        """Raise EvidenceError unless the holder of a public key, 64 hex digits, signed these claims."""
        if not _KEY.fullmatch(public):
            raise EvidenceError("key: expected 64 hex digits; copy the whole public key")
        if not crypto.is_signed(bytes.fromhex(public), bytes.fromhex(self.signature), self.claims.signed_bytes()):
            raise EvidenceError(
                f"evidence: the key {public[:16]}... did not sign this message: the message was changed, or another "
                "key signed it"
            )
