"""Check the size of an app bundle before Flower's SuperNode or the site's guard reads a file in it.

A SuperNode reads `pyproject.toml` in each new run's bundle, before the site's policy is consulted. A zip file of 10 MB
can become 10 GB in memory. The size that it states for a file is only a claim: zipfile decompresses the actual data,
and then truncates them to that size. So each file is decompressed here once, in parts, and its real size must be the
stated one.

Formal guarantees, for a bundle that `require_bundle` accepts:
- it has at most `MAX_BUNDLE_BYTES` bytes and `MAX_FILES` files;
- zipfile reads each file into exactly as many bytes as it states: `MAX_INFLATED_BYTES` in total, and
  `MAX_PYPROJECT_BYTES` for a `pyproject.toml`. In addition to the bundle, memory holds at most one part of 64 KiB.

| bundle | result |
|---|---|
| not a zip file, or a damaged or encrypted one | WireError |
| a file compressed with bzip2, LZMA or Zstandard | WireError: zipfile decompresses these without a bound |
| two entries with one name, or entries that share bytes | each counts |
"""

from __future__ import annotations

import zipfile
from io import BytesIO

from fedveil.errors import WireError
from fedveil.sanitize import sanitize

MAX_BUNDLE_BYTES = 10 << 20  # Flower's own limit for a submitted bundle
MAX_FILES = 10_000
MAX_INFLATED_BYTES = 128 << 20
MAX_PYPROJECT_BYTES = 256 << 10
_PYPROJECT = "pyproject.toml"
_ENTRY = b"PK\x01\x02"  # the start of each entry in a zip file's directory
_PART = 64 << 10
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def require_bundle(content: bytes) -> None:
    """Raise WireError unless a bundle is a zip file within the limits."""
    if len(content) > MAX_BUNDLE_BYTES:
        raise WireError(f"bundle: it has {len(content)} bytes; at most {MAX_BUNDLE_BYTES} are allowed")
    if (entries := content.count(_ENTRY)) > MAX_FILES:  # zipfile would keep about 500 bytes for each
        raise WireError(f"bundle: it has {entries} files; at most {MAX_FILES} are allowed")
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            left = MAX_INFLATED_BYTES
            for entry in archive.infolist():
                left -= _inflated_bytes(archive, entry, left)
    except WireError:
        raise
    except Exception as error:  # zipfile raises errors of many types for a damaged file
        raise WireError(f"bundle: it is not a readable zip file: {sanitize(error, 200)}") from None


def _inflated_bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, left: int) -> int:
    """Return the real size of a file. Raises WireError if it exceeds `left`, or is not the stated size."""
    stated, size = entry.file_size, 0
    limit = min(left, MAX_PYPROJECT_BYTES) if entry.filename == _PYPROJECT else left
    if entry.compress_type not in _METHODS:
        raise WireError("bundle: a file is compressed, but not with deflate")
    entry.file_size = limit + 2 * _PART  # zipfile stops there, not at the stated size
    with archive.open(entry) as file:
        while part := file.read(_PART):
            size += len(part)
            if size > limit:
                what = _PYPROJECT if limit < left else "all files together"
                raise WireError(f"bundle: {what} has more than the {limit} bytes allowed after decompression")
    if size != stated:
        raise WireError(f"bundle: a file has {size} bytes, but states {stated}")
    return size
