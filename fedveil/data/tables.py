"""Read a split's examples from a data folder or file, as text (see `row_files`) or Parquet, and write no file there.

A table is an Arrow table: in memory, or mapped from an unnamed file in a private folder that the caller
chooses. Its rows become Python objects a few at a time, on use.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import operator
import os
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedveil import paths
from fedveil.contract.task import DatasetShard, Example, ExampleOrigin
from fedveil.data import partition
from fedveil.data.row_files import ENCODINGS, SUFFIXES, RowFile, describe_columns, row_suffix
from fedveil.data.row_values import describe_value
from fedveil.errors import StateError, TaskError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    from datasets import Dataset

    from fedveil.config import RunConfig

__all__ = ["DatasetTable", "TableSelection", "read_split", "read_table", "split_file"]

_SPLITS = ("train", "test")
_OTHER_SPLITS = ("validation", "valid", "val", "dev")  # which no task reads
_TABULAR = {*SUFFIXES, ".arrow", ".feather", ".xlsx", ".xls"}
_MOST_NAMES = 8  # of files, in a message
log = logging.getLogger("fedveil.data")
_PARSED = 10_000  # rows of a text file that are added to the table together
_CONVERSATIONS = ("messages", "conversations")  # usual names of their column
_KINDS = {str: "texts", bool: "true or false", int: "numbers", float: "numbers", list: "lists", dict: "objects"}
_AT_ONCE = 256  # rows that are Python objects at a time: few, because they may be images


@dataclass(frozen=True)
class DatasetTable:
    """All rows of one split.

    Attributes:
        rows: all columns.
        origin: returns a row's origin by its index.
        folder: base folder of relative paths in the rows.
        class_names: names of all classes that the data set declares, by number; empty if it declares none.
    """

    rows: Dataset
    origin: Callable[[int], ExampleOrigin]
    folder: str
    class_names: tuple[str, ...] = ()

    def examples(self, split: str, share: DatasetShard | None, config: RunConfig) -> TableSelection:
        """Return the examples, or those of the part `share`.

        For the split "train" these are at most task.examples-per-site, a seeded choice in file order. Raises TaskError
        as `partition.partition_indices`.
        """
        task, seed = config.task, config.run.seed
        chosen: Sequence[int] = range(len(self.rows))
        if share is not None:
            chosen = partition.partition_indices(self.rows, share, task, seed)
        if split == "train" and 0 < task.examples_per_site < len(chosen):
            chosen = [chosen[i] for i in sorted(random.Random(seed).sample(range(len(chosen)), task.examples_per_site))]
        return TableSelection(self, np.asarray(chosen, dtype=np.int64))


@final
class TableSelection(Sequence[Example]):
    """Some rows of a table. Examples are built on access; iteration reads _AT_ONCE rows at a time.

    Args:
        table: the whole table.
        at: the indices of the rows in it.
    """

    def __init__(self, table: DatasetTable, at: NDArray[np.int64]) -> None:
        self._table, self.at = table, at
        self._rows = table.rows.with_format("arrow")

    @override
    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> TableSelection: ...
    @override
    def __getitem__(self, index: int | slice) -> Example | TableSelection:
        if isinstance(index, slice):
            return TableSelection(self._table, self.at[index])
        return self._read(self.at[operator.index(index)][None])[0]

    @override
    def __iter__(self) -> Iterator[Example]:
        for i in range(0, len(self.at), _AT_ONCE):
            yield from self._read(self.at[i : i + _AT_ONCE])

    def without(self, is_left_out: Callable[[Example], bool]) -> TableSelection:
        """Return the rows that are not left out, in the same order."""
        kept = np.fromiter((not is_left_out(example) for example in self), dtype=bool, count=len(self))
        return TableSelection(self._table, self.at[kept])

    def _read(self, at: NDArray[np.int64]) -> list[Example]:
        first, last = int(at[0]), int(at[-1])
        in_line = last - first + 1 == len(at) and bool((np.diff(at) == 1).all())
        selection = self._rows[first : last + 1] if in_line else self._rows[at.tolist()]
        table = self._table
        try:
            rows = selection.to_pylist()
        except (ValueError, OverflowError):  # whose text may quote a value
            raise TaskError(
                f"task.data: cannot read a value from {table.origin(first)} to {table.origin(last)}: a text is not "
                "UTF-8, or a date lies beyond the year 9999; correct it"
            ) from None
        return [
            Example(row, table.origin(i), table.folder, table.class_names)
            for i, row in zip(at.tolist(), rows, strict=True)
        ]


def read_split(
    data: Path, split: str, columns: tuple[str, ...], scratch: Path | None = None, texts: tuple[str, ...] = ()
) -> DatasetTable:
    """Return the rows of the split's file; see `read_table`. Raises TaskError like `split_file` and `read_table`."""
    file = split_file(data, split)
    if unread := describe_unread(data):
        log.warning('task.data: "%s": %s', data, unread)
    if how := describe_reading(file):
        log.warning('task.data: "%s": %s', file, how)
    rows = read_table(file, columns, scratch, texts)
    return DatasetTable(rows, lambda i: ExampleOrigin(str(file), i + 1), str(file.parent))


