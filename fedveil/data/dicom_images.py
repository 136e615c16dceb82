"""Decode a DICOM file to 8-bit gray or RGB, with the package pydicom (the extra "dicom").

| in the file | in the decoded image |
|---|---|
| RescaleSlope, RescaleIntercept | applied |
| task.image-window | applied to the rescaled values; values beyond it are black or white |
| otherwise WindowCenter and WindowWidth | the first window, by its VOILUTFunction, as the standard defines it |
| otherwise | scaled by the range of the stored bits, like a PNG with its sBIT; a value outside it is refused |
| MONOCHROME1 | inverted |
| RGB, YBR_FULL, YBR_FULL_422 with 8 bits | RGB; a JPEG whose markers contradict each other or these colors is refused |
| no PixelRepresentation; gray with more than `gray_values.MOST_PIXELS` pixels | refused |
| several frames | the first one |
| any other color, lookup tables, values per frame | refused |
| transfer syntax | uncompressed, RLE or JPEG Baseline; any other is refused |

Only the attributes in `_ATTRIBUTES` and the pixels become values; pydicom skips all others, such as the patient's name.
An error or a conversion's name never contains a value from the file, except for the range of the stored bits.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedveil.data import gray_values
from fedveil.data.gray_values import ImageError
from fedveil.data.quiet_packages import quiet_package

__all__ = ["DICOM_START", "decode_dicom", "dicom_conversions", "is_dicom"]

_ATTRIBUTES = (
    "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored",
    "HighBit", "PixelRepresentation", "PlanarConfiguration", "RescaleSlope", "RescaleIntercept", "WindowCenter",
    "WindowWidth", "VOILUTFunction", "ModalityLUTSequence", "VOILUTSequence", "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
)  # fmt: skip
_IMPLICIT, _EXPLICIT, _BIG_ENDIAN = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2"
_UNCOMPRESSED = (_IMPLICIT, _EXPLICIT, _BIG_ENDIAN)
_COMPRESSED = {"1.2.840.10008.1.2.5": "pydicom", "1.2.840.10008.1.2.4.50": "pillow"}  # the plug-in that decodes it
_GRAY = ("MONOCHROME1", "MONOCHROME2")
_COLORS = ("RGB", "YBR_FULL", "YBR_FULL_422")
_OTHER_COLORS = ("PALETTE COLOR", "YBR_PARTIAL_422", "YBR_PARTIAL_420", "YBR_ICT", "YBR_RCT", "HSV", "ARGB", "CMYK")
_FUNCTIONS = ("LINEAR", "LINEAR_EXACT", "SIGMOID")
_SYNTAX = 0x00020010
_PIXELS = (0x7FE00008, 0x7FE00009, 0x7FE00010)
_MAGIC_AT = 128
DICOM_START = _MAGIC_AT + 4  # bytes, enough for `is_dicom`
_MAX_FRAMES = 1 << 20
_EXPORT = "export it as PNG"


@dataclass(frozen=True)
class DicomHeader:
    """The attributes that determine how the pixels are decoded."""

    syntax: str
    rows: int
    columns: int
    frames: int
    photometric: str
    bits_allocated: int
    bits_stored: int
    is_signed: bool
    planar: int
    slope: float
    intercept: float
    windows: tuple[tuple[float, float], ...]  # center and width
    function: str

    @property
    def is_gray(self) -> bool:
        """Return whether the image is gray, with one value per pixel."""
        return self.photometric in _GRAY

    def stored_range(self) -> tuple[float, float]:
        """Return the lowest and the highest value that the stored bits can have, rescaled."""
        low, high = 0, 2**self.bits_stored - 1
        if self.is_signed:
            low, high = -(2 ** (self.bits_stored - 1)), 2 ** (self.bits_stored - 1) - 1
        ends = sorted((low * self.slope + self.intercept, high * self.slope + self.intercept))
        return ends[0], ends[1]


def is_dicom(image: bytes) -> bool:
    """Return whether the bytes begin like a DICOM file: a preamble of 128 bytes, then "DICM"."""
    return image[_MAGIC_AT:DICOM_START] == b"DICM"


def dicom_conversions(image: bytes, window: tuple[float, float] | None) -> tuple[str, ...]:
    """Return the names of the conversions that `decode_dicom` would make, without reading the pixels.

    Raises:
        ImageError: the file is not decoded, for the reason given.
    """
    header = _read_header(*_open(image, with_pixels=False), window)
    names = []
    if not header.is_gray:
        names += [f"{header.photometric} to RGB"] if header.photometric != "RGB" else []
    elif window is not None:
        names.append(gray_values.name_window(*window))
    elif header.windows:
        names.append(f"grey by the {'first ' if len(header.windows) > 1 else ''}window in the file")
    elif (bounds := header.stored_range()) != (0, 255):
        names.append(gray_values.name_range(*bounds))
    if header.photometric == "MONOCHROME1":
        names.append(gray_values.INVERTED)
    if header.frames > 1:
        names.append(gray_values.FIRST_FRAME)
    return tuple(names)


def decode_dicom(image: bytes, window: tuple[float, float] | None) -> Any:
    """Return the first frame as a Pillow image of mode "L" or "RGB".

    Raises:
        ImageError: the file is not decoded, for the reason given. Damaged files may raise other errors as well.
    """
    from PIL import Image

    dataset, syntax = _open(image, with_pixels=True)
    header = _read_header(dataset, syntax, window)
    pixels = _decode_first_frame(dataset, header)
    if not header.is_gray:
        return Image.fromarray(pixels.astype(np.uint8, copy=False))
    values = pixels.astype(np.float64) * header.slope + header.intercept
    if window is not None:
        shares = gray_values.apply_window(values, *window)
    elif header.windows:
        shares = _apply_own_window(values, *header.windows[0], header.function)
    else:
        shares = gray_values.apply_range(values, *header.stored_range())
    return Image.fromarray(gray_values.to_bytes(1 - shares if header.photometric == "MONOCHROME1" else shares))


def _apply_own_window(values: np.ndarray, center: float, width: float, function: str) -> np.ndarray:
    """Map rescaled values to the range from 0 to 1, as PS3.3 C.11.2 specifies."""
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700))))
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    return gray_values.apply_window(values, center - width / 2, center + width / 2)


def _open(image: bytes, with_pixels: bool) -> tuple[Any, str]:
    """Return the data set with only `_ATTRIBUTES`, plus the pixel data if `with_pixels`, and the transfer syntax.

    This does not use dcmread, which would read the transfer syntax again and inflate a deflated file of any size.
    """
    _quiet_pydicom()
    stream = io.BytesIO(image)
    syntax = _read_syntax(stream)
    _require_known_syntax(syntax)
    from pydicom.filereader import read_dataset
    from pydicom.tag import Tag

    attributes: list[Any] = [Tag(name) for name in [*_ATTRIBUTES, *(["PixelData"] if with_pixels else [])]]
    dataset = read_dataset(
        stream, is_implicit_VR=syntax == _IMPLICIT, is_little_endian=syntax != _BIG_ENDIAN,
        stop_when=None if with_pixels else (lambda tag, *_: tag in _PIXELS), specific_tags=attributes,
    )  # fmt: skip
    return dataset, syntax


def _quiet_pydicom() -> None:
    """Keep pydicom's warnings, whose texts quote values from the file, from the log and the terminal.

    Raises:
        ImageError: pydicom is not installed.
    """
    try:
        import pydicom  # noqa: F401
    except ImportError:
        raise ImageError(
            "it is a DICOM file, which needs the package pydicom", "pip install 'fedveil[dicom]'"
        ) from None
    quiet_package("pydicom")


def _read_syntax(stream: io.BytesIO) -> str:
    """Return the transfer syntax in the file's group 2; "" if it has none. The stream is left after that group.

    Raises:
        ImageError: the group has several transfer syntaxes, and different readers would choose different ones.
    """
    from pydicom.filereader import data_element_generator

    stream.seek(DICOM_START)
    elements = data_element_generator(
        stream, is_implicit_VR=False, is_little_endian=True, stop_when=lambda tag, *_: tag >> 16 != 2,
        specific_tags=[_SYNTAX],
    )  # fmt: skip
    found = [element.value for element in elements if element.tag == _SYNTAX]
    if len(found) > 1:
        raise ImageError("it has more than one transfer syntax")
    return found[0].strip(b"\0 ").decode("ascii") if found and isinstance(found[0], bytes) else ""


def _require_known_syntax(syntax: str) -> None:
    from pydicom.uid import UID

    if syntax in _UNCOMPRESSED or syntax in _COMPRESSED:
        return
    uid = UID(syntax)
    known = f'"{uid.name}"' if uid.is_transfer_syntax and not uid.is_private else "an unknown one"
    raise ImageError(
        f"expected DICOM without compression, with RLE or with JPEG Baseline, found the transfer syntax {known}",
        "convert it to Explicit VR Little Endian, for example with gdcmconv --raw",
    )


def _read_header(dataset: Any, syntax: str, window: tuple[float, float] | None) -> DicomHeader:
    """Return the attributes, checked and bounded. Raises ImageError for an image that is not decoded."""
    from PIL import Image

    rows, columns = _integer(dataset, "Rows", 0), _integer(dataset, "Columns", 0)
    frames = _integer(dataset, "NumberOfFrames", 1)
    if rows < 1 or columns < 1 or not 1 <= frames <= _MAX_FRAMES:
        raise ImageError(f"it has no image with rows, columns and up to {_MAX_FRAMES:,} frames")
    if Image.MAX_IMAGE_PIXELS and rows * columns > 2 * Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError
    photometric = _text(dataset, "PhotometricInterpretation")
    allocated, signed = _integer(dataset, "BitsAllocated", 0), _integer(dataset, "PixelRepresentation", -1)
    stored = _integer(dataset, "BitsStored", 0)
    is_gray = photometric in _GRAY
    if is_gray:
        gray_values.require_size(rows * columns)
    if not is_gray and photometric not in _COLORS:
        kind = photometric if photometric in _OTHER_COLORS else "an unknown kind"
        raise ImageError(f"expected gray, {', '.join(_COLORS)}, found the colors {kind}", _EXPORT)
    if _integer(dataset, "SamplesPerPixel", 1) != (1 if is_gray else 3):
        raise ImageError("its samples per pixel do not match its colors")
    if signed == -1:
        raise ImageError("it does not say whether its values are signed (PixelRepresentation)", _EXPORT)
    if allocated not in ((8, 16, 32) if is_gray else (8,)) or not 1 <= stored <= allocated or signed not in (0, 1):
        raise ImageError("expected gray with 8, 16 or 32 bits or colors with 8, found other bits per value", _EXPORT)
    if not is_gray and (stored, signed) != (8, 0):
        raise ImageError("expected colors with 8 bits, found other bits per value", _EXPORT)
    if _integer(dataset, "HighBit", stored - 1) != stored - 1:
        raise ImageError("its values do not end at the lowest bit", _EXPORT)
    header = DicomHeader(
        syntax, rows, columns, frames, photometric, allocated, stored, bool(signed),
        _integer(dataset, "PlanarConfiguration", 0), _number(dataset, "RescaleSlope", 1.0),
        _number(dataset, "RescaleIntercept", 0.0), (), _text(dataset, "VOILUTFunction") or "LINEAR",
    )  # fmt: skip
    if header.planar not in (0, 1):
        raise ImageError("its planar configuration is neither 0 nor 1")
    return _with_windows(header, dataset, window) if is_gray else header


def _with_windows(header: DicomHeader, dataset: Any, window: tuple[float, float] | None) -> DicomHeader:
    """Return the header of a gray image with its windows, unless `window` replaces them."""
    if "ModalityLUTSequence" in dataset:
        raise ImageError("its values need a lookup table (Modality LUT), which is not applied", _EXPORT)
    if "SharedFunctionalGroupsSequence" in dataset or "PerFrameFunctionalGroupsSequence" in dataset:
        raise ImageError("its rescale and window are given per frame (enhanced DICOM)", "export its frames as PNG")
    if header.slope == 0:
        raise ImageError("its rescale slope is 0")
    if window is not None:
        return header
    centers, widths = _numbers(dataset, "WindowCenter"), _numbers(dataset, "WindowWidth")
    if len(centers) != len(widths):
        raise ImageError("it does not have a window width for each window center")
    if not centers and "VOILUTSequence" in dataset:
        raise ImageError(
            "its values need a lookup table (VOI LUT), which is not applied", "set task.image-window, or " + _EXPORT
        )
    low, high = header.stored_range()
    if not centers and low == high:
        raise ImageError("its rescale slope is too small", "set task.image-window, or " + _EXPORT)
    if centers and header.function not in _FUNCTIONS:
        raise ImageError("the function of its window is unknown", "set task.image-window, or " + _EXPORT)
    if widths and (widths[0] <= 0 or (widths[0] < 1 and header.function == "LINEAR")):
        raise ImageError("the width of its window is too small", "set task.image-window, or " + _EXPORT)
    return replace(header, windows=tuple(zip(centers, widths, strict=True)))


def _decode_first_frame(dataset: Any, header: DicomHeader) -> np.ndarray:
    """Return the first frame's stored values, (rows, columns) or (rows, columns, 3); colors are RGB."""
    from pydicom.pixels import get_decoder

    if "PixelData" not in dataset:
        raise ImageError("it has no pixel data")
    element = dataset.get_item("PixelData")
    data, frames = element.value, header.frames
    if not isinstance(data, bytes):
        raise ImageError("it has no pixel data")
    if header.syntax in _UNCOMPRESSED:
        samples = 1 if header.is_gray else 2 if header.photometric == "YBR_FULL_422" else 3
        size = header.rows * header.columns * samples * header.bits_allocated // 8
        if len(data) < size * frames:
            raise ImageError("it is damaged or cut off")
        data, frames = data[: size + size % 2], 1
    elif _COMPRESSED[header.syntax] == "pillow":
        colors = _decode_marked_jpeg(data, header)
        if colors is not None:
            return colors
    decoded, _ = get_decoder(header.syntax).as_array(
        data, index=0, decoding_plugin=_COMPRESSED.get(header.syntax, ""),
        rows=header.rows, columns=header.columns, number_of_frames=frames,
        samples_per_pixel=1 if header.is_gray else 3, photometric_interpretation=header.photometric,
        bits_allocated=header.bits_allocated, bits_stored=header.bits_stored,
        pixel_representation=int(header.is_signed), planar_configuration=header.planar, pixel_keyword="PixelData",
        pixel_vr=element.VR if element.VR in ("OB", "OW") else "OW",
    )  # fmt: skip
    return np.asarray(decoded)


