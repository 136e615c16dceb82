"""The files of a bundle, for a person who reviews it.

| case | result |
|---|---|
| not a zip archive, an encrypted or damaged entry | ConfigError |
| more than 5,000 entries, or more than 64 MiB unpacked | ConfigError, before the excess is unpacked |
| two entries whose names differ only in case or in how Unicode writes them | ConfigError |
| two entries with one name, a name outside the bundle, a link | ConfigError: what is installed could be another file |
| `.info/`, the list of digests that `flwr build` adds | left out |
"""

from __future__ import annotations

import difflib
import hashlib
import io
import lzma
import stat
import tokenize
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from fedveil.errors import ConfigError
from fedveil.sanitize import sanitize

__all__ = ["compare_bundles", "list_hidden_code", "read_bundle"]

_MOST_FILES, _MOST_BYTES = 5_000, 64 << 20
_FLOWERS_OWN = ".info/"


def read_bundle(content: bytes) -> dict[str, bytes]:
    """Return a bundle's files by path, sorted. Raises ConfigError."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return dict(sorted(_files(archive)))
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        OSError,
        ValueError,
    ) as error:
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
        if (known := unicodedata.normalize("NFKC", str(path)).casefold()) in seen:
            raise ConfigError(f"app: this bundle has two files named {shown}")
        seen.add(known)
        with archive.open(entry) as file:
            data = file.read(left + 1)
        left -= len(data)
        if left < 0:
            raise ConfigError(f"app: this bundle has more than {_MOST_BYTES >> 20} MiB of files")
        if not entry.filename.startswith(_FLOWERS_OWN):
            yield str(path), data


def compare_bundles(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    """Return the differences as lines, [] for none: "=== NAME was changed", and a unified diff, whose lines begin with
    a space, "+", "-", "@" or "\\". A file that is not UTF-8 gets one line.

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
            lines.append(f"=== {name}: not text; {_digest(before)} before, {_digest(after)} now")
            continue
        state = "was added" if before is None else "was removed" if after is None else "was changed"
        lines.append(f"=== {name} {state}")
        lines += list(difflib.unified_diff(was, now, lineterm=""))[
            2:
        ]  # without its own names, which a line can imitate
    return lines


def list_hidden_code(files: Mapping[str, bytes]) -> list[str]:
    """Return a sentence for each file that Python could run otherwise than it is shown.

    | file | reason |
    |---|---|
    | a Python file in another encoding than UTF-8 | a comment may hold code in that encoding |
    | a Python file with a carriage return that ends a line by itself | what follows a comment may be code |
    | a name with characters outside ASCII | it may look like another name |
    | compiled code | it cannot be read |
    """
    hidden = []
    for name, data in files.items():
        if not name.isascii():
            hidden.append(f"{name.encode('unicode_escape').decode()}: its name has characters outside ASCII")
        if name.endswith((".pyc", ".pyo", ".so", ".pyd", ".dll")):
            hidden.append(f"{name}: compiled code, which cannot be read")
        if not name.endswith(".py"):
            continue
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        except SyntaxError:
            encoding = "unknown"
        if encoding not in ("utf-8", "utf-8-sig"):
            hidden.append(f"{name}: its encoding is {encoding}, in which a comment may hold code")
        if b"\r" in data.replace(b"\r\n", b""):
            hidden.append(f"{name}: a carriage return inside a line, after which a comment may end")
    return hidden


def _digest(data: bytes | None) -> str:
    return "no file" if data is None else f"{len(data):,} bytes with SHA-256 {hashlib.sha256(data).hexdigest()[:16]}"
