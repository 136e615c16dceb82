"""Signatures, key agreement, and encryption for a single holder. All ciphers come from the `cryptography` package.

A key is bound to its use: HKDF-SHA256 takes the purpose, the names of both ends and the context.
"""

from __future__ import annotations

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
_NONCE_BYTES = 12
# The y coordinates of the 8 small-order points on Ed25519's curve: 0, 1, -1 and two of order 8.
_PRIME = 2**255 - 19
_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
_SMALL_ORDER = frozenset((0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8))


def context_bytes(purpose: str, *parts: str | int) -> bytes:
    """Encode a purpose and its parts as bytes, so that different parts never give the same bytes."""
    return json.dumps(["fedveil secure aggregation 1", purpose, *parts], separators=(",", ":")).encode()


def derive_key(secret: bytes, purpose: bytes, salt: bytes = b"", length: int = KEY_BYTES) -> bytes:
    """Derive a key of `length` bytes for one purpose."""
    return HKDF(SHA256(), length, salt or None, purpose).derive(secret)


def public_key_of(private: bytes) -> bytes:
    """Return the public X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_point(public: bytes) -> bool:
    """Check that an X25519 key is fit for key agreement: a low-order point gives everyone the same shared key.

    Only one encoding of a key is accepted. X25519 ignores the highest bit and reduces modulo 2^255 - 19, so a copy of
    another site's key could otherwise look like a different key.
    """
    if int.from_bytes(public, "little") >= _PRIME:
        return False
    try:
        X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES)).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def exchange_keys(private: bytes, public: bytes) -> bytes:
    """Return the X25519 shared secret of both ends. Raises WireError for a low-order public key."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError("key: this X25519 public key is a point of low order; do not trust its sender") from None


def agree_secret(private: bytes, public: bytes, purpose: bytes, salt: bytes = b"") -> bytes:
    """Derive 32 bytes that both ends share. Raises WireError for a low-order public key."""
    return derive_key(exchange_keys(private, public), purpose, salt)


def encrypt_share(key: bytes, text: bytes, purpose: bytes) -> bytes:
    """Encrypt with AES-256-GCM; return nonce, ciphertext and tag. Decryption needs the same purpose."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, text, purpose)


def decrypt_share(key: bytes, data: bytes, purpose: bytes) -> bytes:
    """Decrypt a share. Raises WireError for a wrong key or purpose, or changed bytes."""
    try:
        return AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], purpose)
    except (InvalidTag, ValueError):
        raise WireError("share: it does not decrypt, so it was not encrypted for this holder and context") from None


def sign_bytes(signing_key: bytes, text: bytes) -> bytes:
    """Return the Ed25519 signature."""
    return Ed25519PrivateKey.from_private_bytes(signing_key).sign(text)


def verifying_key(signing_key: bytes) -> bytes:
    """Return the public half of a signing key."""
    return Ed25519PrivateKey.from_private_bytes(signing_key).public_key().public_bytes_raw()


def is_small_order(public: bytes) -> bool:
    """Return whether an Ed25519 key has small order or a non-canonical encoding.

    A single signature by such a key is valid for every text, so its owner can deny having signed any of them, but the
    library accepts it. The sign bit is ignored, because the library also accepts two encodings that are not points.
    """
    y = int.from_bytes(public, "little") & ~(1 << 255)
    return len(public) != KEY_BYTES or y >= _PRIME or y in _SMALL_ORDER


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether the signature is valid for this text and key; always False for a key of small order."""
    if is_small_order(public):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
