"""The units, such as patients, that a site has withdrawn: no later run trains on their rows.

    <state-dir>/.withdrawn/units.json   {"checksum": ..., "fedveil-withdrawn": 1, "key": 64 hex digits,
                                         "units": [[column, name, time of the withdrawal], ...]}

    name = BLAKE2b-128(key, JSON of ["", the id in the form that all its spellings share])

The key is drawn at the first withdrawal and never leaves the file. If the site has a key file, the file is encrypted
with it, like the ledger. The file contains no ids. Entries are only appended.

| case | result |
|---|---|
| rows with a withdrawn id, including rows added later | no run trains on them |
| the node config names `unit-column` | every withdrawn id is looked up in that column |
| the node config does not name `unit-column` | each id is looked up in the column named at its withdrawal |
| the data has no such column, or a row has no id in it | TaskError: the site trains on nothing, because it cannot know
  which rows to leave out |
| the file is damaged or from a different version | StateError: the site trains on nothing |
| the file is lost, such as after restoring an older state folder | the rows come back; withdraw them again |
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fedveil import paths
from fedveil.encrypted_files import FileSeal
from fedveil.errors import StateError
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

FOLDER = ".withdrawn"
_FILE, _ROLE = "units.json", "withdrawn/units"
_VERSION = 1
_KEY_BYTES, _NAME_BYTES = 32, 16


@dataclass(frozen=True)
class WithdrawnUnit:
    """One withdrawn unit.

    Attributes:
        column: the column with the unit's id.
        name: the keyed hash of the id.
        since: the time of the withdrawal.
    """

    column: str
    name: str
    since: str


@dataclass(frozen=True)
class WithdrawnUnits:
    """The withdrawn units in a state folder.

    Attributes:
        key: the key for the names; empty if there are no units.
        units: the units, in order of withdrawal.
    """

    key: bytes = b""
    units: tuple[WithdrawnUnit, ...] = ()

    def columns(self, own: str) -> list[str]:
        """Return the columns to look in. `own` is the node config's `unit-column`, or "" if not given."""
        if not self.units:
            return []
        return [own] if own else sorted({unit.column for unit in self.units})

    def covers(self, column: str, plain_id: str) -> bool:
        """Return whether a unit is withdrawn; see `find` for `column`."""
        return self.find(plain_id, column) is not None

    def find(self, plain_id: str, column: str = "") -> WithdrawnUnit | None:
        """Return the withdrawn unit with this id, in this column unless it is ""; None if there is no such unit."""
        name = self.name_of(plain_id) if self.units else ""
        found = (unit for unit in self.units if unit.name == name and column in ("", unit.column))
        return next(found, None)

    def name_of(self, plain_id: str) -> str:
        """Return the keyed hash of an id."""
        text = json.dumps(["", plain_id], ensure_ascii=False).encode()
        return hashlib.blake2b(text, digest_size=_NAME_BYTES, key=self.key).hexdigest()


@dataclass(frozen=True)
class WithdrawalRecord:
    """The file with a state folder's withdrawn units.

    Attributes:
        folder: the folder that contains the file.
        seal: the site's encryption.
    """

    folder: Path
    seal: FileSeal = FileSeal()

    @classmethod
    def open(cls, state_dir: Path, seal: FileSeal = FileSeal()) -> WithdrawalRecord:
        """Return the record for a state folder, even if the record's file does not exist yet."""
        return cls(state_dir.expanduser() / FOLDER, seal)

    @property
    def roles(self) -> dict[Path, str]:
        """Return the file with its encryption role; empty if the file does not exist."""
        return {self._file: _ROLE} if self._file.exists() else {}

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[Path, str]]:
        """Lock the record and yield the file with its role."""
        with self._locked():
            yield self.roles

    def read(self) -> WithdrawnUnits:
        """Return the withdrawn units. Raises StateError if the file cannot be read."""
        if not self._file.exists():
            return WithdrawnUnits()
        try:
            content = read_checksummed(self.seal.read(self._file, _ROLE))
            if content["fedveil-withdrawn"] != _VERSION:
                raise ValueError(f"version {content['fedveil-withdrawn']}")
            key = bytes.fromhex(content["key"])
            units = tuple(WithdrawnUnit(str(c), str(name), str(since)) for c, name, since in content["units"])
            if len(key) != _KEY_BYTES or not all(re.fullmatch(r"[0-9a-f]{32}", unit.name) for unit in units):
                raise ValueError("another key or name")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(
                f"{self._file}: cannot read the list of withdrawn units, version {_VERSION} ({type(error).__name__}); "
                "restore it from a backup: without it, the site cannot leave out their rows"
            ) from None
        return WithdrawnUnits(key, units)

    def add(self, plain_id: str, column: str) -> bool:
        """Withdraw a unit; return False if it was already withdrawn. Raises StateError."""
        with self._locked():
            known = self.read()
            if known.find(plain_id, column):
                return False
            known = known if known.key else replace(known, key=secrets.token_bytes(_KEY_BYTES))
            unit = WithdrawnUnit(column, known.name_of(plain_id), datetime.now(UTC).isoformat(timespec="seconds"))
            self._write(replace(known, units=(*known.units, unit)))
            return True

    @property
    def _file(self) -> Path:
        return self.folder / _FILE

    def _write(self, withdrawn: WithdrawnUnits) -> None:
        units = [[unit.column, unit.name, unit.since] for unit in withdrawn.units]
        content = {"fedveil-withdrawn": _VERSION, "key": withdrawn.key.hex(), "units": units}
        try:
            write_atomic(self._file, self.seal.closed([write_checksummed(content)], _ROLE))
        except OSError as error:
            raise StateError(
                f"{self._file}: cannot write the list of withdrawn units: {error}; free some disk space"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        paths.private_folder(self.folder)
        with (self.folder / "units.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
