"""Encoded text examples as a few arrays rather than Python objects, in memory or mapped from a cache."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final, overload

import numpy as np
from jaxtyping import Int32, Int64
from typing_extensions import override

from fedveil.contract.task import Example, ExampleOrigin
from fedveil.data.batches import TokenExample

Part = Mapping[str, np.ndarray]
KINDS: Mapping[str, str] = {
    "ids": "<i4", "lengths": "<i4", "starts": "<i4", "cuts": "<i4", "wholes": "<i4", "numbers": "<i8",
    "gaps": "<i4", "gap_counts": "<i4",
}  # fmt: skip
_FILE = 1 << 40  # more than the number of rows in any file


@final
class TokenizedDataset(Sequence[TokenExample]):
    """Tokenized examples. An example becomes a Python object on access; slicing returns a list of such objects.

    Args:
        arrays: arrays named as in KINDS: the concatenated tokens of all examples and, for each example, its number of
            tokens, the start of its target, its `cut`, its number of tokens before truncation, its origin as returned
            by `pack_origins`, and its number of gaps; "gaps" has the starts and ends of all gaps.
    """

    def __init__(self, arrays: Part) -> None:
        self._ids: Int32[np.ndarray, " tokens"] = arrays["ids"]
        self._starts: Int32[np.ndarray, " rows"] = arrays["starts"]
        self.cuts: Int32[np.ndarray, " rows"] = arrays["cuts"]
        self.wholes: Int32[np.ndarray, " rows"] = arrays["wholes"]
        self.numbers: Int64[np.ndarray, " rows"] = arrays["numbers"]
        self.lengths: Int32[np.ndarray, " rows"] = arrays["lengths"]
        self._gaps: Int32[np.ndarray, " bounds"] = arrays["gaps"]
        self._gap_ends: Int64[np.ndarray, " rows"] = np.cumsum(arrays["gap_counts"], dtype=np.int64)
        self._ends: Int64[np.ndarray, " rows"] = np.cumsum(arrays["lengths"], dtype=np.int64)

    @override
    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TokenExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenExample]: ...
    @override
    def __getitem__(self, index: int | slice) -> TokenExample | list[TokenExample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[operator.index(index)]
        first, gap = (int(self._ends[at - 1]), int(self._gap_ends[at - 1])) if at else (0, 0)
        bounds: list[int] = self._gaps[2 * gap : 2 * int(self._gap_ends[at])].tolist() if len(self._gaps) else []
        return TokenExample(
            self._ids[first : int(self._ends[at])].tolist(),
            int(self._starts[at]),
            gaps=tuple(zip(bounds[::2], bounds[1::2], strict=True)),
            cut=int(self.cuts[at]),
            whole=int(self.wholes[at]),
        )


def slice_part(rows: Sequence[TokenExample], numbers: Sequence[int]) -> Part:
    """Return the examples with these numbers as arrays."""
    lengths = [len(row.ids) for row in rows]
    ids = np.fromiter(itertools.chain.from_iterable(row.ids for row in rows), np.int32, sum(lengths))
    return {
        "ids": ids,
        "lengths": np.array(lengths, np.int32),
        "starts": np.array([row.start for row in rows], np.int32),
        "cuts": np.array([row.cut for row in rows], np.int32),
        "wholes": np.array([row.whole or len(row.ids) for row in rows], np.int32),
        "numbers": np.array(numbers, np.int64),
        "gaps": np.array([bound for row in rows for gap in row.gaps for bound in gap], np.int32),
        "gap_counts": np.array([len(row.gaps) for row in rows], np.int32),
    }


def pack_origins(examples: Iterable[Example], files: Sequence[Path]) -> list[int]:
    """Return each example's row in its file, counted from 1, plus _FILE times the index of the file; 0 for no row."""
    places = {str(file): place * _FILE for place, file in enumerate(files)}
    return [each.origin.row + places.get(each.origin.file, 0) if each.origin else 0 for each in examples]


def unpack_origins(numbers: Int64[np.ndarray, " rows"], files: Sequence[Path]) -> Iterator[ExampleOrigin]:
    """Yield the origins that `pack_origins` packed, given the same files."""
    return (ExampleOrigin(str(files[number // _FILE]), number % _FILE) for number in map(int, numbers))


def join_parts(parts: Iterable[Part]) -> Part:
    """Concatenate the arrays of all parts in memory."""
    arrays_by_name: dict[str, list[np.ndarray]] = {name: [np.empty(0, kind)] for name, kind in KINDS.items()}
    for part in parts:
        for name, array in part.items():
            arrays_by_name[name].append(array)
    return {name: np.concatenate(arrays) for name, arrays in arrays_by_name.items()}
