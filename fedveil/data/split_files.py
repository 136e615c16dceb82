"""Find the files of a split in a data folder, in the layouts that people and tools commonly use.

| in the data folder, for the split "train" | what is read |
|---|---|
| train.csv, Train.jsonl.gz, train.cp1252.csv, train.xlsx | the file |
| train-00000-of-00002.parquet, ... | all shards, in order; refused if one is missing |
| train-0.jsonl, train_1.jsonl, ... | all of them, in order |
| train.parquet/part-*.parquet | all parts, as Spark writes them; refused while Spark is still writing (_temporary) |
| train/*.parquet, train/*.csv | all files in that format, if the folder has no images |
| train/metadata.csv; or train/labels.csv next to images, if it is the only file of rows there | the file; paths in
  it are relative to its folder |
| train/state.json, or state.json | a data set saved with save_to_disk of `datasets` |
| data/, if the folder itself has none of these layouts and no folder for the split | the same layouts in data/, as on
  the Hub |

If train/ has images and train.csv is next to it, only metadata.* is read in train/, and it counts as a second layout.

A split may have another common name; see SPLIT_NAMES. Case does not matter. Two of these layouts for one split are
refused, because one of them would be ignored.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedveil.data.columnar_files import COLUMNAR_SUFFIXES
from fedveil.data.dicom_images import DICOM_START, is_dicom
from fedveil.data.row_files import ENCODINGS, SUFFIXES, row_suffix
from fedveil.errors import TaskError

__all__ = [
    "IMAGE_SUFFIXES",
    "MAX_FILES",
    "SPLIT_NAMES",
    "describe_layout",
    "describe_unread",
    "find_split_files",
    "find_split_folder",
    "has_split",
    "is_image_file",
    "is_made_by_system",
    "split_files",
]

SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev"),
}
IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".dcm", ".dicom", ".nii", ".nii.gz"}
)
MAX_FILES = 10_000
_SYSTEM_NAMES = {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "system volume information"}
_SAVED_NAMES = {"state.json", "dataset_info.json", "dataset_dict.json"}  # files that `datasets` writes next to the rows
_SPREADSHEETS = (".xls", ".xlsm", ".xlsb", ".ods")
_TABULAR = {*SUFFIXES, ".arrow", ".feather", *_SPREADSHEETS}
_SHARD = re.compile(r"[-_]?(\d{1,9})(?:-of-(\d{1,9}))?(?:-[0-9a-f]{16})?")
_DICOM_NAME = re.compile(r"[^.]+|.*\.\d+")  # without a file extension, or a UID
_DICOM_INDEX = "dicomdir"
_MAX_STATE = 1 << 24  # bytes in a state.json, which names every file
_MOST_NAMES = 8  # file names in a message


def split_files(data: Path, split: str) -> tuple[Path, ...]:
    """Return the files of `split` in the folder `data`, in order; `data` itself if it is a file.

    Raises:
        TaskError: there are no files, there are several layouts, a shard is missing, or the format is unknown.
    """
    if data.is_file():
        if not row_suffix(data):
            raise TaskError(
                f'task.data: expected a file ending in {", ".join(SUFFIXES)}, found "{data}"; {_how_to_convert([data])}'
            )
        return (data,)
    if not data.is_dir():
        raise TaskError(f'task.data: there is no folder or file of rows at "{data}"; correct the path')
    if files := find_split_files(data, split):
        return files
    entries = sorted(data.iterdir())
    raise TaskError(
        f'task.data: expected a file of the split "{split}" in "{data}", such as {split}.jsonl, {split}.csv or '
        f"{split}.parquet, found {', '.join(path.name for path in entries[:_MOST_NAMES]) or 'nothing'}; "
        + (_how_to_convert(entries) if _spreadsheets(entries) else "add the file or name another folder")
    )


def find_split_files(data: Path, split: str) -> tuple[Path, ...]:
    """Return the files of a split in the folder `data`, in order; () if there are none.

    Raises:
        TaskError: there are several layouts, a shard is missing, or a tool has not finished writing.
    """
    if is_saved_dataset(data):
        return _saved_files(data)
    groups = _groups_in(data, split)
    if not groups and find_split_folder(data, split) is None and (data / "data").is_dir():
        groups = _groups_in(data / "data", split)
    if len(groups) > 1:
        raise TaskError(
            f'task.data: several files or sets of shards in "{data}" are named for the split "{split}": '
            f"{' and '.join(str(files[0].relative_to(data)) for files in groups)}; keep only one"
        )
    if groups and len(groups[0]) > MAX_FILES:
        raise TaskError(
            f'task.data: the split "{split}" in "{data}" has {len(groups[0]):,} files, but at most {MAX_FILES:,} '
            "are allowed; join them"
        )
    return groups[0] if groups else ()


def has_split(data: Path, split: str) -> bool:
    """Return whether the folder `data` has files or a folder for a split. Raises TaskError like `find_split_files`."""
    if not data.is_dir() or is_saved_dataset(data):
        return False  # a single data set, which serves as every split
    return bool(find_split_files(data, split)) or find_split_folder(data, split) is not None


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder is a single data set saved by `datasets`."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def find_split_folder(data: Path, split: str) -> Path | None:
    """Return the folder named after a split. Raises TaskError if there are several."""
    if not data.is_dir():
        return None
    folders = [path for path in sorted(data.iterdir()) if path.is_dir() and path.name.lower() in names_of(split)]
    if len(folders) > 1:
        raise TaskError(
            f'task.data: several folders in "{data}" are named for the split "{split}": '
            f"{' and '.join(path.name for path in folders)}; rename one"
        )
    return folders[0] if folders else None


def names_of(split: str) -> tuple[str, ...]:
    """Return the lowercase names that a split's files may have."""
    return SPLIT_NAMES.get(split, (split.lower(),))


