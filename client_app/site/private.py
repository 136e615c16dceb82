"""This site's private state, on this site's disk.

    <state-dir>/<run>/<site>/private.safetensors    what the method keeps between rounds
    <state-dir>/<run>/<site>/next.safetensors       the next such state, until this turn's upload is complete
    <state-dir>/<run>/<site>/secret                 32 bytes, from which the client's draws follow
    <state-dir>/<run>/<site>/served.json            the last round that was served (served.py)
    <state-dir>/<run>/<site>/received.json          what it trained from last, as a sketch (received.py)
    <state-dir>/.ledger/<site>.json                 charges of all records over all runs (fedveil.privacy.ledger)

It is never in Flower's `Context.state`, which is lost at a restart, and silently above about 50 MB. The process that
trains prepares the next state, and the process that has the whole upload commits it. If one of them dies in between,
the state of the last turn stays, and the turn can be repeated from there.

This module is importable without torch, because the client process commits; its functions import torch where they need
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, StateError

if TYPE_CHECKING:
    from fedveil.contract.method import State
    from fedveil.privacy.ledger import Ledger

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def safe(key: str, value: str) -> str:
    """`value`, if it is a plain file name. Raises ConfigError naming `key`."""
    if not _SAFE.fullmatch(value):
        raise ConfigError(f'{key}: expected at most 64 letters, digits, "_", "." or "-", found {value[:80]!r}')
    return value


def ledger_of(state_dir: Path, site: str) -> Ledger:
    """The site's privacy ledger for all its runs. Raises ConfigError for a name that is not a plain file name."""
    from fedveil.privacy.ledger import Ledger

    return Ledger(state_dir.expanduser() / ".ledger" / f"{safe('site', site)}.json")


@dataclass(frozen=True)
class PrivateStore:
    """One site's folder for one run. It outlives the SuperNode process."""

    folder: Path

    @classmethod
    def of(cls, state_dir: Path, run: str, site: str) -> PrivateStore:
        """The store of a run and site. Raises ConfigError for a name that is not a plain file name."""
        return cls(state_dir.expanduser() / safe("run.name", run) / safe("site", site))

    @property
    def _current(self) -> Path:
        return self.folder / "private.safetensors"

    @property
    def _next(self) -> Path:
        return self.folder / "next.safetensors"

    def load(self) -> State | None:
        """The state after the last committed turn; None before the first."""
        from fedveil.records.state import load_state

        return load_state(self._current) if self._current.exists() else None

    def prepare(self, state: State | None) -> None:
        """Writes the next state, whole or not at all; the current one stays. Raises StateError, e.g. on a full disk."""
        from fedveil.records.state import save_state

        self._next.unlink(missing_ok=True)  # left by a turn that was never committed
        if state is None:
            return
        try:
            save_state(state, self._next)
        except OSError as error:
            raise StateError(f"{self._next}: expected to write the private state, found {error}; free space") from error

    def commit(self) -> None:
        """Makes the prepared state the current one; without a prepared state nothing changes."""
        if self._next.exists():
            self._next.replace(self._current)

    def secret(self, seed: int, site: str, deterministic: bool) -> bytes:
        """This client's secret: drawn from the operating system at the first call, later read from the file."""
        from fedveil import rng
        from fedveil.records.files import write_atomic

        if deterministic:
            return rng.secret(f"client:{site}", seed, deterministic)
        path = self.folder / "secret"
        if not path.exists():
            write_atomic(path, rng.fresh_secret())
        secret = path.read_bytes()
        if len(secret) != rng.SECRET_BYTES:
            raise StateError(
                f"{path}: expected {rng.SECRET_BYTES} bytes, found {len(secret)}; restore it from a backup"
            )
        return secret
