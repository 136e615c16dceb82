"""Read a split's examples from a data folder or file, as text (see `row_files`) or Parquet, without writing to it.

A table is an Arrow table, in memory or mapped from an unnamed file in a private folder that the caller
chooses. The rows become Python objects a few at a time, when used.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import operator
import os
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedveil import paths
from fedveil.contract.task import DatasetShard, Example, ExampleOrigin
from fedveil.data import columnar_files, partition
from fedveil.data.columnar_files import is_columnar
from fedveil.data.reading_notes import note
from fedveil.data.row_files import RowFile, describe_columns, has_header
from fedveil.data.row_values import describe_value
from fedveil.data.split_files import describe_layout, describe_unread, split_files
from fedveil.errors import StateError, TaskError
from fedveil.sanitize import sanitize

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    from datasets import Dataset, Features

    from fedveil.config import RunConfig, TaskConfig
    from fedveil.contract.task import TaskInfo

__all__ = ["DatasetTable", "TableSelection", "read_files", "read_for_task", "read_split", "read_table"]

_PARSED = 10_000  # rows from a text file that are added to the table at once
_CONVERSATIONS = ("messages", "conversations")  # common names for their column
_KINDS = {str: "texts", bool: "true or false", int: "numbers", float: "numbers", list: "lists", dict: "objects"}
_NOT_IN_DATASETS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_AT_ONCE = 256  # rows held as Python objects at a time: few, because rows may contain images


@dataclass(frozen=True)
class DatasetTable:
    """All rows in one split.

    Attributes:
        rows: the rows, with all columns.
        origin: returns a row's origin, given its index.
        folder: the base folder for relative paths in the rows.
        class_names: the names of all classes that the data set declares, by number; empty if it declares no classes.
    """

    rows: Dataset
    origin: Callable[[int], ExampleOrigin]
    folder: str
    class_names: tuple[str, ...] = ()

    def examples(self, split: str, share: DatasetShard | None, config: RunConfig) -> TableSelection:
        """Return all examples, or only those in the part `share`.

        For the split "train", returns at most task.examples-per-site examples, a seeded selection in file order. Raises
        TaskError like `partition.partition_indices`.
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
        at: the indices of the selected rows in the table.
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

    def select(self, positions: Sequence[int]) -> TableSelection:
        """Return the rows at these positions of this selection."""
        return TableSelection(self._table, self.at[np.asarray(positions, dtype=np.int64)])

    def without(self, is_left_out: Callable[[Example], bool]) -> TableSelection:
        """Return the rows for which `is_left_out` returns false, in the same order."""
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
                "UTF-8, or a date is after the year 9999; correct it"
            ) from None
        return [
            Example(row, table.origin(i), table.folder, table.class_names)
            for i, row in zip(at.tolist(), rows, strict=True)
        ]


def read_split(
    data: Path,
    split: str,
    columns: tuple[str, ...],
    scratch: Path | None = None,
    texts: tuple[str, ...] = (),
    others: tuple[str, ...] | None = None,
) -> DatasetTable:
    """Return the rows in the split's files; see `read_table`.

    Args:
        others: columns that are read if the files have them; None for all columns.

    Raises:
        TaskError: like `split_files` and `read_table`.
    """
    files = split_files(data, split)
    note_reading(data, split, files)
    return read_files(files, columns, scratch, texts, None if others is None else (*columns, *others))


def read_files(
    files: Sequence[Path],
    columns: tuple[str, ...],
    scratch: Path | None = None,
    texts: tuple[str, ...] = (),
    only: tuple[str, ...] | None = None,
) -> DatasetTable:
    """Return the rows in the files of one split; see `read_table`."""
    rows, counts = _read(tuple(files), columns, scratch, texts, only)
    ends = np.cumsum(counts)

    def origin(index: int) -> ExampleOrigin:
        at = int(np.searchsorted(ends, index, side="right"))
        return ExampleOrigin(str(files[at]), index + 1 - (int(ends[at - 1]) if at else 0))

    return DatasetTable(rows, origin, str(files[0].parent))


def read_for_task(
    data: Path, split: str, info: TaskInfo, task: TaskConfig, scratch: Path | None = None
) -> DatasetTable:
    """Return the rows of a split with the columns that a task uses.

    Other columns are not parsed, so they may contain anything.

    Raises:
        TaskError: like `read_split`.
    """
    return read_split(data, split, info.columns(task), scratch, info.texts(task), (task.label_column,))


def note_reading(data: Path, split: str, files: Sequence[Path]) -> None:
    """Add notes on which files are read or unread, and on how text files are read.

    Raises TaskError like `describe_reading`.
    """
    for text in (describe_layout(data, split, files), describe_unread(data, split, files)):
        if text:
            note(f'"{data}": {text}')
    for text in dict.fromkeys(map(describe_reading, files)):
        if text:
            first = next(file for file in files if describe_reading(file) == text)
            note(f'"{first}": {text}')


