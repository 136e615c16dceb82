"""DSSE: signatures over a payload and its type, several in one envelope (secure-systems-lab/dsse, protocol v1.0.2).

    PAE(type, payload) = "DSSEv1" SP LEN(type) SP type SP LEN(payload) SP payload        LEN: decimal, of bytes

The signature covers the PAE, not the JSON around it. DSSE does not prescribe the format of that JSON, and does not sign
key names. Here the JSON has a single canonical form, so that any changed byte is detected: sorted keys, an indent of
one space, canonical base64, and signatures sorted by `keyid`, which is the key's fingerprint.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.cards.signing import keys
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

MOST_BYTES = 32 << 20
_MOST_SIGNATURES = 1000


class DsseSignature(BaseModel):
    """One signature; `keyid` is the fingerprint of the key that made it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keyid: Annotated[str, Field(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]
    sig: Annotated[str, Field(max_length=88)]


class DsseEnvelope(BaseModel):
    """A payload with its signatures, as they appear in the JSON: `payload` and each `sig` are base64."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    payload: str
    payload_type: Annotated[str, Field(alias="payloadType", max_length=200)]
    signatures: Annotated[list[DsseSignature], Field(min_length=1, max_length=_MOST_SIGNATURES)]

    @property
    def content(self) -> bytes:
        """Return the payload's bytes."""
        return base64.b64decode(self.payload, validate=True)

    def to_bytes(self) -> bytes:
        """Return the canonical form of the envelope."""
        return json.dumps(self.model_dump(by_alias=True), indent=1, sort_keys=True).encode() + b"\n"


def pre_auth_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes to sign: DSSE's pre-authentication encoding of type and payload."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sign_payload(
    payload_type: str, payload: bytes, key: Ed25519PrivateKey, others: DsseEnvelope | None = None
) -> DsseEnvelope:
    """Sign the payload; keep the signatures in `others`, an envelope with the same payload."""
    name = keys.key_fingerprint(key.public_key())
    sig = base64.b64encode(key.sign(pre_auth_encoding(payload_type, payload))).decode()
    signature_by_key = {signature.keyid: signature for signature in (others.signatures if others else [])}
    signature_by_key[name] = DsseSignature(keyid=name, sig=sig)
    signatures = [signature_by_key[keyid] for keyid in sorted(signature_by_key)]
    encoded = base64.b64encode(payload).decode()
    return DsseEnvelope(payload=encoded, payload_type=payload_type, signatures=signatures)


def parse_envelope(data: bytes, where: str) -> DsseEnvelope:
    """Parse an envelope. Raises StateError unless it is in canonical form."""
    fault = ""
    if len(data) > MOST_BYTES:
        fault = f"more than {MOST_BYTES} bytes"
    else:
        try:
            envelope = DsseEnvelope.model_validate_json(data)
            names = [signature.keyid for signature in envelope.signatures]
            texts = [envelope.payload, *(signature.sig for signature in envelope.signatures)]
            right = all(base64.b64encode(base64.b64decode(text, validate=True)).decode() == text for text in texts)
            if right and names == sorted(set(names)) and envelope.to_bytes() == data:
                return envelope
            fault = "one in a different form"
        except (ValidationError, RecursionError, binascii.Error, ValueError) as error:
            fault = sanitize(error, 200)
    raise StateError(
        f"{where}: expected a DSSE envelope as written by fedveil card sign, found {fault}; it was changed: get a new "
        "copy"
    )


def verified_signers(
    envelope: DsseEnvelope, known: Mapping[str, Ed25519PublicKey]
) -> tuple[list[str], list[str], list[str]]:
    """Return key fingerprints: known keys with a valid signature, known keys with an invalid one, and unknown keys.

    Args:
        known: public keys by fingerprint.
    """
    text = pre_auth_encoding(envelope.payload_type, envelope.content)
    good, bad, unknown = list[str](), list[str](), list[str]()
    for signature in envelope.signatures:
        key = known.get(signature.keyid)
        if key is None:
            unknown.append(signature.keyid)
            continue
        try:
            key.verify(base64.b64decode(signature.sig), text)
            good.append(signature.keyid)
        except InvalidSignature:
            bad.append(signature.keyid)
    return good, bad, unknown