def is_image_file(path: Path) -> bool:
    """Return whether a file is an image: by its extension or, for DICOM without one, by its first bytes.

    A file without an extension that cannot be read does not count as an image.
    """
    name = path.name.lower()
    if not path.is_file():
        return False
    if name.endswith(tuple(IMAGE_SUFFIXES)):
        return True
    if not _DICOM_NAME.fullmatch(name) or name == _DICOM_INDEX:
        return False
    try:
        with path.open("rb") as file:
            return is_dicom(file.read(DICOM_START))
    except OSError:
        return False


def is_made_by_system(name: str) -> bool:
    """Return whether a file or folder is hidden or was created by an operating system or archive tool."""
    return name.startswith((".", "~$")) or name.lower() in _SYSTEM_NAMES


def describe_layout(data: Path, split: str, files: Sequence[Path]) -> str:
    """Describe which files are read; "" for a single file named after the split."""
    if len(files) == 1 and (files[0] == data or _stem_of(files[0]) == split or _is_metadata(files[0])):
        return ""
    names = [file.relative_to(data).as_posix() if file.is_relative_to(data) else file.name for file in files]
    if len(names) == 1:
        return f'{names[0]} is read as the split "{split}"'
    return f'{len(names):,} files are read as the split "{split}": {names[0]} to {names[-1]}'


def describe_unread(data: Path, split: str, files: Sequence[Path] = ()) -> str:
    """Return the files and folders of examples in the folder `data` from which no split is read; "" if there are none.

    `files` are the files of `split`; other files in their folder are also listed. When the training split is read, a
    validation split counts as unread, because only the server uses it.
    """
    if not data.is_dir():
        return ""
    known = {path for name in SPLIT_NAMES for path in _known(data, name, split)}
    names = sorted(path.name for path in data.iterdir() if path not in known and _looks_like_rows(path))
    for folder in sorted({file.parent for file in files if file.is_relative_to(data)} - {data}):
        beside = [path for path in folder.iterdir() if path.is_file() and path not in files and _looks_like_rows(path)]
        names += sorted(path.relative_to(data).as_posix() for path in beside)
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return f"not read: {', '.join(names[:_MOST_NAMES])}{more}" if names else ""


