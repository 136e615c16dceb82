"""Check that a file has rows with the given columns, without reading all of a large file.

| file | part that is read |
|---|---|
| Parquet | its footer: the names of its columns, the number of its rows |
| JSON Lines of at most _MOST_BYTES | all of it, as a run reads it |
| longer ones | the lines within these bytes |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.data import tables
from fedveil.errors import TaskError

_MOST_BYTES = 1 << 26
_AT_ONCE = 64  # rows, which may be images


@dataclass(frozen=True)
class FileProbe:
    """The number of examples read from a file, and whether that is the whole file."""

    rows: int
    is_whole: bool


def probe_file(file: Path, columns: tuple[str, ...], texts: tuple[str, ...] = ()) -> FileProbe:
    """Count the rows of `file` and check its columns. Raises TaskError as `tables.read_table`, for the part read."""
    is_parquet = file.suffix == ".parquet"
    if not is_parquet and file.stat().st_size <= _MOST_BYTES:
        return FileProbe(len(tables.read_table(file, columns, texts=texts)), True)
    rows, names = _footer(file) if is_parquet else _lines(file)
    if not rows:
        raise TaskError(f'task.data: expected at least one row in "{file}", found none; add rows')
    tables.require_columns(columns, names, file)
    return FileProbe(rows, is_parquet)


def first_rows(file: Path, column: str, most: int) -> Iterator[tuple[Any, int]]:
    """Yield a column's values in the first `most` rows of a checked file, each with its row, counted from 1."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    if file.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(file) as opened:
            parts = opened.iter_batches(_AT_ONCE, columns=[column])
            values = (value for part in parts for value in part.column(0).to_pylist())
            yield from zip(itertools.islice(values, most), itertools.count(1))
        return
    with file.open("rb") as lines:
        rows = (tables.parse_line(line, number, file) for number, line in enumerate(lines, start=1) if line.strip())
        yield from zip((row.get(column) for row in itertools.islice(rows, most)), itertools.count(1))


def _footer(file: Path) -> tuple[int, list[str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            return int(opened.metadata.num_rows), list(opened.schema_arrow.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise tables.no_parquet(file, error) from None


def _lines(file: Path) -> tuple[int, list[str]]:
    rows, number, left, names = 0, 0, _MOST_BYTES, dict[str, None]()
    with file.open("rb") as lines:
        while (line := lines.readline(left + 1)) and len(line) <= left:
            number, left = number + 1, left - len(line)
            if line.strip():
                rows, names = rows + 1, names | dict.fromkeys(tables.parse_line(line, number, file))
    return rows, list(names)
