"""Which of a site's rows it holds out for scores.

A row is held out where BLAKE2b of its file and number, under a key of the site's for the run, lies below the part that
is asked. So rows that are appended move no other one, each run holds out other rows, and the server can choose none.

| case | result |
|---|---|
| fewer than LEAST_ROWS rows would be held out, or none would be left | none is; all are trained on |
| a row of no file | its place in the data set stands for its number |
| a file that loses or changes rows while a run lasts | its later rows have other numbers: some change sides |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

from typing_extensions import override

from fedveil.contract.held_out import LEAST_ROWS
from fedveil.contract.task import Origin, Rows


@dataclass(frozen=True)
class Divided:
    """A site's rows in two parts, neither of them a copy.

    Attributes:
        trained: what it trains on.
        held: what it scores on; empty where nothing is held out.
    """

    trained: Rows
    held: Rows


def divided(rows: Rows, origins: Iterable[Origin | None], key: bytes, part: float) -> Divided:
    """The rows, of which about `part` (0 to 1) are held out; `origins` are theirs, one a row, and `key` has 32 bytes.

    Raises:
        ValueError: there are not as many origins as rows.
    """
    below = round(part * 2**64)
    sides: tuple[list[int], list[int]] = ([], [])
    for (index, origin), _ in zip(enumerate(origins), range(len(rows)), strict=True):
        name = f"{origin.row} {origin.file}" if origin else f"none {index}"
        drawn = hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
        sides[int.from_bytes(drawn, "little") < below].append(index)
    trained, held = sides
    if len(held) < LEAST_ROWS or not trained:
        return Divided(rows, ())
    return Divided(Chosen(rows, trained), Chosen(rows, held))


@final
class Chosen(Sequence[Any]):
    """Some of the rows, in the order of their indices, read where they lie."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows, self._indices = rows, indices

    @override
    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._rows[i] for i in self._indices[index]]
        return self._rows[self._indices[index]]
