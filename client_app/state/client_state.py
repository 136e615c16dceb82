"""A site's private state on disk.

    <state-dir>/<run>/<site>/turn-<id>.safetensors  a method's private state after a client round; the previous one too
    <state-dir>/<run>/<site>/secret                 32 bytes that seed the client's random draws, and their checksum
    <state-dir>/<run>/<site>/served.json            the last rounds that were served (replay_guard.py)
    <state-dir>/<run>/<site>/turn.lock              held during a client round of the run
    <state-dir>/<run>/<site>/received.json          sketches of the run's first and last weights (broadcast_guard.py)
    <state-dir>/<run>/<site>/secure.json            its keys in secure aggregation (secure_round.py)
    <state-dir>/.ledger/ledger.json                 the charges of all runs (fedveil.privacy.ledger)
    <state-dir>/.withdrawn/units.json               the withdrawn units (withdrawn_units.py)
    <state-dir>/.held-out/<site>.json               the held-out rows and their scores (held_out_record.py)
    <state-dir>/.flower-runs/<Flower run>           the run that a Flower run began with (flower_runs.py)

If the node config names a key file, states, sketch, keys, secret, ledger and withdrawn units are encrypted
(fedveil.encrypted_files). The served rounds, the held-out rows and the Flower runs are not encrypted, because they are
not secret.

The state is never in Flower's `Context.state`, which a restart loses, and which is silently lost above about 50 MB.

Every client round continues from the state after the client round that the instruction names: the last one whose upload
is in the server's state. So a dead server, a missed quorum or a lost reply has no effect, and a repeated client round
starts from the same state as the first attempt.

| the instruction names ... | the client round continues from |
|---|---|
| a client round whose state is here | that state; later states are dropped |
| no client round | no state, as in the first participation; replay_guard.py ensures that no round begins in two ways |
| a client round whose state is missing or damaged | no state, if the server sends everything that a newcomer needs;
  otherwise StateError, after which the server treats the site as a newcomer |

The site stores three states: after the last client round that an instruction named; after the client round before that,
for a server that returns to its previous checkpoint; and the newest state.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil import paths
from fedveil.encrypted_files import FileSeal
from fedveil.errors import ConfigError, StateError

if TYPE_CHECKING:
    from fedveil.contract.method import FederatedState
    from fedveil.privacy.ledger import PrivacyLedger

NOT_RUNS = frozenset({"flower", "guard", "logs", "workers"})  # other folders in the state folder

log = logging.getLogger("fedveil.private")

RECEIVED, SECURE = "received.json", "secure.json"
LEDGER = ".ledger"  # below the state folder: the privacy ledger
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def safe_file_name(key: str, value: str) -> str:
    """Return `value` if it is a plain file name. Raises ConfigError naming `key`."""
    if not _SAFE.fullmatch(value):
        raise ConfigError(f'{key}: expected at most 64 letters, digits, "_", "." or "-", found {value[:80]!r}')
    return value


def state_folder_of(state_dir: Path, run: str, site: str) -> Path:
    """Return the folder for a run's files at a site.

    Raises ConfigError for a name that is not a plain file name, or a run name that is reserved.
    """
    if run in NOT_RUNS:
        raise ConfigError(f"run.name: {run!r} is one of the reserved names {sorted(NOT_RUNS)}; choose another")
    return state_dir.expanduser() / safe_file_name("run.name", run) / safe_file_name("site", site)


def state_role(file: Path) -> str:
    """Return the encryption role of a run's file, so it cannot pass for that of another run, site or client round."""
    of = f"{file.parent.parent.name}/{file.parent.name}"
    return f"state/{of}/{file.stem}" if file.suffix == ".safetensors" else f"{file.stem}/{of}"


def open_ledger(state_dir: Path, seal: FileSeal = FileSeal()) -> PrivacyLedger:
    """Open the state folder's privacy ledger, which is shared by all sites, data sets and runs in the folder."""
    from fedveil.privacy.ledger import PrivacyLedger

    return PrivacyLedger(state_dir.expanduser() / LEDGER, seal)


