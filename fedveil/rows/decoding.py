"""Images of a data set: their bytes, decoding, a bound on what is kept decoded, and folders of images by class."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import TaskError

if TYPE_CHECKING:
    from datasets import Dataset

KEPT_BYTES = 1 << 30  # of decoded images; beyond it, an image is decoded again for every batch that has it
FOLDER = "fedveil folder"  # the column that says where paths in the image column begin
SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})


@dataclass
class Room:
    """Memory for decoded images."""

    left: int

    def holds(self, nbytes: int) -> bool:
        """Takes that much, where it is left."""
        self.left -= nbytes
        return self.left >= 0


def folder_of(data: Path) -> str:
    """Where relative paths of a data folder or file begin."""
    return str(data if Path(data).is_dir() else Path(data).parent)


def encoded(example: Mapping[str, Any], column: str, where: str) -> bytes:
    """The bytes of an example's image, which are kept as `datasets` does ({"bytes", "path"}), plainly, or at a path.

    Raises:
        TaskError: there is no image, or none at its path.
    """
    value: object = example.get(column)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value:
        try:
            return (Path(str(example.get(FOLDER, "."))) / value).read_bytes()
        except OSError as error:
            raise TaskError(
                f'task.data: expected an image at the path in "{column}", found {error} ({where}); correct the path'
            ) from None
    raise TaskError(
        f'task.data: expected an image in column "{column}": bytes or a path, found {value!r} in {where}; correct or drop '
        f"the row"
    )


def decoded(image: bytes, where: str, mode: str = "RGB") -> Any:
    """The image in colour, or in PIL's mode `mode`. Raises TaskError where it does not decode."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(image)).convert(mode)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise TaskError(
            f"task.data: expected an image that decodes, found that {where} does not ({error}); correct or drop the row"
        ) from None


def by_class(folder: Path, image_column: str, columns: Sequence[str]) -> tuple[Dataset, list[str], list[str]]:
    """An image folder `<folder>/<class>/<image>`: its rows in the order of their paths, where each is, and the classes.

    Each of `columns` holds the name of the class. The classes are the sorted names of the class folders, those without an
    image among them. Hidden files and those that are not SUFFIXES are passed over.

    Raises:
        TaskError: no class folder, or no image in any.
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
    paths: dict[str, list[str]] = {image_column: [str(file.relative_to(folder)) for file in files]}
    rows = Dataset.from_dict(paths | {column: [file.parent.name for file in files] for column in columns})
    return rows, [str(file) for file in files], names
