"""The images of a data set: their table with class names, their bytes, and a memory limit for decoded images."""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from fedveil.config import TaskConfig
from fedveil.contract.task import Example, ExampleOrigin
from fedveil.data import class_names, columnar_files, image_decoding, picture_paths, split_files, tables
from fedveil.data.reading_notes import note
from fedveil.data.row_values import describe_value
from fedveil.data.split_files import IMAGE_SUFFIXES, is_image_file, is_made_by_system
from fedveil.data.tables import DatasetTable
from fedveil.errors import TaskError

__all__ = ["image_bytes"]

_Out = TypeVar("_Out")
KEPT_BYTES = 1 << 30  # for decoded images; beyond it, images are decoded again for every batch that contains them
_MOST_ENDINGS = 8  # maximum number named in a message


@dataclass
class DecodeMemoryLimit:
    """A memory limit for decoded images, shared by several threads."""

    left: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def holds(self, nbytes: int) -> bool:
        """Reserve `nbytes` if they are still available; return whether they were."""
        with self._lock:
            self.left -= nbytes
            return self.left >= 0


def decode_parallel(works: Sequence[Callable[[], _Out]]) -> list[_Out]:
    """Run the decoders in threads, because decoding releases the GIL, and return their results in order."""
    return list(_pool().map(lambda work: work(), works))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "pictures")


def image_bytes(example: Example, column: str) -> bytes:
    """Return the bytes of an example's image, given as `datasets` stores it ({"bytes", "path"}), raw bytes or a path.

    Raises:
        TaskError: the example has no image, or its path does not lead to an image.
    """
    value: object = example.values.get(column)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value:
        return _read_path(value, example, column)
    raise TaskError(
        f'task.data: expected an image in column "{column}": bytes or a path, found {describe_value(value)} in '
        f"{example.where}; correct or drop the row"
    )


def note_conversions(images: Sequence[tuple[str, ...]]) -> None:
    """Add a note on how many images are converted, and how; see `image_decoding`."""
    if converted := sum(map(bool, images)):
        said = image_decoding.describe_conversions(images)
        note(f"{converted} of {len(images)} images are converted: {said}")


def image_table(data: Path, split: str, task: TaskConfig) -> DatasetTable:
    """Return images with their classes, from a split's file or from an image folder `<split>/<class>/<image>`.

    The class names are those that the target column declares (ClassLabel), if any. For an image folder, they are the
    names of the class folders, unless all of these are numbers.

    Raises:
        TaskError: as in `tables.read_split`, or an image folder has no images.
    """
    if folder := class_folder(data, split):
        return _by_class(folder, task)
    others = (task.label_column,)
    table = tables.read_split(data, split, (task.image_column, task.target_column), others=others)
    table = locate_pictures(table, task.image_column)
    return replace(table, class_names=_names_of(table.rows.features[task.target_column]))


def declared_names(data: Path, split: str, task: TaskConfig) -> tuple[str, ...]:
    """Return the class names that a split declares, as `image_table` does, without reading rows.

    Raises:
        TaskError: as in `scan_class_folders` and `split_files`, or a Parquet file is damaged.
    """
    if folder := class_folder(data, split):
        names = scan_class_folders(folder).names
        return () if class_names.are_numbers(names) else names
    file = split_files.split_files(data, split)[0]
    if not columnar_files.is_columnar(file):
        return ()
    schema = columnar_files.read_schema(file)
    return _names_of(tables.features_of(schema, file, (task.target_column,)).get(task.target_column))


def _names_of(feature: object) -> tuple[str, ...]:
    """Return the names in a column of type ClassLabel or lists of ClassLabel; () for any other column."""
    return tuple(getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None) or ())


def is_by_class(data: Path, split: str) -> bool:
    """Return whether a split is a folder with class folders rather than a file."""
    return class_folder(data, split) is not None


def class_folder(data: Path, split: str) -> Path | None:
    """Return the folder with a split's class folders; None if the split is a file. Raises TaskError for two folders."""
    if not data.is_dir() or split_files.find_split_files(data, split):
        return None
    return split_files.find_split_folder(data, split)


