"""The registry of a federation's operators: operators.json, which the SuperLink reloads when it changes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedveil.console.flower.operator_tokens import FILE, new_token, operator_entry
from fedveil.console.provisioning import command_lock
from fedveil.errors import ConfigError
from fedveil.records.atomic_files import write_atomic

ROLES = {
    "read": "list runs and sites, read a run's output",
    "submit": "the same, plus starting and stopping runs",
    "members": "the same as read, plus registering and unregistering sites' keys",
    "admin": "all of these",
}
OWNER = "owner"  # ran fedveil provision; its token is in the federation's folder
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class OperatorRegistry:
    """operators.json in the folder `registry`; each change is written immediately. Raises ConfigError if it is invalid.

    A command that changes it loads it with `locked`, as with `SiteRegistry`. Each registry has its own lock, so that a
    members command waiting for Flower does not delay the revocation of an operator.
    """

    def __init__(self, registry: Path) -> None:
        self._file = registry / FILE
        try:
            self.entries: dict[str, dict[str, str]] = json.loads(self._file.read_text())["operators"]
            for name, entry in self.entries.items():
                datetime.fromisoformat(entry["until"]), entry["role"], entry["state"], name.lower()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self._file}: expected the operators written by fedveil provision, found none "
                f"({type(error).__name__}: {error}); restore it from a backup"
            ) from None

    @classmethod
    def create(cls, registry: Path, days: int) -> str:
        """Create the file with only `OWNER`, who may do everything for `days` days. Returns the owner's token."""
        write_atomic(registry / FILE, b'{"operators": {}}')
        return cls(registry).add(OWNER, "admin", days, renew=False)

    @classmethod
    @contextlib.contextmanager
    def locked(cls, registry: Path) -> Iterator[OperatorRegistry]:
        """Load the registry, and lock it against other commands until the block ends. Raises ConfigError."""
        if not (registry / FILE).is_file():
            cls(registry)  # raises an error that says what is missing
        with command_lock.hold_lock(registry / ".operators.lock", "operators"):
            yield cls(registry)

    def add(self, name: str, role: str, days: int, renew: bool, now: datetime | None = None) -> str:
        """Add an operator and return the token, which is not stored. Raises ConfigError for an invalid value."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"NAME: expected letters, digits, '-', '_' or '.', at most 64, found {name!r}; choose another"
            )
        if role not in ROLES:
            raise ConfigError(f"--role: expected one of {sorted(ROLES)}, found {role!r}; choose one")
        if not 1 <= days <= 3650:
            raise ConfigError(f"--days: expected 1 to 3650, found {days}; choose another")
        if name in self.entries and not renew:
            raise ConfigError(f"NAME: expected an unused name, found {name}; --renew makes a new token")
        token, start = new_token(), now or datetime.now(UTC)
        self.entries[name] = operator_entry(role, token, start, start + timedelta(days=days))
        self._save()
        return token

    def revoke(self, name: str) -> None:
        """Revoke an operator, effective with the next request. Raises ConfigError for an unknown name."""
        if name not in self.entries:
            raise ConfigError(
                f"NAME: expected one of {sorted(self.entries)}, found {name!r}; see fedveil operators list"
            )
        self.entries[name] = {**self.entries[name], "state": "revoked"}
        self._save()

    def is_last_admin(self, name: str, now: datetime | None = None) -> bool:
        """Return whether this operator is the only one with the admin role and a valid token."""
        at = now or datetime.now(UTC)
        admins = {
            who
            for who, entry in self.entries.items()
            if entry["role"] == "admin" and entry["state"] == "active" and datetime.fromisoformat(entry["until"]) > at
        }
        return admins == {name}

    def _save(self) -> None:
        write_atomic(self._file, json.dumps({"operators": self.entries}, indent=1).encode())