@contextlib.contextmanager
def columns_named_by(key: str) -> Iterator[None]:
    """Return a context in which errors about rows name `key` instead of task.data."""
    try:
        yield
    except TaskError as error:
        raise TaskError(str(error).replace("task.data:", f"{key}:", 1)) from None


def digest_files(files: Sequence[Path]) -> str:
    """Return a digest of the names, order and content of data files."""
    hasher = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            hasher.update(f"{file.name}\n".encode() + hashlib.file_digest(opened, "sha256").digest())
    return hasher.hexdigest()


def describe_reading(file: Path, most: int = 0) -> str:
    """Describe a text file's encoding and separator, detected in its first `most` bytes; "" for the usual ones.

    Raises:
        TaskError: the encoding or the separator is uncertain.
    """
    return "" if is_columnar(file) else RowFile(file, most=most).describe()


def read_table(
    files: Path | Sequence[Path],
    columns: tuple[str, ...],
    scratch: Path | None = None,
    texts: tuple[str, ...] = (),
    only: tuple[str, ...] | None = None,
) -> Dataset:
    """Read all rows of the files into memory or, given a private folder `scratch`, map them from an unnamed file there.

    Numbers in the columns `texts` become text, as written in the file, so 1 stays "1" even in a column with 2.5. Only
    the columns `only` are parsed, or all columns if it is None.

    This bypasses the cache of `datasets`, because a site may not have a writable cache, and many processes would share
    it.

    Raises:
        TaskError: a line or a file cannot be read, there are no rows, one of `columns` is missing, or the files of a
            split have different columns.
        StateError: `scratch` cannot be written.
    """
    return _read((files,) if isinstance(files, Path) else tuple(files), columns, scratch, texts, only)[0]


def _read(
    files: tuple[Path, ...],
    columns: tuple[str, ...],
    scratch: Path | None,
    texts: tuple[str, ...],
    only: tuple[str, ...] | None,
) -> tuple[Dataset, list[int]]:
    """Return the rows of the files, and the number of rows in each file."""
    from datasets import Dataset

    reader = _TableReader(files, texts, only)
    table = reader.read(scratch, columns)
    if table is None or not len(table):
        where = f'"{files[0]}"' + (f" and {len(files) - 1:,} more files" if len(files) > 1 else "")
        raise TaskError(f"task.data: there are no rows in {where}; add some")
    require_columns(columns, list(reader.names), files[0])
    features_of(table.schema, files[0], table.schema.names)
    # Without a fingerprint, `datasets` would hash the whole table.
    return Dataset(table, fingerprint=secrets.token_hex(8)), reader.counts


def features_of(schema: pyarrow.Schema, file: Path, columns: Sequence[str]) -> Features:
    """Return the types that `datasets` uses for those of `columns` that a file has.

    Raises:
        TaskError: `datasets` does not support the type of a column, or a column's metadata names a nonexistent type.
    """
    from datasets import Features

    found = Features()
    for name in columns:
        if name not in schema.names:
            continue
        try:
            described = _feature_of(schema, name, schema.metadata)
        except _NOT_IN_DATASETS:
            described = None
        try:
            _feature_of(schema, name, None)
        except _NOT_IN_DATASETS:
            raise TaskError(
                f'task.data: column "{name}" of "{file}" must have texts, numbers, lists or images, but has the '
                f"Arrow type {sanitize(schema.field(name).type, 80)}; convert it"
            ) from None
        if described is None:
            raise TaskError(
                f'task.data: the description of the columns in "{file}" is not one that `datasets` writes; write '
                "the file again"
            )
        found[name] = described
    return found


def _feature_of(schema: pyarrow.Schema, name: str, metadata: object) -> Any:
    import pyarrow
    from datasets import Features

    return Features.from_arrow_schema(pyarrow.schema([schema.field(name)], metadata))[name]


def require_columns(columns: tuple[str, ...], names: Sequence[str], file: Path) -> None:
    """Raise TaskError if one of `columns` is not among the column names of `file`."""
    for column in columns:
        if column not in names:
            talks = next((name for name in _CONVERSATIONS if name in names and name not in columns), "")
            raise TaskError(
                f'task.data: expected column "{column}" in "{file}", found {describe_columns(file, names)}; '
                f"set task.source-column and task.target-column to columns of the file"
                + (f', or task.messages-column = "{talks}" if that column has whole conversations' if talks else "")
            )