def _known(data: Path, name: str, split: str) -> Iterator[Path]:
    """Yield the entries of `data` from which the split `name` is read, given that `split` is being read."""
    if name == "validation" and split == "train":
        return
    try:
        files, folder = find_split_files(data, name), find_split_folder(data, name)
    except (TaskError, OSError):  # reading that split raises the error
        return
    for file in files:
        yield data / file.relative_to(data).parts[0]
    if folder:
        yield folder


def _looks_like_rows(path: Path) -> bool:
    if is_made_by_system(path.name) or path.name in _SAVED_NAMES:
        return False
    if path.is_dir():
        return path.name.partition(".")[0].lower() in {n for names in SPLIT_NAMES.values() for n in names}
    return any(f".{ending}" in _TABULAR for ending in path.name.lower().split(".")[1:])


def _groups_in(folder: Path, split: str) -> list[tuple[Path, ...]]:
    """Return the sets of files that each make up the split, one set per layout found in the folder."""
    groups: list[tuple[Path, ...]] = []
    shards: dict[tuple[str, str, str], list[tuple[int, Path]]] = defaultdict(list)
    entries = sorted(folder.iterdir())
    has_table = any(_stem_of(path) in names_of(split) or _shard_of(path, split) for path in entries if path.is_file())
    for path in entries:
        if path.is_dir():
            if path.name.lower() in names_of(split):
                groups += [files] if (files := _files_in(path, of_split=True, has_table=has_table)) else []
            elif (suffix := row_suffix(path)) and path.name.lower().removesuffix(suffix) in names_of(split):
                groups.append(_files_in(path, of_split=False))
        elif _stem_of(path) in names_of(split):
            groups.append((path,))
        elif shard := _shard_of(path, split):
            name, total, number = shard
            shards[name, row_suffix(path), total].append((number, path))
    groups += [_complete(folder, total, members) for (_, _, total), members in sorted(shards.items())]
    return sorted(groups, key=lambda files: len(files[0].parts))  # files directly in the folder come first


def _shard_of(path: Path, split: str) -> tuple[str, str, int] | None:
    """Return the split name, the total number of shards and the shard's own number, as given in a shard's file name."""
    suffix = row_suffix(path)
    stem = path.name.lower().removesuffix(suffix) if suffix else ""
    for name in names_of(split):
        if stem.startswith(name) and (found := _SHARD.fullmatch(stem[len(name) :])):
            return name, found[2] or "", int(found[1])
    return None


def _complete(folder: Path, total: str, members: list[tuple[int, Path]]) -> tuple[Path, ...]:
    """Return the shards in order. Raises TaskError if a shard is missing or present twice."""
    members = sorted(members)
    numbers = [number for number, _ in members]
    if len(set(numbers)) < len(numbers):
        twice = next(path for i, (number, path) in enumerate(members) if number in numbers[:i])
        raise TaskError(
            f'task.data: {twice.name} in "{folder}" has the same shard number as another file; remove one of them'
        )
    is_gapless = numbers[-1] - numbers[0] == len(numbers) - 1 and numbers[0] <= 1  # some tools count from 1
    if total and (len(numbers) != int(total) or not is_gapless):
        raise TaskError(
            f'task.data: by the name {members[0][1].name}, "{folder}" should have {int(total):,} shards, but it '
            f"has {len(numbers):,}, numbered from {numbers[0]} to {numbers[-1]}; copy the missing ones"
        )
    return tuple(path for _, path in members)


