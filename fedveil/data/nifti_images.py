"""Decode a NIfTI image (.nii, .nii.gz) to 8-bit gray, with the package nibabel (the extra "nifti").

| in the file | in the decoded image |
|---|---|
| a volume of several slices | the middle slice of the third axis, at the index n // 2 |
| the first axis; the second axis | columns; rows, both in the stored order: the orientation is not applied |
| scl_slope, scl_inter | applied |
| task.image-window | applied to the rescaled values; values beyond it are black or white |
| otherwise cal_min and cal_max | the display window that they define; values beyond it are black or white |
| otherwise 8-bit unsigned values that are not rescaled | the same; all other values are refused, because they declare
  no range |
| several volumes, colors, complex numbers, a header without its data, a slice with more than
  `gray_values.MOST_PIXELS` pixels | refused |

Only the numbers in the fixed header and the slice are used. Texts and extensions, which may name the patient, are not
read. A gzipped file is inflated only as far as its header requires, after the size in the header is checked.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from fedveil.data import gray_values
from fedveil.data.gray_values import ImageError
from fedveil.data.quiet_packages import quiet_package

__all__ = ["decode_nifti", "is_nifti", "nifti_conversions"]

_GZIP = b"\x1f\x8b"
_HEADERS = (348, 540)  # bytes in the headers of NIfTI-1 and NIfTI-2
_MOST_BYTES = 1 << 31  # of a volume
_PIECE = 1 << 20
_DAMAGED = "it is damaged or cut off"


@dataclass(frozen=True)
class NiftiHeader:
    """The fields that determine how a slice is decoded; `window` is (cal_min, cal_max)."""

    offset: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    slope: float
    intercept: float
    window: tuple[float, float] | None


def is_nifti(image: bytes) -> bool:
    """Return whether the bytes, which may be gzipped, begin like a NIfTI file."""
    return _version_of(_start_of(image)) != 0


def nifti_conversions(image: bytes, window: tuple[float, float] | None) -> tuple[str, ...]:
    """Return the names of the conversions that `decode_nifti` would make, from the header alone.

    Raises:
        ImageError: the file is not decoded, for the reason given.
    """
    header = _read_header(image, window)
    names = []
    if window is not None:
        names.append(gray_values.name_window(*window))
    elif header.window is not None:
        names.append("grey by the window in the file")
    if header.shape[2] > 1:
        names.append("middle one of several slices")
    return tuple(names)


def decode_nifti(image: bytes, window: tuple[float, float] | None) -> Any:
    """Return the slice as a Pillow image of mode "L".

    Raises:
        ImageError: the file is not decoded, for the reason given. Damaged files may raise other errors as well.
    """
    from PIL import Image

    header = _read_header(image, window)
    stored = _read_slice(image, header)
    values = stored.astype(np.float64) * header.slope + header.intercept
    bounds = window or header.window
    shares = gray_values.apply_window(values, *bounds) if bounds else gray_values.apply_range(values, 0, 255)
    return Image.fromarray(gray_values.to_bytes(shares))


def _start_of(image: bytes) -> bytes:
    """Return the first bytes of a file, inflated; b"" for a damaged gzip file."""
    if image[:2] != _GZIP:
        return image[: _HEADERS[1]]
    try:
        with gzip.open(io.BytesIO(image)) as stream:
            return stream.read(_HEADERS[1])
    except (OSError, EOFError, zlib.error):
        return b""


def _version_of(start: bytes) -> int:
    """Return 1 or 2 for the header of NIfTI-1 or NIfTI-2, and 0 for any other bytes."""
    size = {start[:4], start[3::-1]}
    if len(start) >= _HEADERS[0] and (348).to_bytes(4, "little") in size and start[344:347] in (b"n+1", b"ni1"):
        return 1
    if len(start) >= _HEADERS[1] and (540).to_bytes(4, "little") in size and start[4:7] in (b"n+2", b"ni2"):
        return 2
    return 0


def _read_header(image: bytes, window: tuple[float, float] | None) -> NiftiHeader:
    """Return the fields, checked and bounded. Raises ImageError for an image that is not decoded."""
    from PIL import Image

    start = _start_of(image)
    version = _version_of(start)
    raw = _parse_header(start[: _HEADERS[version - 1]], version)
    if start[344:347] == b"ni1" or start[4:7] == b"ni2":
        raise ImageError("its pixels are in another file (.img)", "save it as .nii")
    try:
        dtype = raw.get_data_dtype()
    except Exception:  # an unknown code
        raise ImageError("its values have an unknown type") from None
    sizes = [int(size) for size in raw.get_data_shape()]
    while len(sizes) > 3 and sizes[-1] == 1:
        sizes.pop()
    sizes += [1] * (3 - len(sizes)) if len(sizes) == 2 else []
    if len(sizes) != 3 or min(sizes) < 1:
        raise ImageError("expected one image or one volume, found another number of axes", "save each volume as a file")
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise ImageError("expected gray values of at most 64 bits, found another type", "save it as gray values")
    if Image.MAX_IMAGE_PIXELS and sizes[0] * sizes[1] > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError
    gray_values.require_size(sizes[0] * sizes[1])
    if math.prod(sizes) * dtype.itemsize > _MOST_BYTES:
        raise ImageError(f"its volume has more than {_MOST_BYTES:,} bytes", "save its slices as files")
    offset = int(raw.get_data_offset())
    if not len(start[: _HEADERS[version - 1]]) <= offset <= _MOST_BYTES:
        raise ImageError(_DAMAGED)
    rescale = raw.get_slope_inter()
    slope = 1.0 if rescale[0] is None else float(rescale[0])
    intercept = 0.0 if rescale[0] is None else float(rescale[1])
    return _with_window(raw, NiftiHeader(offset, (sizes[0], sizes[1], sizes[2]), dtype, slope, intercept, None), window)


def _parse_header(start: bytes, version: int) -> Any:
    """Return nibabel's header. Raises ImageError if nibabel is not installed."""
    try:
        import nibabel
    except ImportError:
        raise ImageError(
            "it is a NIfTI file, which needs the package nibabel", "pip install 'fedveil[nifti]'"
        ) from None
    quiet_package("nibabel", "nibabel.global")
    kind = nibabel.Nifti1Header if version == 1 else nibabel.Nifti2Header
    return kind(start, check=False)


