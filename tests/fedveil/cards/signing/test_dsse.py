"""DSSE: the signed bytes, and the detection of any change to an envelope."""

from __future__ import annotations

import base64
import hashlib
import json
import random

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedveil.cards.signing import dsse, keys
from fedveil.errors import StateError

PAYLOAD = json.dumps({"a": "x" * 50, "b": [1, 2]}).encode()
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2)]
KNOWN = {keys.key_fingerprint(key.public_key()): key.public_key() for key in KEYS}


def both() -> dsse.DsseEnvelope:
    return dsse.sign_payload("application/x", PAYLOAD, KEYS[1], dsse.sign_payload("application/x", PAYLOAD, KEYS[0]))


def test_pae_is_that_of_the_specification():
    assert dsse.pre_auth_encoding("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert dsse.pre_auth_encoding("", b"") == b"DSSEv1 0  0 "
    assert dsse.pre_auth_encoding("\u00e9", b"a b") == b"DSSEv1 2 \xc3\xa9 3 a b"  # bytes are counted, not characters


def twin(data: bytes, public: bytes) -> bytes:
    """Another reader of DSSE, from its specification: the payload, if that raw key signed it."""
    about = json.loads(data)
    kind, payload = about["payloadType"].encode(), base64.standard_b64decode(about["payload"])
    text = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])
    for signature in about["signatures"]:
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(base64.standard_b64decode(signature["sig"]), text)
        except Exception:
            continue
        return payload
    raise ValueError("not signed")


def test_another_reader_finds_each_signature_and_no_other():
    data = both().to_bytes()
    for key in KEYS:
        assert twin(data, key.public_key().public_bytes_raw()) == PAYLOAD
    with pytest.raises(ValueError, match="not signed"):
        twin(data, Ed25519PrivateKey.generate().public_key().public_bytes_raw())


def test_an_envelope_that_another_writer_signed_is_read():
    """Only its form must be ours."""
    public = KEYS[0].public_key()
    raw = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).split()[1]
    keyid = "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(raw)).digest()).decode().strip("=")
    sig = base64.b64encode(KEYS[0].sign(b"DSSEv1 13 application/x 2 {}")).decode()
    content = {"payload": "e30=", "payloadType": "application/x", "signatures": [{"keyid": keyid, "sig": sig}]}
    envelope = dsse.parse_envelope((json.dumps(content, indent=1, sort_keys=True) + "\n").encode(), "file")
    assert dsse.verified_signers(envelope, KNOWN) == ([keyid], [], [])


def holds(data: bytes) -> bool:
    """Whether both keys signed what is in the bytes, which are an envelope of that type."""
    try:
        envelope = dsse.parse_envelope(data, "file")
    except StateError:
        return False
    good, bad, unknown = dsse.verified_signers(envelope, KNOWN)
    return set(good) == set(KNOWN) and not bad and not unknown


def test_every_byte_counts():
    data, draw = both().to_bytes(), random.Random(3)
    assert holds(data)
    for at in range(len(data)):
        for mask in (1, 32, draw.randrange(1, 256)):
            assert not holds(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]), at
        assert not holds(data[:at] + data[at + 1 :]), at
    assert not holds(data + b"\n")


def test_base64_that_decodes_to_the_same_bytes_is_another_envelope():
    """64 bytes leave four bits of the last character free."""
    data, sig = both().to_bytes(), both().signatures[0].sig
    other = sig[:-3] + chr(ord(sig[-3]) + 1) + "=="
    assert base64.b64decode(other) == base64.b64decode(sig)
    assert not holds(data.replace(sig.encode(), other.encode()))


def test_a_second_signature_keeps_the_first_and_the_same_one_is_there_once():
    once = dsse.sign_payload("application/x", PAYLOAD, KEYS[0])
    assert dsse.sign_payload("application/x", PAYLOAD, KEYS[0], once) == once
    assert len(both().signatures) == 2
    assert dsse.verified_signers(both(), {}) == ([], [], sorted(KNOWN))


def test_a_signature_under_another_keys_name_is_bad():
    envelope = both()
    first, second = envelope.signatures
    swapped = [first.model_copy(update={"sig": second.sig}), second.model_copy(update={"sig": first.sig})]
    assert dsse.verified_signers(envelope.model_copy(update={"signatures": swapped}), KNOWN) == ([], sorted(KNOWN), [])


@pytest.mark.parametrize("data", [b"", b"[]", b"[" * 100_000, b"{}", b"\xff", b'{"payload": "e30="}'])
def test_what_is_no_envelope_is_refused(data):
    with pytest.raises(StateError, match="expected a DSSE envelope"):
        dsse.parse_envelope(data, "file")
