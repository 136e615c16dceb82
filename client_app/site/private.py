"""This site's private state, on this site's disk.

    <state-dir>/<run>/<site>/turn-<id>.safetensors  what the method keeps after one turn, and the turn before that one
    <state-dir>/<run>/<site>/secret                 32 bytes, from which the client's draws follow, and their checksum
    <state-dir>/<run>/<site>/served.json            the last rounds that were served (served.py)
    <state-dir>/.ledger/<site>.json                 charges of all records over all runs (fedveil.privacy.ledger)

It is never in Flower's `Context.state`, which is lost at a restart, and silently above about 50 MB.

Every turn goes on from the state of the turn that the order names: the last one whose upload is in the server's state.
So a server that died, a missed quorum and a lost reply leave nothing behind, and the repeated turn trains from where
the first one did.

| the order names ... | the turn goes on from |
|---|---|
| a turn whose state is here | that state; what came after it is dropped |
| no turn | nothing, as in the first participation; served.py sees to it that no round begins in two ways |
| a turn whose state is not here, or is damaged | nothing if the server sends all that a newcomer needs; else
  StateError, after which the server takes the site for a newcomer |

Kept are the state of the turn that was named last, that of the turn before it, for a server that goes back to its last
but one checkpoint, and the newest.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, StateError

if TYPE_CHECKING:
    from fedveil.contract.method import State
    from fedveil.privacy.ledger import Ledger

log = logging.getLogger("fedveil.private")

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

    def load(self, last: str, is_new: bool = False) -> State | None:
        """The state after the turn `last`; None if that is no turn.

        Args:
            is_new: the server takes this site for a newcomer, so a lost state is no error.

        Raises:
            StateError: the state is not here, or is damaged.
        """
        if not last or (is_new and self._before(last) is None):
            return None
        if not self._file(last).exists():
            raise StateError(
                f"private state: expected that of turn {last} in {self.folder}, found none; this site goes on as a "
                "newcomer with the next turn, or restore the folder from a backup"
            )
        return self._read(last)[0]

    def save(self, turn: str, last: str, state: State | None) -> None:
        """Writes the state after a turn that went on from `last`, whole or not at all; None keeps nothing.

        Removes states that no server can name any more. Raises StateError, for example on a full disk.
        """
        from fedveil.contract.method import State as State_
        from fedveil.records.state import save_state

        before = self._before(last) or ""
        for file in self.folder.glob("turn-*.safetensors"):
            if file not in (self._file(last), self._file(before)):
                file.unlink()
        if state is None:
            return
        try:
            save_state(State_(state.tensors, {"state": dict(state.scalars), "after": last}), self._file(turn))
        except OSError as error:
            raise StateError(
                f"{self._file(turn)}: expected to write the private state, found {error}; free space"
            ) from error

    def _file(self, turn: str) -> Path:
        return self.folder / f"turn-{turn}.safetensors"

    def _before(self, turn: str) -> str | None:
        """The turn from which `turn` went on; None where there is no state of `turn` that can be read."""
        if not turn or not self._file(turn).exists():
            return None
        try:
            return self._read(turn)[1]
        except StateError as error:
            log.warning("%s", error)
            return None

    def _read(self, turn: str) -> tuple[State, str]:
        from fedveil.contract.method import State as State_
        from fedveil.records.state import load_state

        found = load_state(self._file(turn))
        scalars, after = found.scalars.get("state"), found.scalars.get("after")
        if not isinstance(scalars, dict) or not isinstance(after, str):
            raise StateError(f"{self._file(turn)}: expected a private state, found another file; remove it")
        return State_(found.tensors, scalars), after

    def secret(self, seed: int, site: str, deterministic: bool) -> bytes:
        """This client's secret: drawn from the operating system at the first call, later read from the file."""
        from fedveil import rng
        from fedveil.records.files import sealed_bytes, unsealed_bytes, write_atomic

        if deterministic:
            return rng.secret(f"client:{site}", seed, deterministic)
        path = self.folder / "secret"
        if not path.exists():
            write_atomic(path, sealed_bytes(rng.fresh_secret()))
        data = path.read_bytes()
        try:
            return unsealed_bytes(data)
        except ValueError as error:
            raise StateError(
                f"{path}: expected this site's secret for the run, found {len(data)} bytes: {error}; restore "
                "it from a backup, or take no further part in this run"
            ) from None