@final
class _TableReader:
    """Reads a split's files into one table.

    Args:
        files: the files, all in one format.
        texts: columns whose numbers become text.
        only: the columns that are parsed; None for all.

    Attributes:
        counts: the number of rows in each file that was read.
        names: all column names in these files, including columns that are not parsed.
    """

    def __init__(self, files: tuple[Path, ...], texts: tuple[str, ...], only: tuple[str, ...] | None) -> None:
        self._files, self._texts, self._only = files, texts, only
        self.counts, self.names = [0] * len(files), dict[str, None]()

    def read(self, scratch: Path | None, columns: tuple[str, ...]) -> pyarrow.Table | None:
        """Return the table, or None for files without rows. Raises TaskError and StateError; see `read_table`."""
        if is_columnar(self._files[0]):
            return _kept(self._columnar_tables(columns, _PARSED if scratch is None else _AT_ONCE), scratch)
        # Not pyarrow's JSON reader: it turns text that looks like a date into timestamps.
        import pyarrow

        try:
            schemas: list[pyarrow.Schema] = []
            table = _kept(_same(self._text_tables(), schemas), scratch)
            if len(schemas) < 2:
                return table
            return _kept(self._text_tables(pyarrow.unify_schemas(schemas, promote_options="permissive")), scratch)
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):  # their error texts quote values
            raise self._mixed() from None

    def _is_parsed(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _text_tables(self, schema: pyarrow.Schema | None = None) -> Iterator[pyarrow.Table]:
        """Yield tables of _PARSED rows at a time, with inferred types or under a schema."""
        import pyarrow

        header: list[str] = []
        for at, file in enumerate(self._files):
            self.counts[at] = 0
            rows = iter(RowFile(file, self._texts))
            while part := list(itertools.islice(rows, _PARSED)):
                self.counts[at] += len(part)
                found = list(dict.fromkeys(name for row in part for name in row))
                self.names |= dict.fromkeys(found)
                header = header or found
                if has_header(file) and found != header:  # Spark may omit the header, and a row would then be lost
                    raise TaskError(
                        f'task.data: the first line of "{file}" differs from that of "{self._files[0]}", the first '
                        "file of the split; write all files with the same column names"
                    )
                names = schema.names if schema is not None else [name for name in found if self._is_parsed(name)]
                names = names or found[:1]  # a table without columns would have no rows
                kinds = [schema and schema.field(name).type for name in names]
                columns = [
                    pyarrow.array([row.get(name) for row in part], kind)
                    for name, kind in zip(names, kinds, strict=True)
                ]
                yield pyarrow.table(dict(zip(names, columns, strict=True)))

    def _mixed(self) -> TaskError:
        """Return the error for text files in which some column has values of different types."""
        kinds: dict[str, str] = {}
        for file in self._files:
            for number, row in enumerate(RowFile(file, self._texts), start=1):
                for name, value in row.items():
                    kind = _KINDS.get(type(value), "") if self._is_parsed(name) else ""
                    if kind and kinds.setdefault(name, kind) != kind:
                        return TaskError(
                            f'task.data: column "{name}" of "{file}" has {describe_value(value)} in row {number}, '
                            f"but {kinds[name]} before it; correct the rows"
                        )
        return TaskError(
            f'task.data: in "{self._files[0]}", each column needs values of a single type, integers of at most 64 '
            "bits, and texts in UTF-8; correct the rows"
        )

    def _columnar_tables(self, columns: tuple[str, ...], at_once: int) -> Iterator[pyarrow.Table]:
        import pyarrow

        first = None
        for at, file in enumerate(self._files):
            stored, self.counts[at] = columnar_files.read_schema(file), 0
            self.names |= dict.fromkeys(stored.names)
            require_columns(columns, stored.names, file)
            names = [name for name in stored.names if self._is_parsed(name)] or stored.names
            schema = pyarrow.schema([stored.field(name) for name in names], stored.metadata)
            first = first or schema
            if not schema.equals(first) or (at and self._features_of(schema, at) != self._features_of(first, 0)):
                raise TaskError(
                    f'task.data: the columns of "{file}" differ from those of "{self._files[0]}" in order, type or '
                    "class names; write all files of the split in the same way"
                )
            for table in columnar_files.iter_tables(file, names, at_once):
                self.counts[at] += len(table)
                yield _with_short_floats(table.replace_schema_metadata(first.metadata), self._texts)

    def _features_of(self, schema: pyarrow.Schema, at: int) -> Features:
        return features_of(schema, self._files[at], schema.names)


def _same(tables: Iterator[pyarrow.Table], schemas: list[pyarrow.Schema]) -> Iterator[pyarrow.Table]:
    """Yield the tables up to the first one with a different schema; collect all distinct schemas in `schemas`."""
    for table in tables:
        if table.schema not in schemas:
            schemas.append(table.schema)
        if len(schemas) == 1:
            yield table


def _with_short_floats(table: pyarrow.Table, texts: tuple[str, ...]) -> pyarrow.Table:
    """Convert 16-bit and 32-bit floats in the columns `texts` to text; as 64-bit floats, 0.1 would have 17 digits."""
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
    """Join tables with the same schema into one table; return None if there are no tables."""
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
        if error.errno is None:  # an error of Arrow itself, about the content
            raise
        raise StateError(f"{scratch}: cannot write the rows: {error}; free space") from None
    finally:
        path.unlink(missing_ok=True)
