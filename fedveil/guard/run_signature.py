r"""Run signatures: Ed25519 over the run's name, an expiry date and the bundle's SHA-256, in `run.signature`.

    run.signature = "ssh-ed25519 AAAA... 2026-03-31 <base64 of the signature>"

    signed: b"fedveil run 2\n" + run.name + b"\n" + "2026-03-31" + b"\n" + 64 hex digits

The signature means that the key's owner has approved this bundle for the run with this name, until the end of
that day in UTC. A site checks the date against its own clock. Within these limits, the signature does not
restrict how often the run may be submitted.

| run.signature | the site |
|---|---|
| is empty | treats the run as unsigned |
| is not a signature over this run, name, date and bundle, or has expired | refuses, under every policy |
| has the format of version 0.1, which covered only the bundle | refuses, under every policy |
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, date, datetime

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedveil.errors import PolicyError
from fedveil.sanitize import sanitize

_FORM = re.compile(r"ssh-ed25519 ([A-Za-z0-9+/=]{1,200})(?: (\d{4}-\d\d-\d\d))? ([A-Za-z0-9+/=]{1,200})")
_NEXT = "sign it with: fedveil app sign --run NAME --until DATE"


def sign_run(key: Ed25519PrivateKey, run: str, until: date, digest: str) -> str:
    """Return the text for run.signature."""
    signature = base64.b64encode(key.sign(_signed(run, until, digest))).decode()
    return f"{_text(key.public_key())} {until.isoformat()} {signature}"


def verify_signer(text: str, run: str, digest: str, today: date | None = None) -> str:
    """Return the signing key, "ssh-ed25519 AAAA..."; "" if `text` is empty. `today` defaults to this machine's UTC day.

    Raises:
        PolicyError: `text` is not a valid signature for this run and bundle today.
    """
    if not text:
        return ""
    match = _FORM.fullmatch(text)
    if not match:
        raise PolicyError(
            f'run.signature: it must read "ssh-ed25519 KEY DATE SIGNATURE", found {sanitize(text, 60)!r}; {_NEXT}'
        )
    encoded, day, signature = match.groups()
    if day is None:
        raise PolicyError(
            "run.signature: it is a signature over the bundle only, as made by version 0.1, not over run name, date "
            f"and bundle; {_NEXT}"
        )
    try:
        public, until = serialization.load_ssh_public_key(f"ssh-ed25519 {encoded}".encode()), date.fromisoformat(day)
        if not isinstance(public, Ed25519PublicKey):
            raise ValueError("the key is of another kind")
        public.verify(base64.b64decode(signature, validate=True), _signed(run, until, digest))
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise PolicyError(
            f"run.signature: it is not a valid signature over run {sanitize(run, 80)!r}, date {day} and bundle "
            f"{digest} ({type(error).__name__}); {_NEXT}"
        ) from None
    if (today or datetime.now(UTC).date()) > until:
        raise PolicyError(f"run.signature: it expired on {day}; {_NEXT}")
    return _text(public)


def _signed(run: str, until: date, digest: str) -> bytes:
    return f"fedveil run 2\n{run}\n{until.isoformat()}\n{digest}".encode()


def _text(key: Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