def _with_window(raw: Any, header: NiftiHeader, window: tuple[float, float] | None) -> NiftiHeader:
    if not max(abs(header.slope), abs(header.intercept)) <= gray_values.LARGEST:
        raise ImageError("its scl_slope or scl_inter is too large")
    low, high = float(raw["cal_min"]), float(raw["cal_max"])
    if window is None and -gray_values.LARGEST <= low < high <= gray_values.LARGEST:
        return replace(header, window=(low, high))
    if window is None and (header.dtype != np.uint8 or (header.slope, header.intercept) != (1, 0)):
        raise ImageError("it declares no range of its values (cal_min, cal_max)", "set task.image-window")
    return header


def _read_slice(image: bytes, header: NiftiHeader) -> np.ndarray:
    """Return the stored values of the middle slice, (rows, columns). Raises ImageError for a file that is cut off."""
    columns, rows, slices = header.shape
    size = columns * rows * header.dtype.itemsize
    with gzip.open(io.BytesIO(image)) if image[:2] == _GZIP else io.BytesIO(image) as stream:
        _skip(stream, header.offset + slices // 2 * size)
        data = stream.read(size)
        if len(data) < size:
            raise ImageError(_DAMAGED)
        _skip(stream, (slices - 1 - slices // 2) * size)  # to check that the file is complete
    return np.frombuffer(data, header.dtype).reshape(rows, columns)


def _skip(stream: IO[bytes] | Any, count: int) -> None:
    while count:
        piece = stream.read(min(count, _PIECE))
        if not piece:
            raise ImageError(_DAMAGED)
        count -= len(piece)
