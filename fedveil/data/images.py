"""Images of a data set: their table with class names, their bytes, and a bound on decoded images."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from fedveil.config import TaskConfig
from fedveil.contract.task import Example, ExampleOrigin
from fedveil.data import image_decoding, tables
from fedveil.data.row_values import describe_value
from fedveil.data.tables import DatasetTable
from fedveil.errors import TaskError

__all__ = ["image_bytes"]

_Out = TypeVar("_Out")
log = logging.getLogger("fedveil.data")
KEPT_BYTES = 1 << 30  # for decoded images; beyond it, an image is decoded again for every batch that contains it
SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})


@dataclass
class DecodeMemoryLimit:
    """A memory limit for decoded images, shared by several threads."""

    left: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def holds(self, nbytes: int) -> bool:
        """Reserve `nbytes`; return whether they were still available."""
        with self._lock:
            self.left -= nbytes
            return self.left >= 0


def decode_parallel(works: Sequence[Callable[[], _Out]]) -> list[_Out]:
    """Run the decoders in threads and return their results in order: decoding releases Python's lock."""
    return list(_pool().map(lambda work: work(), works))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "pictures")


def image_bytes(example: Example, column: str) -> bytes:
    """Return the bytes of an example's image: from `datasets` ({"bytes", "path"}), raw bytes, or a file at a path.

    Raises:
        TaskError: the example has no image, or there is none at its path.
    """
    value: object = example.values.get(column)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value:
        try:
            return (Path(example.folder) / value).read_bytes()
        except (OSError, ValueError) as error:  # neither names the path, which is a value of the row
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            raise TaskError(
                f'task.data: cannot read the image that column "{column}" names in {example.where}: {reason}; '
                "correct the path"
            ) from None
    raise TaskError(
        f'task.data: expected an image in column "{column}": bytes or a path, found {describe_value(value)} in '
        f"{example.where}; correct or drop the row"
    )


def log_conversions(images: Sequence[tuple[str, ...]]) -> None:
    """Log how many of the images are converted, and how; see `image_decoding`."""
    if converted := sum(map(bool, images)):
        said = image_decoding.describe_conversions(images)
        log.warning("task.data: %d of %d images are converted: %s", converted, len(images), said)


def image_table(data: Path, split: str, task: TaskConfig) -> DatasetTable:
    """Return images with their classes, from the file of a split or an image folder `<split>/<class>/<image>`.

    The class names are those of the target column (ClassLabel), else its sorted texts, else none; for an image folder,
    the class folders.

    Raises:
        TaskError: as `tables.read_split`, or an image folder without an image.
    """
    if is_by_class(data, split):
        return _by_class(data / split, task)
    table = tables.read_split(data, split, (task.image_column, task.target_column))
    label_names = getattr(table.rows.features[task.target_column], "names", None)
    names = label_names or sorted({value for value in table.rows[task.target_column] if isinstance(value, str)})
    return replace(table, class_names=tuple(names))


def is_by_class(data: Path, split: str) -> bool:
    """Return whether a split is a folder of class folders rather than a file."""
    return (data / split).is_dir() and not any((data / f"{split}{suffix}").is_file() for suffix in tables.SUFFIXES)


def _by_class(folder: Path, task: TaskConfig) -> DatasetTable:
    """Return the images of class folders, in the order of their paths.

    The class is in task.target-column and in task.label-column. Class folders without an image are classes too. Hidden
    files and files with other suffixes than SUFFIXES are skipped.
    """
    from datasets import Dataset

    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = [
        path
        for name in names
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]
    if not files:
        raise TaskError(
            f'task.data: expected images at <class>/<name>.png or .jpg in "{folder}", found none in '
            f"{', '.join(names[:8]) or 'no folder'}; add them"
        )
    columns = {task.image_column: [str(file.relative_to(folder)) for file in files]}
    for column in sorted({task.target_column, task.label_column} - {task.image_column}):
        columns[column] = [file.parent.name for file in files]
    paths = columns[task.image_column]
    return DatasetTable(
        Dataset.from_dict(columns), lambda i: ExampleOrigin(str(folder / paths[i])), str(folder), tuple(names)
    )
