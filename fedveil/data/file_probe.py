"""Check that a file has rows with the given columns, without reading all of a large file.

| file | part that is read |
|---|---|
| Parquet | its footer: the names of its columns, the number of its rows |
| a text file of at most _MOST_BYTES | all of it, as a run reads it |
| longer or compressed ones | the rows within these bytes |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.data import tables
from fedveil.data.row_files import TEXT_SUFFIXES, RowFile, row_suffix
from fedveil.errors import TaskError

_MOST_BYTES = 1 << 26
_AT_ONCE = 64  # rows, which may be images


@dataclass(frozen=True)
class FileProbe:
    """The number of examples read from a file, and whether that is the whole file."""

    rows: int
    is_whole: bool


def is_small(file: Path) -> bool:
    """Return whether the file has few enough bytes for a check to read all of it."""
    return file.stat().st_size <= _MOST_BYTES


def probe_file(file: Path, columns: tuple[str, ...], texts: tuple[str, ...] = ()) -> FileProbe:
    """Count the rows of `file` and check its columns. Raises TaskError like `tables.read_table`, for the part read."""
    suffix = row_suffix(file)
    if suffix in TEXT_SUFFIXES and is_small(file):
        return FileProbe(len(tables.read_table(file, columns, texts=texts)), True)
    rows, names, is_whole = _footer(file) if suffix == ".parquet" else _first_rows_of_text(file)
    if not rows:
        raise TaskError(f'task.data: expected at least one row in "{file}", found none; add rows')
    tables.require_columns(columns, names, file)
    return FileProbe(rows, is_whole)


def first_rows(file: Path, column: str, most: int) -> Iterator[tuple[Any, int]]:
    """Yield a column's values in the first `most` rows of a checked file, each with its row, counted from 1."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    if row_suffix(file) == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as opened:
            parts = opened.iter_batches(_AT_ONCE, columns=[column])
            values = (value for part in parts for value in part.column(0).to_pylist())
            yield from zip(itertools.islice(values, most), itertools.count(1))
        return
    rows = itertools.islice(RowFile(file, most=_MOST_BYTES), most)
    yield from zip((row.get(column) for row in rows), itertools.count(1))


def describe_reading(file: Path) -> str:
    """Return the encoding and the separator of a text file as `tables.describe_reading`, of the part that is read."""
    return tables.describe_reading(file, _MOST_BYTES)


def _footer(file: Path) -> tuple[int, list[str], bool]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            return int(opened.metadata.num_rows), list(opened.schema_arrow.names), True
    except (pyarrow.ArrowException, OSError) as error:
        raise tables.no_parquet(file, error) from None


def _first_rows_of_text(file: Path) -> tuple[int, list[str], bool]:
    reader, count, names = RowFile(file, most=_MOST_BYTES), 0, dict[str, None]()
    for row in reader:
        if reader.bytes_read > _MOST_BYTES:
            return count, list(names), False
        count, names = count + 1, names | dict.fromkeys(row)
    return count, list(names), True
