"""A site's key, made at the site, and its request to be registered: what leaves is public, and proves the private half.

    request.json   {"federation", "site", "ca", "key", "made", "proof"}
    proof = ECDSA P-384 with SHA-384 by the key itself, over the JSON of the rest (keys sorted, no spaces)

The proof says that the sender of the key has its private half. That the sender is the site, the operator has to hear
from somebody: both ends show the key's fingerprint, to be compared over the telephone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil import places
from fedveil.console.flower.keys import write_node_key
from fedveil.errors import ConfigError


def make(folder: Path, about: dict[str, str], ca: bytes, renew: bool, secret: Path | None = None) -> tuple[Path, str]:
    """Writes node.key, node.key.pub, superexec-secret and request.json. Returns the request and the fingerprint.

    `secret` is where superexec-secret goes, where not beside the key: the process that runs apps must reach the one
    only.

    Raises:
        ConfigError: there is a key, and `renew` is not set.
    """
    key_file = folder / "node.key"
    if key_file.exists() and not renew:
        raise ConfigError(
            f"{key_file}: expected none yet, found one; --renew makes another, which must be registered anew"
        )
    places.private_folder(folder)
    if renew and key_file.exists():
        key_file.replace(folder / "node.key.old")  # until the new one is registered, the site still needs it
    write_node_key(key_file)
    secret = secret or folder / "superexec-secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    key = serialization.load_ssh_private_key(key_file.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_file}: expected an elliptic-curve key, found {type(key).__name__}")
    public = key_file.with_name("node.key.pub").read_text().strip()
    content = {**about, "ca": hashlib.sha256(ca).hexdigest(), "key": public}
    content["made"] = datetime.now(UTC).isoformat(timespec="seconds")
    proof = key.sign(_canonical(content), ec.ECDSA(hashes.SHA384()))
    request = folder / "request.json"
    request.write_text(json.dumps({**content, "proof": base64.b64encode(proof).decode()}, indent=1))
    return request, fingerprint(public)


def check(file: Path, federation: str, ca: bytes) -> tuple[str, str]:
    """The site and its public key, if the request is one of this federation and proves its key. Raises ConfigError."""
    content = _read(file)
    proof = content.pop("proof")
    for key, expected in (("federation", federation), ("ca", hashlib.sha256(ca).hexdigest())):
        if content[key] != expected:
            raise ConfigError(
                f"{file}: {key}: expected {expected!r}, found {content[key]!r}; it is for another federation"
            )
    try:
        public = serialization.load_ssh_public_key(content["key"].encode())
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP384R1):
            raise ConfigError(f"{file}: key: expected one on P-384, found another kind; fedveil site init makes one")
        public.verify(base64.b64decode(proof, validate=True), _canonical(content), ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature) as error:
        raise ConfigError(
            f"{file}: proof: expected one by the key itself, found another ({type(error).__name__})"
        ) from None
    return content["site"], " ".join(content["key"].split()[:2])


def fingerprint(public: str) -> str:
    """As `ssh-keygen -l` shows it."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _read(file: Path) -> dict[str, Any]:
    names = {"federation", "site", "ca", "key", "made", "proof"}
    try:
        content = json.loads(file.read_text())
        if (
            not isinstance(content, dict)
            or set(content) != names
            or not all(isinstance(v, str) for v in content.values())
        ):
            raise ValueError(f"expected text under {sorted(names)}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: expected a request of fedveil site init, found none ({error}); ask for it anew"
        ) from None
    return content


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
