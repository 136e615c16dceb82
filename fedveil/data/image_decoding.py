"""Decode an image file to 8-bit RGB or grayscale, with one rule per kind of file.

| in the file | in the decoded image |
|---|---|
| grayscale with 1 to 8 bits, or RGB | the same |
| 16-bit RGB | the high byte of each value, because Pillow reads it that way |
| grayscale with more bits | scaled by the declared range: sBIT (PNG), MaxSampleValue or the bits per sample (TIFF), or
  the maximum in a PGM file |
| floats | scaled by SMinSampleValue and SMaxSampleValue (TIFF); refused if these are missing |
| a value outside the declared range | refused rather than clipped |
| either of the two above, with task.image-window | scaled by the window; values beyond it are black or white |
| WhiteIsZero (TIFF) | inverted |
| a palette, CMYK, YCbCr, LAB | converted to RGB |
| alpha, or a transparent color | composited on white |
| EXIF orientation | applied |
| several frames or pages | the first one |
| DICOM, NIfTI | see `dicom_images`, `nifti_images` |

No range is computed from pixels, so equal values stay equal across images, and no image influences another. Each
conversion has a name; `image_conversions` determines the names from the header alone, so they are cheap to count.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedveil.data import dicom_images, gray_values, nifti_images
from fedveil.data.gray_values import ImageError, RangeError
from fedveil.errors import TaskError

__all__ = ["decode_image", "describe_conversions", "image_conversions"]

_BITS, _PHOTOMETRIC, _MAX_SAMPLE, _FORMAT, _FLOAT_MIN, _FLOAT_MAX = 258, 262, 281, 339, 340, 341  # TIFF tags
_WHITE_IS_ZERO, _UNSIGNED = 0, 1
_ORIENTATION = 0x0112  # an EXIF tag
_SIGNIFICANT_BITS = "sBIT"  # a PNG chunk
_DEEP = ("I", "F")  # the first letters of Pillow's modes with more than 8 bits
_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_COLORS = ("CMYK", "YCbCr", "LAB", "HSV")
_MOST_NAMES = 12  # in a description, because each range has a name of its own

Window = tuple[float, float]  # the gray values for black and white


def decode_image(image: bytes, where: str, mode: str = "RGB", window: Window | None = None) -> Any:
    """Decode the image to Pillow's mode `mode`, "RGB" or "L"; `window` is that of task.image-window.

    Raises:
        TaskError: the image cannot be decoded, declares no range, or has values outside its range.
    """
    try:
        if dicom_images.is_dicom(image):
            return _converted(dicom_images.decode_dicom(image, window), mode)
        if nifti_images.is_nifti(image):
            return _converted(nifti_images.decode_nifti(image, window), mode)
        return _decoded(_opened(image), mode, window)
    except RangeError as error:
        raise TaskError(f"task.data: cannot scale the image in {where}: {error}; {error.remedy}") from None
    except Exception as error:  # Pillow's decoders raise errors of many types for damaged files
        raise _undecodable(where, error) from None


def image_conversions(image: bytes, where: str, window: Window | None = None) -> tuple[str, ...]:
    """Return the names of the conversions that `decode_image` would make, from the image header.

    Raises:
        TaskError: the file does not begin with an image header. The remaining bytes are checked when the image is
            decoded.
    """
    try:
        if dicom_images.is_dicom(image):
            return dicom_images.dicom_conversions(image, window)
        if nifti_images.is_nifti(image):
            return nifti_images.nifti_conversions(image, window)
        with _opened(image) as opened:
            return _conversions(opened, window)
    except Exception as error:  # see decode_image
        raise _undecodable(where, error) from None


def describe_conversions(images: Iterable[tuple[str, ...]]) -> str:
    """Return how many images need each conversion, the most frequent first; "" if no image needs any."""
    counts = Counter(name for names in images for name in names)
    shown = ", ".join(f"{name} ({count:,})" for name, count in counts.most_common(_MOST_NAMES))
    return shown + f" and {len(counts) - _MOST_NAMES:,} more conversions" * (len(counts) > _MOST_NAMES)


def _opened(image: bytes) -> Any:
    from PIL import Image, PngImagePlugin

    opened = Image.open(io.BytesIO(image))
    if isinstance(opened, PngImagePlugin.PngImageFile):
        opened.info[_SIGNIFICANT_BITS] = _significant_bits(image)
    return opened


def _significant_bits(image: bytes) -> int:
    """Return the grayscale bits that a PNG's sBIT chunk, which Pillow does not read, declares; 0 without a chunk."""
    at = 8
    while at + 9 <= len(image):
        length, kind = int.from_bytes(image[at : at + 4]), image[at + 4 : at + 8]
        if kind == _SIGNIFICANT_BITS.encode():
            return image[at + 8] if length == 1 else 0
        if kind == b"IDAT":
            return 0
        at += 12 + length
    return 0


