"""Create operator tokens, write them where Flower's CLI looks for a login, and build the server's entry for each.

`flwr` sends an address's token from its `credentials.yaml` as `Authorization: Bearer`. The server stores only a
SHA-256 of it (fedveil/guard/operator_access.py). A token has 256 random bits, so a plain hash is enough.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedveil.records.atomic_files import write_atomic

FILE = "operators.json"


def new_token() -> str:
    """Return a new 43-character token."""
    return secrets.token_urlsafe(32)


def operator_entry(role: str, token: str, now: datetime, until: datetime) -> dict[str, str]:
    """Return an operator's entry for operators.json."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    times = {"added": now.isoformat(timespec="seconds"), "until": until.isoformat(timespec="seconds")}
    return {"role": role, "state": "active", "token": digest, **times}


def write_login(home: Path, address: str, token: str) -> None:
    """Write credentials.yaml to a FLWR_HOME, so that `flwr` sends `token` to the control port `address` (HOST:PORT)."""
    credentials = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    about = {
        f"flower.account-auth.{address}.{key}": base64.b64encode(v.encode()).decode() for key, v in credentials.items()
    }
    write_atomic(home / "credentials.yaml", json.dumps(about, indent=1).encode())  # JSON is YAML


def write_registry(folder: Path, keys: Mapping[str, Path], home: Path, address: str) -> None:
    """Write a local federation's registry: the sites' keys, valid for a year, and an operator whose login is in `home`.

    `keys` gives the path of each site's private key; the public key is next to it.
    """
    now, token = datetime.now(UTC), new_token()
    until = now + timedelta(days=365)
    about = {"state": "registered", "until": until.isoformat(timespec="seconds")}
    public = {site: " ".join(Path(f"{key}.pub").read_text().split()[:2]) for site, key in keys.items()}
    members = {"sites": {site: {**about, "key": key} for site, key in public.items()}, "retired": {}}
    write_atomic(folder / "members.json", json.dumps(members, indent=1).encode())
    operators = {"operators": {"owner": operator_entry("admin", token, now, until)}}
    write_atomic(folder / FILE, json.dumps(operators, indent=1).encode())
    write_login(home, address, token)
