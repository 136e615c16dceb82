"""Find the images that a table next to an image folder names: their folder, and the file extension if the names omit
it.

    train.csv       image,label         "0001" or "0001.png"
    images/0001.png

The first names in the column are looked up in the table's folder and in each folder directly inside it, as is and with
each image file extension. If exactly one place has all of them, that place is used. If several places do, the table is
refused.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from fedveil.data.split_files import IMAGE_SUFFIXES, is_made_by_system
from fedveil.errors import TaskError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["NAMES", "PicturePaths", "find_pictures"]

NAMES = 32  # looked up
_MOST_FOLDERS = 64
_ENDINGS = ("", *sorted({*IMAGE_SUFFIXES, *(suffix.upper() for suffix in IMAGE_SUFFIXES)}))


@dataclass(frozen=True)
class PicturePaths:
    """The location of the images in a column.

    Attributes:
        folder: path below the table's folder; "" for that folder itself.
        ending: the file extension that the names omit; "" if they are complete.
    """

    folder: str
    ending: str

    def describe(self) -> str:
        """Return the location as text for a note."""
        place = f'in the folder "{self.folder}"' if self.folder else "next to the file"
        return f"{place}, with the extension {self.ending}" if self.ending else place

    def path_of(self, name: object) -> object:
        """Return an image name as a path relative to the table's folder; return other values as is."""
        prefix = f"{self.folder}/" if self.folder else ""
        return f"{prefix}{name}{self.ending}" if isinstance(name, str) else name

    def apply(self, rows: Dataset, column: str) -> Dataset:
        """Return the rows with paths relative to the table's folder in the column."""
        import pyarrow.compute  # type: ignore[import-untyped]
        from datasets import Dataset

        table, at = rows.data.table, rows.column_names.index(column)
        prefix = f"{self.folder}/" if self.folder else ""
        paths = pyarrow.compute.binary_join_element_wise(prefix, table.column(at), self.ending, "")
        moved = table.set_column(at, table.schema.field(at), paths.cast(table.schema.field(at).type))
        return Dataset(moved, fingerprint=secrets.token_hex(8))  # else `datasets` would hash the whole table


def find_pictures(values: Iterable[object], column: str, folder: Path) -> PicturePaths | None:
    """Return the location of the images that the first values in a column name.

    Returns None if the values are not names, if they already lead to the images, or if no images are found.

    Raises:
        TaskError: several places have images with these names.
    """
    first = [value for value in itertools.islice(values, NAMES) if value]
    names = [value for value in first if isinstance(value, str)]
    if not names or len(names) < len(first):
        return None
    if not all(map(_is_plain, names)) or all(_is_file(folder, name) for name in names):
        return None
    found = [place for place in _places(folder, names) if _has_all(folder, place, names)]
    if len(found) > 1:
        raise TaskError(
            f'task.data: the pictures that column "{column}" names in "{folder}" are in several places: '
            f"{' and '.join(place.describe() for place in found[:4])}; write their paths into the column"
        )
    return found[0] if found else None


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _is_file(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _places(folder: Path, names: list[str]) -> Iterator[PicturePaths]:
    has_ending = any(name.lower().endswith(tuple(IMAGE_SUFFIXES)) for name in names)
    folders = (path.name for path in sorted(folder.iterdir()) if path.is_dir() and not is_made_by_system(path.name))
    for name in ("", *itertools.islice(folders, _MOST_FOLDERS)):
        for ending in ("",) if has_ending else _ENDINGS:
            if name or ending:
                yield PicturePaths(name, ending)


def _has_all(folder: Path, place: PicturePaths, names: list[str]) -> bool:
    return all(_is_file(folder / place.folder, name + place.ending) for name in names)