@contextlib.contextmanager
def columns_named_by(key: str) -> Iterator[None]:
    """Context in which errors about rows name `key` instead of task.data."""
    try:
        yield
    except TaskError as error:
        raise TaskError(str(error).replace("task.data:", f"{key}:", 1)) from None


def digest_file(file: Path) -> str:
    """Return the SHA-256 of a data file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def split_file(data: Path, split: str) -> Path:
    """Return the file of `split` in the folder `data`, or `data` itself if it is a file.

    Raises:
        TaskError: neither exists, or the file has an unknown format.
    """
    if data.is_file():
        if not row_suffix(data):
            raise TaskError(f'task.data: expected a file ending in {", ".join(SUFFIXES)}, found "{data}"; convert it')
        return data
    if not data.is_dir():
        raise TaskError(f'task.data: expected a folder or file of rows, found none at "{data}"; correct the path')
    files = find_split_files(data, split)
    if len(files) > 1:
        raise TaskError(
            f'task.data: expected one file of the split "{split}" in "{data}", found '
            f"{' and '.join(str(file.relative_to(data)) for file in files)}; remove one"
        )
    if files:
        return files[0]
    raise TaskError(
        f'task.data: expected a file of the split "{split}" in "{data}", such as {split}.jsonl, {split}.csv or '
        f"{split}.parquet, found {', '.join(sorted(p.name for p in data.iterdir())[:8]) or 'nothing'}; add the file or "
        "name another folder"
    )


def find_split_files(data: Path, split: str) -> list[Path]:
    """Return the files of a split in the folder `data`: their names are the split's, in any case, with an ending.

    An encoding may stand between: train.cp1252.csv. The metadata of an image folder, <split>/metadata.*, is such a
    file too, as for `datasets`; its paths are relative to it.
    """
    files = [file for file in sorted(data.iterdir()) if file.is_file() and _stem_of(file) == split.lower()]
    folder = data / split
    inner = sorted(folder.iterdir()) if folder.is_dir() else []
    return files + [file for file in inner if file.is_file() and _is_metadata(file)]


def _is_metadata(file: Path) -> bool:
    suffix = row_suffix(file)
    return bool(suffix) and file.name.lower().removesuffix(suffix) == "metadata"


def _stem_of(file: Path) -> str:
    """Return the name of a file of rows without ending and encoding, in lower case; "" for another file."""
    suffix = row_suffix(file)
    stem, _, encoding = file.name.lower().removesuffix(suffix).partition(".")
    return stem if suffix and encoding in ("", *ENCODINGS) else ""


def describe_reading(file: Path, most: int = 0) -> str:
    """Return the encoding and the separator of a text file, found in its first `most` bytes; "" for the usual ones.

    Raises:
        TaskError: they are not certain.
    """
    return "" if row_suffix(file) == ".parquet" else RowFile(file, most=most).describe()


def describe_unread(data: Path) -> str:
    """Return the files and folders of examples in the folder `data` that no split is read from; "" if there is none."""
    if not data.is_dir():
        return ""
    names = sorted(path.name for path in data.iterdir() if not path.name.startswith(".") and _is_unread(path))
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f"not read: {', '.join(names[:_MOST_NAMES])}{more}" if names else ""


def _is_unread(path: Path) -> bool:
    stem = path.name.partition(".")[0].lower()
    if path.is_dir():
        return stem in _OTHER_SPLITS
    tabular = any(f".{ending}" in _TABULAR for ending in path.name.lower().split(".")[1:])
    return tabular and _stem_of(path) not in _SPLITS


def read_table(
    file: Path, columns: tuple[str, ...], scratch: Path | None = None, texts: tuple[str, ...] = ()
) -> Dataset:
    """Read all rows of `file` into memory or, with a private folder `scratch`, mapped from an unnamed file in it.

    Numbers in the columns `texts` become text, as written in the file, so that 1 stays "1" among 2.5.

    This bypasses the cache of `datasets`: a site may have no writable one, and many processes would share it.

    Raises:
        TaskError: a line or the file cannot be read, there is no row, or one of `columns` is missing.
        StateError: `scratch` cannot be written.
    """
    from datasets import Dataset

    table = (_parquet if row_suffix(file) == ".parquet" else _text_file)(file, scratch, texts)
    if table is None or not len(table):
        raise TaskError(f'task.data: expected at least one row in "{file}", found none; add rows')
    require_columns(columns, table.column_names, file)
    return Dataset(table, fingerprint=secrets.token_hex(8))  # otherwise `datasets` would hash the whole table


def no_parquet(file: Path, error: Exception) -> TaskError:
    """Return the error for a file that is damaged or is not Parquet. The library's own text may quote a value."""
    reason = (isinstance(error, OSError) and error.strerror) or "it is damaged or in a different format"
    return TaskError(f'task.data: cannot read "{file}" as Parquet: {reason}; write it again')


