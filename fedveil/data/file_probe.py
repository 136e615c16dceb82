"""Check that a file has rows with the given columns, without reading a large file completely.

| file | what is read |
|---|---|
| Parquet | the footer: the column names and the number of rows |
| a text file of at most _MOST_BYTES | the whole file, just as in a run |
| a longer or compressed text file | the rows within its first _MOST_BYTES |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.data import columnar_files, tables
from fedveil.data.columnar_files import is_columnar
from fedveil.data.row_files import RowFile
from fedveil.errors import TaskError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

_MOST_BYTES = 1 << 26
_AT_ONCE = 64  # rows, which may be images


@dataclass(frozen=True)
class FileProbe:
    """The number of examples read from a split's files, and whether these are all the examples."""

    rows: int
    is_whole: bool


def is_small(files: Sequence[Path]) -> bool:
    """Return whether the files are small enough for a check to read completely."""
    return sum(file.stat().st_size for file in files) <= _MOST_BYTES


def probe_files(
    files: Sequence[Path], columns: tuple[str, ...], texts: tuple[str, ...] = (), others: tuple[str, ...] = ()
) -> FileProbe:
    """Count the rows in a split's files and check the columns.

    Raises TaskError like `tables.read_table`, but only for the part that was read.
    """
    if not is_columnar(files[0]) and is_small(files):
        return FileProbe(len(tables.read_table(files, columns, texts=texts, only=(*columns, *others))), True)
    count, is_whole = 0, True
    for file in files:
        rows, names, is_all = _footer(file) if is_columnar(file) else _first_rows_of_text(file)
        if rows or len(files) == 1:
            tables.require_columns(columns, names, file)
        count, is_whole = count + rows, is_whole and is_all
        if not is_all:
            break
    if not count:
        raise TaskError(f'task.data: "{files[0]}" has no rows; add some')
    return FileProbe(count, is_whole)


def first_rows(file: Path, column: str, most: int) -> Iterator[tuple[Any, int]]:
    """Yield a column's values in the first `most` rows of a checked file, each with its row, counted from 1."""
    if is_columnar(file):
        parts = columnar_files.iter_tables(file, [column], _AT_ONCE)
        values = (value for part in parts for value in _decoded(part, file, column))
        yield from zip(itertools.islice(values, most), itertools.count(1))
        return
    rows = itertools.islice(RowFile(file, most=_MOST_BYTES), most)
    yield from zip((row.get(column) for row in rows), itertools.count(1))


def undecodable(file: Path, columns: Sequence[str]) -> TaskError:
    """Return the error for values in a columnar file that Python cannot represent. It does not quote any value."""
    return TaskError(
        f'task.data: cannot read {" and ".join(columns)} of the split with "{file}": a text is not UTF-8, or a '
        "date is after the year 9999; correct it"
    )


def _decoded(part: pyarrow.Table, file: Path, column: str) -> list[Any]:
    try:
        return list(part.column(0).to_pylist())
    except (ValueError, OverflowError):  # its text may quote a value
        raise undecodable(file, (column,)) from None


def describe_reading(file: Path) -> str:
    """Return the encoding and separator of a text file, like `tables.describe_reading`, from the part that is read."""
    return tables.describe_reading(file, _MOST_BYTES)


def _footer(file: Path) -> tuple[int, list[str], bool]:
    return columnar_files.count_rows(file), list(columnar_files.read_schema(file).names), True


def _first_rows_of_text(file: Path) -> tuple[int, list[str], bool]:
    reader, count, names = RowFile(file, most=_MOST_BYTES), 0, dict[str, None]()
    for row in reader:
        if reader.bytes_read > _MOST_BYTES:
            return count, list(names), False
        count, names = count + 1, names | dict.fromkeys(row)
    return count, list(names), True