def _conversions(opened: Any, window: Window | None) -> tuple[str, ...]:
    mode, tags = opened.mode, getattr(opened, "tag_v2", {})
    names = []
    if mode.startswith(_DEEP):
        if window is not None:
            names.append(gray_values.name_window(*window))
        else:
            names.append(gray_values.name_range(*_declared_range(opened), "floats" if mode[0] == "F" else "grey"))
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            names.append(gray_values.INVERTED)
    if mode in ("P", "PA"):
        names.append("palette to RGB")
    if mode in _COLORS:
        names.append(f"{mode} to RGB")
    if mode in _ALPHA or "transparency" in opened.info:
        names.append("transparency on white")
    if opened.getexif().get(_ORIENTATION, 1) not in (0, 1):
        names.append("turned by its EXIF orientation")
    if getattr(opened, "n_frames", 1) > 1:
        names.append(gray_values.FIRST_FRAME)
    return tuple(names)


def _declared_range(opened: Any) -> tuple[float, float]:
    """Return the pixel values of black and white that the file header declares."""
    tags = getattr(opened, "tag_v2", None)
    if tags is None:
        if opened.format == "PNG":
            return 0, 2 ** (opened.info[_SIGNIFICANT_BITS] or 16) - 1
        if opened.format == "PPM" and opened.mode[0] == "I":
            return 0, 65535  # Pillow scales a PGM to this range by the maximum in its header
        raise RangeError(f"a {opened.format} file declares no range of its values")
    if opened.mode[0] == "F":
        if _FLOAT_MIN not in tags or _FLOAT_MAX not in tags:
            raise RangeError("its floats have no declared range")
        low, high = float(np.ravel(tags[_FLOAT_MIN])[0]), float(np.ravel(tags[_FLOAT_MAX])[0])
        if not (np.isfinite([low, high]).all() and low < high):
            raise RangeError("its declared range is empty")
        return low, high
    bits = int(np.ravel(tags[_BITS])[0])
    signed = int(np.ravel(tags.get(_FORMAT, _UNSIGNED))[0]) != _UNSIGNED
    declared = int(np.ravel(tags.get(_MAX_SAMPLE, 0))[0])
    return 0, declared if declared > 0 else 2 ** (bits - signed) - 1


def _decoded(opened: Any, mode: str, window: Window | None) -> Any:
    from PIL import Image, ImageOps

    opened.seek(0)
    deep, tags = opened.mode.startswith(_DEEP), getattr(opened, "tag_v2", {})
    if deep:
        picture = Image.fromarray(_scaled(opened, tags, window))
        picture.info["exif"] = opened.getexif().tobytes()
        opened = picture
    upright = ImageOps.exif_transpose(opened)
    if upright.mode in _ALPHA or (not deep and "transparency" in opened.info):
        white = Image.new("RGBA", upright.size, "white")
        white.alpha_composite(upright.convert("RGBA"))
        upright = white.convert("RGB")
    return _converted(upright, mode)


def _converted(picture: Any, mode: str) -> Any:
    return picture.convert("RGB").convert(mode) if picture.mode != "L" else picture.convert(mode)


def _scaled(opened: Any, tags: Any, window: Window | None) -> np.ndarray:
    """Return the gray values of an image with more than 8 bits, scaled to 8 bits."""
    values = np.asarray(opened).astype(np.float64)
    if opened.mode == "I" and _is_unsigned_32(tags):
        values = np.where(values < 0, values + 2**32, values)  # Pillow stores unsigned 32-bit values as signed
    key = opened.info.get("transparency")
    transparent = values == key if isinstance(key, int) else np.zeros(values.shape, bool)
    if window is not None:
        scaled = gray_values.apply_window(values, *window)
    else:
        scaled = gray_values.apply_range(values, *_declared_range(opened))
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        scaled = 1 - scaled
    return gray_values.to_bytes(np.where(transparent, 1.0, scaled))


def _is_unsigned_32(tags: Any) -> bool:
    """Return whether a TIFF stores unsigned 32-bit integers."""
    return int(np.ravel(tags.get(_BITS, 0))[0]) == 32 and int(np.ravel(tags.get(_FORMAT, _UNSIGNED))[0]) == _UNSIGNED


def _undecodable(where: str, error: Exception) -> TaskError:
    """Return the error for an image that cannot be decoded.

    Pillow's error text is not used, because it may quote bytes of the file.
    """
    from PIL import Image, UnidentifiedImageError

    remedy = "correct or drop the row"
    match error:
        case TaskError():
            return error
        case ImageError():
            reason, remedy = str(error), error.remedy
        case Image.DecompressionBombError():
            reason = f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
        case UnidentifiedImageError():
            reason = "its format is unknown"
        case _:
            reason = "it is damaged or cut off"
    return TaskError(f"task.data: cannot decode the image in {where}: {reason}; {remedy}")
