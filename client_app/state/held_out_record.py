"""Fix the rows of a data set that this site holds out, and count the scores that it has reported for these rows.

    <state-dir>/.held-out/<site>.json    {"checksum": ..., "sets": {DATA SET: {"key": 64 hex, "part": 0.1,
                                          "files": {FILE: rows}, "rows": digest, "scores": {FLOWER RUN: 3}}}}

The first run that requests scores for a data set fixes the part, the key for the draw and the rows. If a server could
change these later, it could get the mean losses of two sets that differ by one row, and so that row's loss.

| a later run or client round asks for ... | trained on | scores |
|---|---|---|
| the same part, and the same rows are drawn | the rows not held out | up to `max-scores` in a Flower run |
| a different part of the data set | the rows not held out | none: OTHER_PART |
| the same part, but rows were removed or different rows are read | the rows not held out | none: CHANGED |
| the same part, with rows appended to a file or in a new file | the new rows too | as before |
| no part | all rows | none |

If the site names a `unit-column`, whole units are held out, by the draw for each unit's first row, so that no
person has rows on both sides. Rows appended to a held-out unit are neither trained on nor scored. The minimum number
of held-out rows then applies to units.

To use a different part, or after a change in the data, a person at the site must remove the file. The file is not
encrypted, because it reveals nothing without the data.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.client_app.state.client_state import safe_file_name
from fedveil.contract import held_out_report
from fedveil.errors import StateError
from fedveil.records.atomic_files import read_checksummed, write_atomic, write_checksummed

if TYPE_CHECKING:
    from fedveil.contract.task import ExampleOrigin

FOLDER = ".held-out"
_MOST_RUNS = 10_000  # Flower runs with scores for one data set; further runs get no scores


@dataclass(frozen=True)
class HeldOutChoice:
    """The held-out rows in one data set.

    Attributes:
        key: 32 bytes that determine which rows are held out.
        part: the held-out fraction, from 0 to 1.
        files: the number of eligible rows in each file; later rows are trained on.
        rows: the digest of the held-out rows; "" until known.
        scores: the number of reported scores, by Flower run.
    """

    key: bytes
    part: float
    files: Mapping[str, int]
    rows: str = ""
    scores: Mapping[str, int] = field(default_factory=dict)

    def is_drawn(self, origin: ExampleOrigin | None, index: int) -> bool:
        """Return whether a row is held out. A row without a file is identified by `index`, its position in the data."""
        file, row = (origin.file, origin.row) if origin else ("", index)
        if not self.is_eligible(origin, index):
            return False
        drawn = hashlib.blake2b(f"{row} {file}".encode(), digest_size=8, key=self.key).digest()
        return int.from_bytes(drawn, "little") < round(self.part * 2**64)

    def is_eligible(self, origin: ExampleOrigin | None, index: int) -> bool:
        """Return whether the first run with scores read a row with this number."""
        file, row = (origin.file, origin.row) if origin else ("", index)
        return row <= self.files.get(file, -1)


@dataclass(frozen=True)
class HeldOutRows:
    """The held-out rows for one client round, and whether they may be scored.

    Attributes:
        indices: the positions of the held-out rows; empty if no rows are held out.
        unscored: the positions of held-out rows that were later appended to a held-out unit.
        refusal: why a score is refused, as a key of `held_out_report.REFUSALS`; 0 if a score is allowed.
    """

    indices: frozenset[int] = frozenset()
    refusal: int = 0
    unscored: frozenset[int] = frozenset()


@dataclass(frozen=True)
class HeldOutRecord:
    """One site's choices of held-out rows, by data set.

    Attributes:
        file: the record's file.
    """

    file: Path

    @classmethod
    def open(cls, state_dir: Path, site: str) -> HeldOutRecord:
        """Open a site's record. Raises ConfigError for a name that is not a plain file name."""
        return cls(state_dir.expanduser() / FOLDER / f"{safe_file_name('site', site)}.json")

    def select_rows(
        self,
        data_set: str,
        part: float,
        key: bytes,
        origins: Sequence[ExampleOrigin | None],
        units: Sequence[Sequence[int]] | None = None,
    ) -> HeldOutRows:
        """Return the held-out rows, as fixed by the first run with scores for this data set.

        Args:
            data_set: the data set's id.
            part: the fraction that this run requests, above 0.
            key: 32 bytes, used if this is the first run.
            origins: one entry per row, in order.
            units: the positions of each unit's rows, in order; None if each row is drawn separately.

        Raises:
            StateError: the record is not readable or writable.
        """
        with self._locked():
            choices = self._read()
            choice = choices.get(data_set) or HeldOutChoice(key, part, _count_rows(origins))
            grouped = units if units is not None else [(i,) for i in range(len(origins))]
            # A unit is drawn by its first eligible row, so rows added to the unit later, in any file, do not move it.
            firsts = [next((i for i in unit if choice.is_eligible(origins[i], i)), unit[0]) for unit in grouped]
            drawn = [unit for unit, i in zip(grouped, firsts, strict=True) if choice.is_drawn(origins[i], i)]
            indices = frozenset(i for unit in drawn for i in unit)
            unscored = frozenset(i for i in indices if not choice.is_eligible(origins[i], i))
            rows = _digest_rows(origins, indices - unscored)
            if data_set not in choices:
                if len(drawn) < held_out_report.LEAST_ROWS or len(indices) == len(origins):
                    return HeldOutRows(refusal=held_out_report.TOO_FEW)
                self._write({**choices, data_set: replace(choice, rows=rows)})
            elif part != choice.part:
                return HeldOutRows(indices, held_out_report.OTHER_PART, unscored)
            elif rows != choice.rows:
                return HeldOutRows(indices, held_out_report.CHANGED, unscored)
            return HeldOutRows(indices, unscored=unscored)

    def count_score(self, data_set: str, run: str, most: int) -> bool:
        """Count one score before computing it; return False if the Flower run already has `most`. Raises StateError."""
        with self._locked():
            choices = self._read()
            choice = choices[data_set]
            given = choice.scores.get(run, 0)
            if given >= most or (not given and len(choice.scores) >= _MOST_RUNS):
                return False
            self._write({**choices, data_set: replace(choice, scores={**choice.scores, run: given + 1})})
            return True

    def _read(self) -> dict[str, HeldOutChoice]:
        if not self.file.exists():
            return {}
        try:
            sets = read_checksummed(self.file.read_bytes())["sets"]
            return {str(name): _parse_choice(entry) for name, entry in sets.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{self.file}: cannot read the list of examples that this site holds out ({type(error).__name__}); "
                "restore it from a backup, or set evaluate.held-out = 0"
            ) from None

    def _write(self, choices: Mapping[str, HeldOutChoice]) -> None:
        sets = {
            name: {
                "key": one.key.hex(), "part": one.part, "files": dict(one.files), "rows": one.rows,
                "scores": dict(one.scores),
            }
            for name, one in choices.items()
        }  # fmt: skip
        try:
            write_atomic(self.file, write_checksummed({"sets": sets}))
        except OSError as error:
            raise StateError(
                f"{self.file}: cannot write the list of held-out examples: {error}; free some disk space"
            ) from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _parse_choice(entry: Mapping[str, Any]) -> HeldOutChoice:
    """Parse a choice from its entry. Raises ValueError, KeyError or TypeError for any other format."""
    key = bytes.fromhex(entry["key"])
    if len(key) != 32:
        raise ValueError("key")
    files = {str(name): int(rows) for name, rows in entry["files"].items()}
    scores = {str(run): int(given) for run, given in entry["scores"].items()}
    return HeldOutChoice(key, float(entry["part"]), files, str(entry["rows"]), scores)


def _count_rows(origins: Sequence[ExampleOrigin | None]) -> dict[str, int]:
    """Return the largest row number in each file; rows without a file count under the name ""."""
    counts: dict[str, int] = {}
    for index, origin in enumerate(origins):
        file, row = (origin.file, origin.row) if origin else ("", index)
        counts[file] = max(counts.get(file, 0), row)
    return counts


def _digest_rows(origins: Sequence[ExampleOrigin | None], indices: frozenset[int]) -> str:
    """Return the SHA-256 of the row names, independent of their order."""
    names = sorted(f"{origin.row} {origin.file}" if (origin := origins[i]) else f"{i} " for i in indices)
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
