"""The units, such as patients, that a site has withdrawn: no later run trains on their rows.

    <state-dir>/.withdrawn/units.json   {"checksum": ..., "fedveil-withdrawn": 1, "key": 64 hex digits,
                                         "units": [[column, name, time of the withdrawal], ...]}

    name = BLAKE2b-128(key, JSON of ["", the id in the form that all its writings share])

The key is drawn at the first withdrawal and never leaves the file, which the site's key file encrypts like the ledger.
The file contains no id. Entries are only appended.

| case | result |
|---|---|
| rows with a withdrawn id, also rows that were added later | no run trains on them |
| the node config names `unit-column` | every withdrawn id is looked for in that column |
| it does not | each id is looked for in the column that was named at its withdrawal |
| the data has no such column, or a row in it has no id | TaskError: the site trains on nothing, because it cannot know
  which rows to leave out |
| the file is damaged, or another version's | StateError: the site trains on nothing |
| the file is lost, as after the restore of an older state folder | the rows come back: withdraw them again |
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
        column: the column of its id.
        name: keyed hash of the id.
        since: time of the withdrawal.
    """

    column: str
    name: str
    since: str


@dataclass(frozen=True)
class WithdrawnUnits:
    """The withdrawn units of a state folder.

    Attributes:
        key: the key of the names; empty if there are none.
        units: the units, in the order of their withdrawal.
    """

    key: bytes = b""
    units: tuple[WithdrawnUnit, ...] = ()

    def columns(self, own: str) -> list[str]:
        """Return the columns to look in. `own`: the node config's `unit-column`; "" for none."""
        if not self.units:
            return []
        return [own] if own else sorted({unit.column for unit in self.units})

    def covers(self, column: str, plain_id: str) -> bool:
        """Return whether a unit is withdrawn. `column`: as in `find`."""
        return self.find(plain_id, column) is not None

    def find(self, plain_id: str, column: str = "") -> WithdrawnUnit | None:
        """Return the withdrawn unit with this id, in this column unless that is ""; None if there is none."""
        name = self.name_of(plain_id) if self.units else ""
        found = (unit for unit in self.units if unit.name == name and column in ("", unit.column))
        return next(found, None)

    def name_of(self, plain_id: str) -> str:
        """Return the keyed hash of an id."""
        text = json.dumps(["", plain_id], ensure_ascii=False).encode()
        return hashlib.blake2b(text, digest_size=_NAME_BYTES, key=self.key).hexdigest()


@dataclass(frozen=True)
class WithdrawalRecord:
    """The file of a state folder's withdrawn units.

    Attributes:
        folder: its folder.
        seal: the site's encryption.
    """

    folder: Path
    seal: FileSeal = FileSeal()

    @classmethod
    def open(cls, state_dir: Path, seal: FileSeal = FileSeal()) -> WithdrawalRecord:
        """Return the record of a state folder, which may not exist yet."""
        return cls(state_dir.expanduser() / FOLDER, seal)

    @property
    def roles(self) -> dict[Path, str]:
        """Return the file with its encryption role; empty if it does not exist."""
        return {self._file: _ROLE} if self._file.exists() else {}

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[Path, str]]:
        """Lock the record; yield the file with its role."""
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
                f"{self._file}: expected the list of withdrawn units, version {_VERSION}, found none that can be read "
                f"({type(error).__name__}); restore it from a backup: without it the site cannot leave out their rows"
            ) from None
        return WithdrawnUnits(key, units)

    def add(self, plain_id: str, column: str) -> bool:
        """Withdraw a unit; return False if it was withdrawn before. Raises StateError."""
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
            raise StateError(f"{self._file}: cannot write the list of withdrawn units: {error}; free space") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        paths.private_folder(self.folder)
        with (self.folder / "units.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
