"""Create a site's keys at the site, and a registration request that proves possession of the private keys.

    node.key      P-384; authenticates the site's connection; only the SuperNode reads it
    signing.key   Ed25519, 32 bytes; identifies the site to the others in secure aggregation; for the app process
    request.json  {"federation", "site", "ca", "key", "signing", "instructions", "made", "proof",
                   "signing-proof"}

    instructions = SHA-256 of the contents of the kit's instruction-keys.toml; "" without that file; missing in
    requests from earlier releases
    proof = ECDSA P-384 with SHA-384 by the node key, over the JSON of the other fields (sorted keys, no spaces)
    signing-proof = Ed25519 by the signing key, over the same text

Each proof covers both keys, so the sender has both private keys. The operator must confirm by other means
that the sender is the site: both ends show one fingerprint of both keys, to compare by phone. The proofs also
cover the CA and the instruction keys, so the operator can detect a kit that was changed in transit.

The node key is renewed every few months. The signing key stays, because its public half is in the roster,
and every site policy names the roster digest. It is replaced only on request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.client_app.secure_round import read_key
from fedveil.console.flower.certificates import write_node_key, write_secret
from fedveil.errors import ConfigError
from fedveil.federation.secagg import crypto
from fedveil.paths import private_folder
from fedveil.records.atomic_files import write_atomic
from fedveil.sanitize import sanitize

SIGNING_KEY = "signing.key"
_REQUEST = "request.json"
_MOST_BYTES = 16_384  # bytes of a request, which is untrusted


@dataclass(frozen=True)
class KeyPaths:
    """Locations of a site's key files.

    Attributes:
        folder: folder with the node key and the request.
        secret: the SuperExec's secret; the signing key is next to it. The process that runs apps must have
            access to only these two.
    """

    folder: Path
    secret: Path

    @property
    def node_key(self) -> Path:
        """The private node key, in OpenSSH format."""
        return self.folder / "node.key"

    @property
    def signing_key(self) -> Path:
        """The private signing key, 32 bytes."""
        return self.secret.with_name(SIGNING_KEY)


@dataclass(frozen=True)
class RegistrationRequest:
    """A site's registration request.

    Attributes:
        key: the node's public key in OpenSSH format.
        signing: the public signing key, in hex.
        instructions: SHA-256 of the instruction keys that the site pins, in hex; "" if it pins none.
    """

    site: str
    key: str
    signing: str
    instructions: str = ""

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of both keys: a SHA-256 in the format that ssh-keygen uses for a single key."""
        digest = hashlib.sha256(crypto.context_bytes("keys of a site", self.key, self.signing)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def make_site_keys(
    places: KeyPaths, about: dict[str, str], ca: bytes, renew: bool = False, renew_signing: bool = False,
    *, instructions: str = "",
) -> tuple[Path, str]:  # fmt: skip
    """Write node.key, node.key.pub, superexec-secret, request.json and, if there is none, signing.key.

    Returns the request and the fingerprint.

    Args:
        renew: create a new node key; the old one is kept as node.key.old.
        renew_signing: also create a new signing key; the old one is kept as signing.key.old.
        instructions: SHA-256 of the kit's instruction keys; "" if the kit has none.

    Raises:
        ConfigError: a node key exists and `renew` is false, or the signing key cannot be read.
    """
    if places.node_key.exists() and not (renew or renew_signing):
        raise ConfigError(
            f"{places.node_key}: expected no key yet, found one{_known(places, about['site'])}; --renew makes a new "
            "one, which must be registered again"
        )
    if places.signing_key.exists() and not renew_signing:
        read_key(places.signing_key)  # report an unusable key before creating anything
    for folder in (places.folder, places.secret.parent):
        private_folder(folder)
    if places.node_key.exists():
        # The site needs the old key until the new one is registered.
        places.node_key.replace(places.folder / "node.key.old")
    write_node_key(places.node_key)
    if renew_signing and places.signing_key.exists():
        places.signing_key.replace(places.secret.with_name(f"{SIGNING_KEY}.old"))
    if not places.signing_key.exists():
        write_atomic(places.signing_key, os.urandom(crypto.KEY_BYTES))
    write_secret(places.secret)
    node = serialization.load_ssh_private_key(places.node_key.read_bytes(), None)
    if not isinstance(node, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{places.node_key}: expected an elliptic-curve key, found {type(node).__name__}")
    signing = read_key(places.signing_key)
    public = places.node_key.with_name("node.key.pub").read_text().strip()
    asked = RegistrationRequest(about["site"], public, crypto.verifying_key(signing).hex())
    content = {**about, "ca": hashlib.sha256(ca).hexdigest(), "key": asked.key, "signing": asked.signing}
    content["instructions"] = instructions
    content["made"] = datetime.now(UTC).isoformat(timespec="seconds")
    text = _canonical(content)
    proofs = {"proof": node.sign(text, ec.ECDSA(hashes.SHA384())), "signing-proof": crypto.sign_bytes(signing, text)}
    request = places.folder / _REQUEST
    encoded = {name: base64.b64encode(proof).decode() for name, proof in proofs.items()}
    request.write_text(json.dumps({**content, **encoded}, indent=1))
    return request, asked.fingerprint


def _known(places: KeyPaths, site: str) -> str:
    """Return the fingerprint computed from the existing keys; "" if one of them cannot be read."""
    try:
        node = serialization.load_ssh_private_key(places.node_key.read_bytes(), None)
        public = node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        signing = crypto.verifying_key(read_key(places.signing_key)).hex()
    except (OSError, ValueError, ConfigError):
        return ""
    return f", with fingerprint {RegistrationRequest(site, public.decode(), signing).fingerprint}"


def require_requested_signing_key(node_key: Path, signing_key: Path) -> None:
    """Raise ConfigError if the request next to the node key registers that key with a different signing key.

    A request with another node key proves nothing: the site may use its earlier keys until the new one is registered.
    """
    request = node_key.with_name(_REQUEST)
    if not request.exists():
        return
    content, node = _read(request), serialization.load_ssh_private_key(node_key.read_bytes(), None)
    public = node.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    own = crypto.verifying_key(read_key(signing_key)).hex()
    if content["key"].split()[:2] == public.decode().split()[:2] and content["signing"] != own:
        raise ConfigError(
            f"{signing_key}: expected the signing key {sanitize(short_key(content['signing']), 40)}, which {request} "
            f"registers for this site, found {short_key(own)}, with which the server would count no replies; restore "
            "the registered key, or make new keys with fedveil site init --renew --renew-signing, which the operator "
            "then registers"
        )


def check_request(file: Path, federation: str, ca: bytes) -> RegistrationRequest:
    """Return the request if it is for this federation and proves both keys; otherwise raise ConfigError."""
    content = _read(file)
    proof, signing_proof = content.pop("proof"), content.pop("signing-proof")
    for key, expected in (("federation", federation), ("ca", hashlib.sha256(ca).hexdigest())):
        if content[key] != expected:
            raise ConfigError(
                f"{file}: {key}: expected {expected!r}, found {content[key]!r}; this request is for another federation"
            )
    if not re.fullmatch(r"[0-9a-f]{64}", content["signing"]):
        raise ConfigError(
            f"{file}: signing: expected 64 hex digits, found {sanitize(content['signing'], 80)}; ask for a new request"
        )
    if crypto.is_small_order(bytes.fromhex(content["signing"])):
        raise ConfigError(
            f"{file}: signing: expected a key whose signatures each cover one text, found one of small order, whose "
            "signature fits any text; do not register this site before you have talked to it"
        )
    text = _canonical(content)
    try:
        public = serialization.load_ssh_public_key(content["key"].encode())
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP384R1):
            raise ConfigError(f"{file}: key: expected a P-384 key, found a different kind; fedveil site init makes one")
        public.verify(base64.b64decode(proof, validate=True), text, ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{file}: proof: expected a signature by the key itself, found a different one ({type(error).__name__})"
        ) from None
    try:
        signed = crypto.is_signed(
            bytes.fromhex(content["signing"]), base64.b64decode(signing_proof, validate=True), text
        )
    except ValueError:
        signed = False
    if not signed:
        raise ConfigError(
            f"{file}: signing-proof: expected a signature by the signing key itself, found a different one; make a new "
            "request with fedveil site init --renew"
        )
    public_key = " ".join(content["key"].split()[:2])
    return RegistrationRequest(content["site"], public_key, content["signing"], content.get("instructions", ""))


def require_instruction_keys(request: RegistrationRequest, digest: str, must_sign: bool) -> None:
    """Raise ConfigError if the site pins instruction keys other than those in the registry.

    Args:
        digest: SHA-256 of the registry's keys.
        must_sign: the site's kit names the keys, or signatures are required, so a request without keys is refused too.
    """
    if request.instructions == digest or (not request.instructions and not must_sign):
        return
    expected, found = digest or "none", sanitize(request.instructions, 80) or "none"
    raise ConfigError(
        f"{request.site}: instructions: expected the SHA-256 of the server's instruction keys ({expected}), found "
        f"another ({found}): the site's kit was changed in transit, or is older than the keys; write a new kit with "
        "fedveil members kit, have the site compare the fingerprint of its keys by phone, and ask for a new "
        "request"
    )


def short_key(signing: str) -> str:
    """Return the short form of a public signing key for lists: its first 16 hex digits."""
    return " ".join(signing[i : i + 4] for i in range(0, 16, 4))


def _read(file: Path) -> dict[str, Any]:
    names = {"federation", "site", "ca", "key", "signing", "instructions", "made", "proof", "signing-proof"}
    try:
        with file.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
        content = json.loads(data) if len(data) <= _MOST_BYTES else None
        if (
            not isinstance(content, dict)
            or set(content) | {"instructions"} != names
            or not all(isinstance(v, str) for v in content.values())
        ):
            raise ValueError(f"expected text values for {sorted(names)}, of at most {_MOST_BYTES} bytes")
    except OSError as error:
        raise ConfigError(
            f"{file}: expected the request that the site sent, found none ({error.strerror}); correct the path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: expected a request made by fedveil site init, found none ({error}); ask the site for a new one"
        ) from None
    return content


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