def _files_in(folder: Path, of_split: bool, has_table: bool = False) -> tuple[Path, ...]:
    """Return the files of rows in a split's folder; () for a folder of images in class folders, if `of_split`.

    Args:
        has_table: the split's rows are next to the folder, so each other file next to its images describes one image.

    Raises:
        TaskError: the folder is not a set of files in one format.
    """
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    entries = [path for path in sorted(folder.iterdir(), key=_natural) if not is_made_by_system(path.name)]
    if any(path.name == "_temporary" for path in entries):
        raise TaskError(
            f'task.data: "{folder}" contains _temporary, so Spark has not finished writing, or has failed; write '
            "the data set again"
        )
    entries = [path for path in entries if not path.name.startswith("_")]
    files = [path for path in entries if path.is_file() and row_suffix(path)]
    folders = [path for path in entries if path.is_dir()]
    if metadata := [file for file in files if _is_metadata(file)]:
        return _one_of(folder, metadata)
    has_pictures = any(map(is_image_file, entries))
    if has_table and has_pictures:
        return ()
    if of_split and (has_pictures or folders):
        # Several subfolders are class folders, whatever other files there are; a single subfolder is not a class
        # folder.
        return _one_of(folder, files) if files and len(folders) < 2 else ()
    if folders:
        name = folders[0].name.partition("=")[0]  # a row value follows the "="
        raise TaskError(
            f'task.data: "{folder}" must contain only files, but has the folder {name}; write the data set without '
            "partitions"
        )
    if not files and of_split:
        return ()
    formats = sorted({row_suffix(file) for file in files})
    if len(formats) != 1:
        raise TaskError(
            f'task.data: all files in "{folder}" must have the same format, found '
            f"{' and '.join(formats) or 'none'}; keep the files of one format"
        )
    return tuple(files)


def _is_metadata(file: Path) -> bool:
    """Return whether a file is the metadata file of an image folder, as named by `datasets`."""
    return file.name.lower().removesuffix(row_suffix(file)) == "metadata"


def _one_of(folder: Path, files: list[Path]) -> tuple[Path, ...]:
    if len(files) > 1:
        raise TaskError(
            f'task.data: "{folder}" has several files of rows next to the pictures: '
            f"{' and '.join(file.name for file in files[:_MOST_NAMES])}; keep only one"
        )
    return tuple(files)


def _saved_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a data set that `datasets` saved (save_to_disk), from its state.json. Raises TaskError."""
    state = folder / "state.json"
    try:
        if state.stat().st_size > _MAX_STATE:
            raise ValueError
        names = [str(entry["filename"]) for entry in json.loads(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise TaskError(
            f'task.data: "{state}" does not contain the list of files that save_to_disk writes; save the data set again'
        ) from None
    for name in names:
        if Path(name).name != name or not name.lower().endswith(COLUMNAR_SUFFIXES):
            raise TaskError(
                f'task.data: "{state}" names something other than .arrow files in the same folder; save the data '
                "set again"
            )
        if not (folder / name).is_file():
            raise TaskError(
                f'task.data: "{state}" names {len(names)} files, and some of them are missing; copy the missing ones'
            )
    return tuple(folder / name for name in names)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts names by the numbers in them, so part-2 comes before part-10."""
    parts = re.split(r"(\d{1,18})", path.name.lower())
    return [(1, int(part), "") if part.isdigit() and part.isascii() else (0, 0, part) for part in parts]


def _stem_of(file: Path) -> str:
    """Return the lowercase name of a file of rows, without extension and encoding; "" for any other file."""
    suffix = row_suffix(file)
    stem, _, encoding = file.name.lower().removesuffix(suffix).partition(".")
    return stem if suffix and encoding in ("", *ENCODINGS) else ""


def _spreadsheets(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path.name.lower().endswith(_SPREADSHEETS)]


def _how_to_convert(paths: Sequence[Path]) -> str:
    if sheets := _spreadsheets(paths):
        return f"save the table {sheets[0].name} as .xlsx or as CSV (in Excel: Save As)"
    return "convert it"
