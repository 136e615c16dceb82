"""Columnar files: Parquet, and the Arrow files that `datasets` writes. Errors name the file but never quote a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import TaskError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]

__all__ = ["COLUMNAR_SUFFIXES", "count_rows", "is_columnar", "iter_tables", "read_schema"]

COLUMNAR_SUFFIXES = (".parquet", ".arrow")


def is_columnar(file: Path) -> bool:
    """Return whether the file extension is one of COLUMNAR_SUFFIXES, ignoring case."""
    return file.name.lower().endswith(COLUMNAR_SUFFIXES)


def read_schema(file: Path) -> pyarrow.Schema:
    """Return the schema of a file. Raises TaskError for a damaged file or a duplicate column name."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    with _errors_of(file):
        if _is_parquet(file):
            schema = pyarrow.parquet.read_schema(file)
        else:
            with _open_arrow(file) as reader:
                schema = reader.schema
        names = schema.names  # which may not be UTF-8
    if len(set(names)) < len(names):
        raise TaskError(f'task.data: two columns of "{file}" have the same name; rename one of them')
    return schema


def count_rows(file: Path) -> int:
    """Return the number of rows in a file. Raises TaskError for a damaged file."""
    import pyarrow.parquet

    with _errors_of(file):
        if _is_parquet(file):
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        with _open_arrow(file) as reader:
            return sum(len(batch) for batch in _batches(reader))


def iter_tables(file: Path, columns: Sequence[str], at_once: int) -> Iterator[pyarrow.Table]:
    """Yield tables of at most `at_once` rows with these columns. Raises TaskError for a damaged file."""
    import pyarrow
    import pyarrow.parquet

    with _errors_of(file):
        if _is_parquet(file):
            with pyarrow.parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(at_once, columns=list(columns)):
                    table = pyarrow.Table.from_batches([batch]).select(list(columns))
                    for field in table.schema:
                        if "dictionary" in str(field.type):  # the reader does not check the indices of a dictionary
                            table.column(field.name).validate(full=True)
                    yield table
            return
        with _open_arrow(file) as reader:
            for batch in _batches(reader):
                table = pyarrow.Table.from_batches([batch]).select(list(columns))
                table.validate(full=True)  # the file is memory-mapped, so a wrong offset would crash the process
                for start in range(0, len(table), at_once):
                    yield table.slice(start, at_once)


def _is_parquet(file: Path) -> bool:
    return file.name.lower().endswith(".parquet")


def _open_arrow(file: Path) -> contextlib.AbstractContextManager[pyarrow.ipc.RecordBatchStreamReader]:
    """Open a file in one of Arrow's two formats: the stream format, which `datasets` writes, or the file format."""
    import pyarrow

    source = pyarrow.memory_map(str(file)) if file.stat().st_size else pyarrow.BufferReader(b"")
    try:
        return pyarrow.ipc.open_stream(source)  # type: ignore[no-any-return]
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_file(source)  # type: ignore[no-any-return]


def _batches(reader: pyarrow.RecordBatchReader) -> Iterator[pyarrow.RecordBatch]:
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
        return
    yield from reader


@contextlib.contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """Return a context that turns library errors about a file into TaskErrors, because their text may quote a value."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError, MemoryError) as error:
        if isinstance(error, TaskError):
            raise
        reason = (isinstance(error, OSError) and error.strerror) or "it is damaged or in a different format"
        kind = "Parquet" if _is_parquet(file) else "Arrow"
        raise TaskError(f'task.data: cannot read "{file}" as {kind}: {reason}; write it again') from None