def _decode_marked_jpeg(data: bytes, header: DicomHeader) -> np.ndarray | None:
    """Return the first frame of a JPEG that declares its colors as RGB; None for any other JPEG.

    Such a JPEG has an Adobe marker, or components named R, G and B. Pillow then returns RGB, which pydicom would
    convert a second time.

    Raises:
        ImageError: its size differs from the header's (pydicom compares only the number of pixels), or the marker
            contradicts the rest of the file.
    """
    from PIL import Image, UnidentifiedImageError
    from pydicom.encaps import get_frame

    try:
        opened: Any = Image.open(io.BytesIO(get_frame(data, 0, number_of_frames=header.frames)), formats=("JPEG",))
    except UnidentifiedImageError:
        raise ImageError("it is damaged or cut off") from None
    with opened:
        if opened.size != (header.columns, header.rows):
            raise ImageError("its pixels do not have the size that its header gives")
        if opened.mode != ("L" if header.is_gray else "RGB"):
            raise ImageError("its samples per pixel do not match its colors")
        names_rgb = [layer[0] for layer in opened.layer] == [*b"RGB"]
        transform = opened.info.get("adobe_transform", 0 if names_rgb else None)
        if header.is_gray or transform is None:
            return None
        is_rgb = transform == 0 and "jfif" not in opened.info and (names_rgb or header.photometric == "RGB")
        if transform != 1 and not is_rgb:
            raise ImageError("its JPEG markers contradict each other or its colors", _EXPORT)
        return np.asarray(opened)


def _numbers(dataset: Any, name: str) -> list[float]:
    """Return the numbers of an attribute; [] if it is absent or empty."""
    value = dataset.get(name)
    if value is None or value == "":
        return []
    values = [float(each) for each in (value if hasattr(value, "__iter__") and not isinstance(value, str) else [value])]
    if not all(abs(number) <= gray_values.LARGEST for number in values):  # also NaN
        raise ImageError(f"its attribute {name} is not a number up to {gray_values.LARGEST:g}")
    return values


def _number(dataset: Any, name: str, default: float) -> float:
    values = _numbers(dataset, name) or [default]
    if len(values) > 1:
        raise ImageError(f"expected one number in its attribute {name}, found several")
    return values[0]


def _integer(dataset: Any, name: str, default: int) -> int:
    number = _number(dataset, name, default)
    if number != int(number):
        raise ImageError(f"expected an integer in its attribute {name}, found a fraction")
    return int(number)


def _text(dataset: Any, name: str) -> str:
    value = dataset.get(name)
    return value.strip() if isinstance(value, str) else ""