@dataclass(frozen=True)
class ClientStateStore:
    """One site's folder for one run. The folder outlives the SuperNode process."""

    folder: Path
    seal: FileSeal = FileSeal()

    @classmethod
    def open(cls, state_dir: Path, run: str, site: str, seal: FileSeal = FileSeal()) -> ClientStateStore:
        """Open the store for a run and site. Raises ConfigError for a name that is not a plain file name."""
        return cls(state_folder_of(state_dir, run, site), seal)

    @property
    def roles(self) -> dict[Path, str]:
        """Return every file that a key encrypts, with its encryption role."""
        files = (self._secret, self.folder / RECEIVED, self.folder / SECURE, *self.folder.glob("turn-*.safetensors"))
        return {file: state_role(file) for file in files}

    @property
    def _secret(self) -> Path:
        return self.folder / "secret"

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Hold the folder during a client round. Waits while another process holds it exclusively (`alone`)."""
        with self._lock() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield True if no client round is in progress; then no client round can begin inside the `with` block."""
        with self._lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        paths.private_folder(self.folder)
        lock = os.open(self.folder / "turn.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield lock
        finally:
            os.close(lock)  # releases the lock

    def has(self, last: str) -> bool:
        """Return whether the state after the client round `last` is stored here."""
        return bool(last) and self._file(last).exists()

    def load(self, last: str, is_new: bool = False) -> FederatedState | None:
        """Return the state after the client round `last`; None if `last` is "".

        Args:
            is_new: the server treats this site as a newcomer, so a lost state is not an error.

        Raises:
            StateError: the state is missing or damaged.
        """
        if not last or (is_new and self._before(last) is None):
            return None
        if not self._file(last).exists():
            raise StateError(
                f"private state: expected that of client round {last} in {self.folder}, found none; this site "
                "continues as a new site from the next round, unless the folder is restored from a backup"
            )
        return self._read(last)[0]

    def newest(self) -> FederatedState | None:
        """Return the state after the site's last client round; None if there is none. Raises StateError if damaged."""
        turns = sorted(self.folder.glob("turn-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        return self._read(turns[-1].stem.removeprefix("turn-"))[0] if turns else None

    def save(self, turn: str, last: str, state: FederatedState | None) -> None:
        """Atomically write the state after a client round that continued from `last`; a state of None stores nothing.

        Removes states that no server can name anymore. Raises StateError, for example on a full disk.
        """
        from fedveil.contract.method import FederatedState as State_
        from fedveil.records.tensor_state import save_state

        before = self._before(last) or ""
        for file in self.folder.glob("turn-*.safetensors"):
            if file not in (self._file(last), self._file(before)):
                file.unlink()
        if state is None:
            return
        try:
            saved_state = State_(state.tensors, {"state": dict(state.scalars), "after": last})
            save_state(saved_state, self._file(turn), self.seal, state_role(self._file(turn)))
        except OSError as error:
            raise StateError(
                f"{self._file(turn)}: cannot write the private state: {error}; free some disk space"
            ) from error

    def _file(self, turn: str) -> Path:
        return self.folder / f"turn-{turn}.safetensors"

    def _before(self, turn: str) -> str | None:
        """Return the client round that `turn` continued from; None if there is no readable state for `turn`."""
        if not turn or not self._file(turn).exists():
            return None
        try:
            return self._read(turn)[1]
        except StateError as error:
            log.warning("%s", error)
            return None

    def _read(self, turn: str) -> tuple[FederatedState, str]:
        from fedveil.contract.method import FederatedState as State_
        from fedveil.records.tensor_state import load_state

        saved_state = load_state(self._file(turn), self.seal, state_role(self._file(turn)))
        scalars, after = saved_state.scalars.get("state"), saved_state.scalars.get("after")
        if not isinstance(scalars, dict) or not isinstance(after, str):
            raise StateError(f"{self._file(turn)}: this file does not contain a private state; remove it")
        return State_(saved_state.tensors, scalars), after

    def secret(self, seed: int, site: str, deterministic: bool) -> bytes:
        """Return this client's secret: drawn from the operating system on the first call, then read from the file."""
        from fedveil import rng
        from fedveil.records.atomic_files import checksummed_bytes, verify_checksummed, write_atomic

        if deterministic:
            return rng.derive_secret(f"client:{site}", seed, deterministic)
        path, role = self._secret, state_role(self._secret)
        if not path.exists():
            write_atomic(path, self.seal.closed([checksummed_bytes(rng.fresh_secret())], role))
        data = self.seal.read(path, role)
        try:
            return verify_checksummed(data)
        except ValueError as error:
            raise StateError(
                f"{path}: this site's secret for the run is damaged ({len(data)} bytes: {error}); restore it from a "
                "backup, or take no further part in this run"
            ) from None
