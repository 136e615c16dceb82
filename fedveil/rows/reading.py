"""Reading the rows of a split from a data folder or file: JSON Lines or Parquet, nothing written beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.contract.task import Example, Origin, Share
from fedveil.errors import TaskError
from fedveil.rows import partition

if TYPE_CHECKING:
    from datasets import Dataset

    from fedveil.config import RunConfig

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Table:
    """The rows of one split, whole.

    Attributes:
        rows: all columns.
        origins: of each row.
        folder: where relative paths in the rows begin.
        class_names: of all classes, by number; empty where the rows name none.
    """

    rows: Dataset
    origins: Sequence[Origin]
    folder: str
    class_names: tuple[str, ...] = ()

    def examples(self, split: str, share: Share | None, config: RunConfig) -> list[Example]:
        """The rows, or those of the part that is `share`.

        Of the split "train" at most task.max-examples, a seeded choice in file order. Raises TaskError as
        `partition.indices`.
        """
        task, seed = config.task, config.run.seed
        chosen: Sequence[int] = range(len(self.rows))
        if share is not None:
            chosen = partition.indices(self.rows, share, task, seed)
        if split == "train" and 0 < task.max_examples < len(chosen):
            chosen = [chosen[i] for i in sorted(random.Random(seed).sample(range(len(chosen)), task.max_examples))]
        found = self.rows.select(chosen).to_list()
        return [
            Example(row, self.origins[i], self.folder, self.class_names) for i, row in zip(chosen, found, strict=True)
        ]


def table(data: Path, split: str, columns: tuple[str, ...]) -> Table:
    """The rows of the split's file. Raises TaskError as `split_file` and `read`."""
    file = split_file(data, split)
    rows = read(file, columns)
    folder = data if data.is_dir() else data.parent
    return Table(rows, [Origin(str(file), i + 1) for i in range(len(rows))], str(folder))


def split_file(data: Path, split: str) -> Path:
    """The file of `split` in the folder `data`; `data` itself where that is a file.

    Raises:
        TaskError: neither is there, or the file is of another kind.
    """
    if data.is_file():
        if data.suffix not in SUFFIXES:
            raise TaskError(f'task.data: expected a file ending in {" or ".join(SUFFIXES)}, found "{data}"; convert it')
        return data
    if not data.is_dir():
        raise TaskError(f'task.data: expected a folder or file of rows, found none at "{data}"; correct the path')
    for suffix in SUFFIXES:
        if (file := data / f"{split}{suffix}").is_file():
            return file
    raise TaskError(
        f'task.data: expected {split}.jsonl or {split}.parquet in "{data}", found '
        f"{', '.join(sorted(p.name for p in data.iterdir())[:8]) or 'nothing'}; add the file or name another folder"
    )


def read(file: Path, columns: tuple[str, ...]) -> Dataset:
    """All rows of `file`.

    Goes past the cache of `datasets`: a site may have no writable one, and many processes would share it.

    Raises:
        TaskError: a line or the file cannot be read, there is no row, or one of `columns` is missing.
    """
    rows = _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
    if not len(rows):
        raise TaskError(f'task.data: expected at least one row in "{file}", found none; add rows')
    for column in columns:
        if column not in rows.column_names:
            raise TaskError(
                f'task.data: expected column "{column}" in "{file}", found {", ".join(rows.column_names)}; '
                f"set task.source-column and task.target-column to columns of the file"
            )
    return rows


def _json_lines(file: Path) -> Dataset:
    # Not pyarrow's JSON reader: it turns text that looks like a date into timestamps.
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TaskError(
                f'task.data: expected JSON in line {number} of "{file}", found {error}; correct the line'
            ) from None
        if not isinstance(row, dict):
            raise TaskError(
                f'task.data: expected an object in line {number} of "{file}", found {line[:40]!r}; correct it'
            )
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except ValueError as error:  # pyarrow.ArrowInvalid
        raise TaskError(f'task.data: expected one type a column in "{file}", found {error}; correct the rows') from None


def _parquet(file: Path) -> Dataset:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]
    from datasets import Dataset

    try:
        return Dataset(pyarrow.parquet.read_table(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(
            f'task.data: expected Parquet in "{file}", found {str(error).splitlines()[0]}; write it anew'
        ) from None
