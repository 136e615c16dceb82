"""Files in a federation's folder with which a server signs instructions and verifies the sites' replies.

    FOLDER/server/instruct/instruction.key   the current private key (32 bytes), for the process that runs the ServerApp
           server/roster/signers.json        the sites' public signing keys and states, for the same process
           server/instruct/bundles.toml      optional: bundles that may run there (fedveil/guard/permitted_bundles.py)
           ca/instruction-standby.key        the next private key; move it off this machine together with ca.key

A site's kit has both public keys (fedveil/federation/message_signatures/key_files.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from fedveil.encrypted_files import read_key_file
from fedveil.federation.message_signatures.environment import BUNDLES_VARIABLE, KEY_VARIABLE, SIGNERS_VARIABLE
from fedveil.federation.message_signatures.key_files import SIGNERS
from fedveil.federation.secagg import crypto
from fedveil.paths import private_folder
from fedveil.records.atomic_files import write_atomic

RENEW = "fedveil members renew-instruction-key"


def current_file(folder: Path) -> Path:
    """Return the path of the current private key in a federation's folder."""
    return folder / "server" / "instruct" / "instruction.key"


def standby_file(folder: Path) -> Path:
    """Return the path of the standby private key in a federation's folder."""
    return folder / "ca" / "instruction-standby.key"


def signers_file(folder: Path) -> Path:
    """Return the path of signers.json, which the server's app process uses to verify the sites' replies."""
    return folder / "server" / "roster" / SIGNERS


def bundles_file(folder: Path) -> Path:
    """Return the path of the optional list of bundles that may run on the server."""
    return current_file(folder).with_name("bundles.toml")


def signing_environment(folder: Path, signs: bool) -> dict[str, str]:
    """Return environment variables for the ServerApp's process: the paths of the permitted bundles and signing files.

    Args:
        signs: include both signing files, even if one is missing: the ServerApp then fails with the reason,
            instead of sending unsigned instructions.
    """
    files = {KEY_VARIABLE: current_file(folder), SIGNERS_VARIABLE: signers_file(folder)} if signs else {}
    files[BUNDLES_VARIABLE] = bundles_file(folder)  # takes effect from the next run on if someone adds it
    return {name: str(file) for name, file in files.items()}


def keys_fingerprint(federation: str, public: Sequence[str]) -> str:
    """Return the fingerprint of a federation's ID and its public keys (hex, in any order).

    It is a SHA-256 in the format that ssh-keygen uses.
    """
    digest = hashlib.sha256(crypto.context_bytes("instruction keys", federation, *sorted(public))).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def public_key(file: Path) -> str:
    """Return the public half, in hex, of the private key in `file`. Raises ConfigError if it cannot be read."""
    return crypto.verifying_key(read_key_file(file, str(file), "restore it from a backup", RENEW)).hex()


def draw_keys(folder: Path) -> tuple[str, str]:
    """Create any missing private keys in a federation's folder; return both public keys, the current one first."""
    current, standby = (_ensure_private(file) for file in (current_file(folder), standby_file(folder)))
    return current, standby


def _ensure_private(file: Path) -> str:
    """Return the public half of the key in `file`, creating the key if it is missing."""
    if not file.exists():
        private_folder(file.parent)
        write_atomic(file, os.urandom(crypto.KEY_BYTES))
    return public_key(file)
