"""This site's private state, on this site's disk.

    <state-dir>/<run>/<site>/private.safetensors    what the method keeps between rounds
    <state-dir>/<run>/<site>/secret                 32 bytes; the client's draws follow from it

It is never in Flower's `Context.state`, which is lost at a restart and, above some 50 MB, silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedveil import rng
from fedveil.errors import ConfigError, StateError
from fedveil.method import State
from fedveil.state import load_state, save_state, write_atomic

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class PrivateStore:
    """One site's folder for one run. A new SuperNode process finds what the last one left."""

    folder: Path

    @classmethod
    def of(cls, state_dir: Path, run: str, site: str) -> PrivateStore:
        """The store of a run and site. Raises ConfigError for a name that is not a plain file name."""
        for key, value in (("run.name", run), ("site", site)):
            if not _SAFE.fullmatch(value):
                raise ConfigError(f'{key}: expected at most 64 letters, digits, "_", "." or "-", found {value[:80]!r}')
        return cls(state_dir.expanduser() / run / site)

    def load(self) -> State | None:
        """The state after the last participation; None before the first."""
        path = self.folder / "private.safetensors"
        return load_state(path) if path.exists() else None

    def save(self, state: State | None) -> None:
        """Replaces the state, whole or not at all."""
        if state is not None:
            save_state(state, self.folder / "private.safetensors")

    def secret(self, seed: int, site: str, deterministic: bool) -> bytes:
        """This client's secret: from the operating system at the first call, then from the file."""
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
