"""Read Ed25519 keys from files, in the format of `ssh-keygen -t ed25519` or in PEM, with the package `cryptography`."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

_MOST_BYTES = 1 << 16
_MAKE = 'create one with ssh-keygen -t ed25519 -N "" -f key'


def read_private_key(file: Path) -> Ed25519PrivateKey:
    """Read the private key in a file.

    Raises ConfigError if it is another kind of key, has a passphrase, or is not a key.
    """
    data = _read(file)
    try:
        if b"BEGIN OPENSSH PRIVATE KEY" in data:
            key: object = serialization.load_ssh_private_key(data, None)
        else:
            key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _bad(file, "private key without a passphrase", sanitize(error, 200)) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _bad(file, "private key", type(key).__name__)
    return key


def read_public_key(file: Path) -> Ed25519PublicKey:
    """Read the public key in a file. Raises ConfigError if it is another kind of key, or not a key."""
    data = _read(file)
    try:
        if data.startswith(b"-----BEGIN"):
            key: object = serialization.load_pem_public_key(data)
        else:
            key = serialization.load_ssh_public_key(data.strip())
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _bad(file, "public key", sanitize(error, 200)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise _bad(file, "public key", type(key).__name__)
    return key


def key_fingerprint(key: Ed25519PublicKey) -> str:
    """Return the key's fingerprint as `ssh-keygen -l` prints it: "SHA256:" and 43 characters."""
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(text.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _read(file: Path) -> bytes:
    with file.open("rb") as data:
        return data.read(_MOST_BYTES)


def _bad(file: Path, expected: str, found: str) -> ConfigError:
    return ConfigError(f"--key: expected an Ed25519 {expected} in {file}, found {found}; {_MAKE}")