def locate_pictures(table: DatasetTable, column: str) -> DatasetTable:
    """Return the table with its image names replaced by paths relative to its folder; see `picture_paths`."""
    if getattr(table.rows.features[column], "dtype", "") not in ("string", "large_string"):
        return table
    try:
        names = list(table.rows.select(range(min(picture_paths.NAMES, len(table.rows))))[column])  # else read later
    except (ValueError, OverflowError):  # text that is not UTF-8; reading the row later raises an error that says where
        return table
    found = picture_paths.find_pictures(names, column, Path(table.folder))
    if found is None:
        return table
    note(f'"{table.folder}": the pictures that column "{column}" names are {found.describe()}')
    return replace(table, rows=found.apply(table.rows, column))


def _read_path(path: str, example: Example, column: str) -> bytes:
    """Return the content of the file at a row's path. Messages never contain the path, because it is a row value.

    Links in the folder are followed, because the site placed them there. The path itself must not leave the folder.
    """
    reason = "the path leads outside the data folder"
    folder = Path(example.folder).absolute()
    if ".." not in Path(path).parts and (folder / path).is_relative_to(folder):
        try:
            file = folder / path
            if stat.S_ISREG(file.stat().st_mode):
                return file.read_bytes()
            reason = "it does not lead to a file"
        except OSError as error:
            reason = error.strerror or type(error).__name__
        except ValueError:
            reason = "it is not a path"
    raise TaskError(
        f'task.data: cannot read the image that column "{column}" names in {example.where}: {reason}; correct the path'
    )


@dataclass(frozen=True)
class ClassFolders:
    """The contents of a split's class folders.

    Attributes:
        names: the class folders, sorted; a folder without images is a class too.
        images: the images of all classes, ordered by class and path.
        unread: all other files, except those that operating systems create.
    """

    names: tuple[str, ...]
    images: tuple[Path, ...]
    unread: tuple[Path, ...]

    def describe_unread(self) -> str:
        """Describe how many files are not read, by file extension; "" if all files are read."""
        endings = Counter(file.suffix or "no ending" for file in self.unread)
        said = ", ".join(f"{ending} ({count:,})" for ending, count in endings.most_common(_MOST_ENDINGS))
        return f"{len(self.unread):,} files were not read: {said}" if self.unread else ""


def scan_class_folders(folder: Path) -> ClassFolders:
    """Find the images of `folder`, at any depth of its class folders. Hidden and system files and folders are skipped.

    Raises:
        TaskError: there are no images.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_made_by_system(path.name))
    images = list[Path]()
    unread = [path for path in sorted(folder.iterdir()) if path.is_file() and not is_made_by_system(path.name)]
    for name in names:
        for path in sorted((folder / name).rglob("*")):
            if path.is_file() and not any(map(is_made_by_system, path.relative_to(folder).parts)):
                (images if is_image_file(path) else unread).append(path)
    found = ClassFolders(tuple(names), tuple(images), tuple(unread))
    if not images:
        others, endings = found.describe_unread(), ", ".join(sorted(IMAGE_SUFFIXES))
        raise TaskError(
            f'task.data: expected images at <class>/<name> in "{folder}", ending in {endings}, found none in '
            f"{', '.join(names[:8]) or 'no folder'}{f', and {others}' if others else ''}; add them"
        )
    return found


def _by_class(folder: Path, task: TaskConfig) -> DatasetTable:
    """Return the images in class folders, with the class in both task.target-column and task.label-column."""
    from datasets import Dataset

    found = scan_class_folders(folder)
    if unread := found.describe_unread():
        note(f'"{folder}": {unread}')
    paths = [str(file.relative_to(folder)) for file in found.images]
    columns = {task.image_column: paths}
    for column in sorted({task.target_column, task.label_column} - {task.image_column}):
        columns[column] = [Path(path).parts[0] for path in paths]
    names = () if class_names.are_numbers(found.names) else found.names
    return DatasetTable(Dataset.from_dict(columns), lambda i: ExampleOrigin(str(folder / paths[i])), str(folder), names)
