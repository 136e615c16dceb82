"""Signatures of an app's bundle: Ed25519 over its SHA-256, carried by the run config's `run.signature`.

    run.signature = "ssh-ed25519 AAAA... <base64 of the signature>"     over b"fedveil app 1\\n" + 64 hex digits

It says that the holder of the key vouched for this very bundle; not for which run, nor until when.
"""

from __future__ import annotations

import base64

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_SAYS = b"fedveil app 1\n"


def sign(key: Ed25519PrivateKey, digest: str) -> str:
    """The text for run.signature."""
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{public.decode()} {base64.b64encode(key.sign(_SAYS + digest.encode())).decode()}"


def signer(text: str, digest: str) -> str:
    """The key that signed the bundle of that digest, "ssh-ed25519 AAAA..."; "" where `text` is no signature of it."""
    kind, _, rest = text.partition(" ")
    encoded, _, signature = rest.partition(" ")
    try:
        public = serialization.load_ssh_public_key(f"{kind} {encoded}".encode())
        if not isinstance(public, Ed25519PublicKey):
            return ""
        public.verify(base64.b64decode(signature, validate=True), _SAYS + digest.encode())
    except (ValueError, TypeError, InvalidSignature):  # binascii.Error is a ValueError
        return ""
    canonical = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return canonical.decode()
