"""Signatures, agreed keys, and what one holder alone can read. All ciphers are of the package `cryptography`.

A key is bound to what it is for: HKDF-SHA256 takes the purpose, the names of both ends and the context.
"""

from __future__ import annotations

import hashlib
import json
import os

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedveil.errors import WireError

KEY_BYTES = 32
SEED_BYTES = 16
_NONCE_BYTES = 12


def about(purpose: str, *parts: str | int) -> bytes:
    """One text of a purpose and its parts, such that different parts never give the same one."""
    return json.dumps(["fedveil secure aggregation 1", purpose, *parts], separators=(",", ":")).encode()


def derived(secret: bytes, purpose: bytes, salt: bytes = b"") -> bytes:
    """32 bytes for one purpose."""
    return HKDF(SHA256(), KEY_BYTES, salt or None, purpose).derive(secret)


def private_of(seed: bytes) -> bytes:
    """The private X25519 key that a seed stands for."""
    return derived(seed, about("prekey"))


def public_of(private: bytes) -> bytes:
    """The public X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_point(public: bytes) -> bool:
    """Whether an X25519 key is one that two ends can agree by: with a point of low order, everybody has the same."""
    try:
        X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES)).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def agreed(private: bytes, public: bytes, purpose: bytes, salt: bytes = b"") -> bytes:
    """32 bytes that two ends agree on. Raises WireError for a public key that agrees with everybody's."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError("key: expected a point of X25519, found one of low order; do not trust its sender") from None
    return derived(shared, purpose, salt)


def closed(key: bytes, text: bytes, purpose: bytes) -> bytes:
    """AES-256-GCM: nonce, text, tag. Whoever opens it must name the same purpose."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, purpose)


def opened(key: bytes, data: bytes, purpose: bytes) -> bytes:
    """The text. Raises WireError where another key, purpose or byte is found."""
    try:
        return AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], purpose)
    except (InvalidTag, ValueError):
        raise WireError("share: expected one for this holder and context, found another") from None


def share_digest(share: bytes, purpose: bytes) -> str:
    """32 hex digits by which a share of that purpose is known again. Shares are drawn uniformly: it tells nothing."""
    return hashlib.sha256(purpose + share).hexdigest()[:32]


def signed(signing_key: bytes, text: bytes) -> bytes:
    """The Ed25519 signature."""
    return Ed25519PrivateKey.from_private_bytes(signing_key).sign(text)


def verifying_key(signing_key: bytes) -> bytes:
    """The public half of a signing key."""
    return Ed25519PrivateKey.from_private_bytes(signing_key).public_key().public_bytes_raw()


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the signature is that key's, of this text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
