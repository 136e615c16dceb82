"""The files of a bundle, for a person who reviews it.

| case | result |
|---|---|
| not a zip archive, an encrypted or damaged entry | ConfigError |
| more than 5,000 entries, or more than 64 MiB unpacked | ConfigError, before the excess is unpacked |
| two entries with one name, a name outside the bundle, a link | ConfigError: what is installed could be another file |
| `.info/`, the list of digests that `flwr build` adds | left out |
"""

from __future__ import annotations

import difflib
import io
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

__all__ = ["compare_bundles", "read_bundle"]

_MOST_FILES, _MOST_BYTES = 5_000, 64 << 20
_FLOWERS_OWN = ".info/"


def read_bundle(content: bytes) -> dict[str, bytes]:
    """Return a bundle's files by path, sorted. Raises ConfigError."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return dict(sorted(_files(archive)))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise ConfigError(f"app: this is not a readable bundle ({sanitize(str(error), 200)})") from None


def _files(archive: zipfile.ZipFile) -> Iterator[tuple[str, bytes]]:
    entries = archive.infolist()
    if len(entries) > _MOST_FILES:
        raise ConfigError(f"app: a bundle has at most {_MOST_FILES:,} files, this one {len(entries):,}")
    seen: set[str] = set()
    left = _MOST_BYTES
    for entry in entries:
        if entry.is_dir():
            continue
        path, shown = PurePosixPath(entry.filename), sanitize(entry.filename, 200)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or not path.parts:
            raise ConfigError(f"app: this bundle has a file outside its own folder, {shown}")
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise ConfigError(f"app: this bundle has a link, {shown}")
        if str(path) in seen:
            raise ConfigError(f"app: this bundle has two files named {shown}")
        seen.add(str(path))
        with archive.open(entry) as file:
            data = file.read(left + 1)
        left -= len(data)
        if left < 0:
            raise ConfigError(f"app: this bundle has more than {_MOST_BYTES >> 20} MiB of files")
        if not entry.filename.startswith(_FLOWERS_OWN):
            yield str(path), data


def compare_bundles(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    """Return the differences as lines of a unified diff, [] for none. A file that is not UTF-8 gets one line.

    Only a line feed ends a line, so that every other line separator stays in the text and can be shown escaped.
    """
    lines: list[str] = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        try:
            was, now = ((data or b"").decode().split("\n") for data in (before, after))
        except UnicodeDecodeError:
            lines.append(f"Binary file {name} differs")
            continue
        shown = ("/dev/null" if before is None else f"old/{name}", "/dev/null" if after is None else f"new/{name}")
        changes = list(difflib.unified_diff(was, now, *shown, lineterm=""))
        lines += changes or [f"Empty file {name} {'was added' if before is None else 'was removed'}"]
    return lines
