"""The server's instruction keys in the registry. The server signs its instructions to sites with the current key.

The private keys are in files (fedveil/console/flower/instruction_key_files.py). members.json has the public halves:
"instruction-keys": [current, standby]. Sites pin both, so a site with a file from before a renewal accepts the new
current key, which is the standby key in that file.

| case | result |
|---|---|
| the folder was provisioned by a release without instruction keys | `ensure_keys` creates them |
| the key files exist but the registry lacks their public halves | `ensure_keys` uses the files' keys |
| a renewal was interrupted | the next renewal uses the standby key that the registry names |
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedveil.console.flower.instruction_key_files import RENEW, current_file, draw_keys, public_key, standby_file
from fedveil.console.provisioning.federation_folder import SiteRegistry
from fedveil.encrypted_files import read_key_file
from fedveil.errors import ConfigError
from fedveil.federation.message_signatures.key_files import InstructionKeys
from fedveil.federation.secagg import crypto
from fedveil.records.atomic_files import write_atomic


def ensure_keys(members: SiteRegistry) -> InstructionKeys:
    """Return the federation's public keys, creating and registering them if there are none. Raises ConfigError."""
    if not members.instruction_keys:
        members.instruction_keys = draw_keys(members.folder)
        members.save()
    return pinned_keys(members)


def pinned_keys(members: SiteRegistry) -> InstructionKeys:
    """Return the federation's ID and its public instruction keys, which a kit pins."""
    return InstructionKeys(members.federation_id, members.instruction_keys)


def renew_keys(members: SiteRegistry, given: Path | None = None) -> InstructionKeys:
    """Make the standby key the current key, generate a new standby key, and register both.

    Args:
        given: file with the private standby key, deleted afterward. Default: the one in the folder.

    Raises:
        ConfigError: the file cannot be read, holds the current key, or does not hold the registered standby key.
    """
    if given is not None:
        _require_other_file(given, current_file(members.folder))
    standby, expected = standby_file(members.folder), members.instruction_keys[-1]
    drawn = standby.with_name(f"{standby.name}.new")
    if drawn.is_file():  # a renewal was interrupted before or after the registry was saved
        drawn.replace(standby) if public_key(drawn) == expected else drawn.unlink()
    file = given or standby
    private = _read_standby(file, expected)
    is_elsewhere = not standby.exists() or not file.samefile(standby)
    write_atomic(current_file(members.folder), private)
    # The registry names the new key before the key replaces the old one's file, so that no interruption loses a key.
    write_atomic(drawn, os.urandom(crypto.KEY_BYTES))
    members.instruction_keys = (expected, public_key(drawn))
    members.save()
    drawn.replace(standby)
    if is_elsewhere:
        with suppress(OSError):  # on a read-only medium
            file.unlink()
    return pinned_keys(members)


def _require_other_file(given: Path, current: Path) -> None:
    """Raise ConfigError if `given` is the current key's file, which would otherwise be deleted as the standby key's."""
    if given.resolve() == current.resolve() or (given.exists() and current.exists() and given.samefile(current)):
        raise ConfigError(
            f"--standby-key: expected the standby key's file, found the current key's file, {given}; get "
            "instruction-standby.key from its safe place, and name that file or a copy"
        )


def _read_standby(file: Path, expected: str) -> bytes:
    """Return the private key in `file`. Raises ConfigError unless its public half is `expected`."""
    private = read_key_file(file, "--standby-key", "get it from its safe place, and name its file", RENEW)
    if crypto.verifying_key(private).hex() != expected:
        raise ConfigError(
            f"--standby-key: expected the standby key that the kits name, found a different key in {file}; get the "
            "right key from its safe place, and name its file"
        )
    return private