def require_columns(columns: tuple[str, ...], names: Sequence[str], file: Path) -> None:
    """Raise TaskError if one of `columns` is not among the column names of `file`."""
    for column in columns:
        if column not in names:
            talks = next((name for name in _CONVERSATIONS if name in names and name not in columns), "")
            raise TaskError(
                f'task.data: expected column "{column}" in "{file}", found {describe_columns(file, names)}; '
                f"set task.source-column and task.target-column to columns of the file"
                + (f', or task.messages-column = "{talks}" if it holds whole conversations' if talks else "")
            )


def _text_file(file: Path, scratch: Path | None, texts: tuple[str, ...]) -> pyarrow.Table | None:
    # Not pyarrow's JSON reader: it turns text that looks like a date into timestamps.
    import pyarrow

    try:
        schemas: list[pyarrow.Schema] = []
        table = _kept(_same(_text_tables(file, texts), schemas), scratch)
        if len(schemas) < 2:
            return table
        return _kept(_text_tables(file, texts, pyarrow.unify_schemas(schemas, promote_options="permissive")), scratch)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):  # their texts quote values
        raise _mixed(file, texts) from None


def _mixed(file: Path, texts: tuple[str, ...]) -> TaskError:
    """Return the error for a text file whose rows do not fit into columns of one type each."""
    kinds: dict[str, str] = {}
    for number, row in enumerate(RowFile(file, texts), start=1):
        for name, value in row.items():
            kind = _KINDS.get(type(value), "")
            if kind and kinds.setdefault(name, kind) != kind:
                return TaskError(
                    f'task.data: expected one type per column in "{file}", found {describe_value(value)} in column '
                    f'"{name}" of row {number} and {kinds[name]} before it; correct the rows'
                )
    return TaskError(
        f'task.data: expected values of one type per column in "{file}", integers within 64 bits and texts in UTF-8, '
        "found different types or encodings; correct the rows"
    )


def _same(tables: Iterator[pyarrow.Table], schemas: list[pyarrow.Schema]) -> Iterator[pyarrow.Table]:
    """Yield the tables up to the first one with another schema; collect the distinct schemas of all in `schemas`."""
    for table in tables:
        if table.schema not in schemas:
            schemas.append(table.schema)
        if len(schemas) == 1:
            yield table


def _text_tables(file: Path, texts: tuple[str, ...], schema: pyarrow.Schema | None = None) -> Iterator[pyarrow.Table]:
    """Yield tables of _PARSED rows of a file at a time, with inferred types or under a schema."""
    import pyarrow

    rows = iter(RowFile(file, texts))
    while part := list(itertools.islice(rows, _PARSED)):
        names = schema.names if schema is not None else list(dict.fromkeys(name for row in part for name in row))
        columns = [pyarrow.array([row.get(name) for row in part], schema and schema.field(name).type) for name in names]
        yield pyarrow.table(dict(zip(names, columns, strict=True)))


def _parquet(file: Path, scratch: Path | None, texts: tuple[str, ...]) -> pyarrow.Table | None:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        if scratch is None:
            return _with_short_floats(pyarrow.parquet.read_table(file), texts)
        with pyarrow.parquet.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            parts = (pyarrow.Table.from_batches([part], schema) for part in opened.iter_batches(_AT_ONCE))
            return _kept((_with_short_floats(part, texts) for part in parts), scratch)
    except (pyarrow.ArrowException, OSError) as error:
        raise no_parquet(file, error) from None


def _with_short_floats(table: pyarrow.Table, texts: tuple[str, ...]) -> pyarrow.Table:
    """Turn floats of 16 and 32 bits in the columns `texts` into texts: as Python's 64 bits, 0.1 has 17 digits."""
    import pyarrow

    for at, field in enumerate(table.schema):
        if field.name in texts and field.type in (pyarrow.float16(), pyarrow.float32()):
            kind = field.type.to_pandas_dtype()
            values = [
                str(kind(value)) if value is not None and math.isfinite(value) else None
                for value in table.column(at).to_pylist()
            ]
            table = table.set_column(at, field.name, pyarrow.array(values, pyarrow.string()))
    return table


def _kept(tables: Iterator[pyarrow.Table], scratch: Path | None) -> pyarrow.Table | None:
    """Join tables of one schema into one; return None if there are none."""
    import pyarrow

    first = next(tables, None)
    if first is None:
        return None
    if scratch is None:
        return pyarrow.concat_tables([first, *tables])
    path = paths.private_folder(scratch) / f".{secrets.token_hex(8)}.part"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with pyarrow.ipc.new_stream(file, first.schema) as stream:
                for table in itertools.chain([first], tables):
                    stream.write_table(table)
            file.flush()
        return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    except OSError as error:
        if error.errno is None:  # Arrow's own, about the content
            raise
        raise StateError(f"{scratch}: cannot write the rows: {error}; free space") from None
    finally:
        path.unlink(missing_ok=True)
