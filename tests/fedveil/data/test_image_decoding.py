"""A generated file for each kind of image, with the values that decoding must give."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from fedveil.data.image_decoding import decode_image, describe_conversions, image_conversions
from fedveil.errors import TaskError
from tests.fedveil.data.decoded_images import check_decoded

RAMP = np.array([[0, 1 / 3], [2 / 3, 1]])  # of black to white
GREY = np.array([[0, 85], [170, 255]])
TURNED = np.array([[170, 0], [255, 85]])  # a quarter turn to the right


def stored(values: np.ndarray | Image.Image, form: str = "PNG", **keys: object) -> bytes:
    out = io.BytesIO()
    (values if isinstance(values, Image.Image) else Image.fromarray(values)).save(out, form, **keys)
    return out.getvalue()


def ramp(most: float, kind: type) -> np.ndarray:
    return (RAMP * most).round(0 if np.issubdtype(kind, np.integer) else 9).astype(kind)


def tiff(values: np.ndarray, **tags: object) -> bytes:
    numbers = {"photometric": 262, "max_sample": 281, "low": 340, "high": 341, "orientation": 274}
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    for name, value in tags.items():
        directory[numbers[name]] = value
        if name in ("low", "high"):
            directory.tagtype[numbers[name]] = 12
    return stored(values, "TIFF", tiffinfo=directory)


def raw_tiff(values: np.ndarray, kind: int, photometric: int = 1) -> bytes:
    """A TIFF of one strip, for what Pillow does not write."""
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    tags = [(256, 2), (257, 2), (258, values.itemsize * 8), (259, 1), (262, photometric), (273, 8), (277, 1), (278, 2),
            (279, len(data)), (339, kind)]  # fmt: skip
    at = 8 + len(data)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", at) + data + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0"


def with_significant_bits(png: bytes, bits: int) -> bytes:
    chunk = b"sBIT" + bytes([bits])
    whole = struct.pack(">I", 1) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:33] + whole + png[33:]  # after the header


def palette() -> Image.Image:
    picture = Image.new("P", (2, 2))
    picture.putpalette([0, 0, 0, 85, 85, 85, 170, 170, 170, 255, 255, 255])
    picture.putdata([0, 1, 2, 3])
    return picture


def black() -> Image.Image:
    return Image.fromarray((255 - GREY).astype(np.uint8))


def alpha() -> Image.Image:
    values = np.zeros((2, 2, 4), np.uint8)
    values[..., 3] = 255 - GREY  # black behind less and less
    return Image.fromarray(values)


def turned(form: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return stored(Image.fromarray(GREY.astype(np.uint8)).resize((64, 64), 0), form, exif=exif)


def frames(form: str) -> bytes:
    first, second = Image.fromarray(GREY.astype(np.uint8)), Image.new("L", (2, 2), 7)
    return stored(first, form, save_all=True, append_images=[second])


SCALED = "grey from 0 to {} scaled to 8 bits"
KINDS = {
    "grey of 8 bits": (stored(GREY.astype(np.uint8)), ()),
    "RGB": (stored(np.dstack([GREY] * 3).astype(np.uint8)), ()),
    "PNG of 16 bits": (stored(ramp(65535, np.uint16)), (SCALED.format(65535),)),
    "PNG of 12 bits in 16": (with_significant_bits(stored(ramp(4095, np.uint16)), 12), (SCALED.format(4095),)),
    "TIFF of 16 bits": (stored(ramp(65535, np.uint16), "TIFF"), (SCALED.format(65535),)),
    "TIFF of 12 bits in 16": (tiff(ramp(4095, np.uint16), max_sample=4095), (SCALED.format(4095),)),
    "TIFF of 16 signed bits": (raw_tiff(ramp(32767, np.int16), 2), (SCALED.format(32767),)),
    "TIFF of 32 bits": (raw_tiff(ramp(2**32 - 1, np.uint32), 1), (SCALED.format("4.29497e+09"),)),
    "TIFF of 32 signed bits": (stored(ramp(2**31 - 1, np.int32), "TIFF"), (SCALED.format("2.14748e+09"),)),
    "TIFF where 0 is white": (
        raw_tiff(65535 - ramp(65535, np.uint16), 1, photometric=0),
        (SCALED.format(65535), "inverted, because 0 is white"),
    ),
    "TIFF of floats": (
        tiff((RAMP * 4 - 1).astype(np.float32), low=-1.0, high=3.0),
        ("floats from -1 to 3 scaled to 8 bits",),
    ),
    "PGM of 10 bits": (b"P5 2 2 1023\n" + ramp(1023, np.uint16).byteswap().tobytes(), (SCALED.format(65535),)),
    "palette": (stored(palette()), ("palette to RGB",)),
    "alpha": (stored(alpha()), ("transparency on white",)),
    "CMYK": (
        stored(Image.merge("CMYK", [*[Image.new("L", (2, 2))] * 3, black()]), "TIFF"),
        ("CMYK to RGB",),
    ),
    "TIFF of two pages": (frames("TIFF"), ("first of several frames",)),
    "animated WebP": (
        stored(Image.fromarray(GREY.astype(np.uint8)).convert("RGB"), "WEBP", lossless=True, save_all=True,
               append_images=[Image.new("RGB", (2, 2))]),
        ("transparency on white", "first of several frames",),
    ),
    "animated PNG": (frames("PNG"), ("first of several frames",)),
    "BMP": (stored(GREY.astype(np.uint8), "BMP"), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_has_its_values_and_says_its_conversion(name):
    check_decoded(*KINDS[name], GREY)


@pytest.mark.parametrize(("form", "close"), [("PNG", 0), ("TIFF", 0), ("JPEG", 12)])
def test_the_orientation_of_a_photo_is_applied(form, close):
    data = turned(form)
    assert image_conversions(data, "x") == ("turned by its EXIF orientation",)
    small = np.asarray(decode_image(data, "x", "L")).astype(int)[16::32, 16::32]
    assert np.abs(small - TURNED).max() <= close


def test_a_deep_image_is_turned_and_its_transparent_grey_is_white():
    data = tiff(ramp(65535, np.uint16), orientation=6)
    assert np.array_equal(np.asarray(decode_image(data, "x", "L")), TURNED)
    key = stored(ramp(65535, np.uint16), transparency=21845)
    assert image_conversions(key, "x") == (SCALED.format(65535), "transparency on white")
    assert np.array_equal(np.asarray(decode_image(key, "x", "L")), [[0, 255], [170, 255]])


def test_a_transparent_color_of_a_palette_or_grey_is_white():
    for data in (stored(palette(), transparency=1), stored(palette(), "GIF", transparency=1)):
        assert np.array_equal(np.asarray(decode_image(data, "x", "L")), [[0, 255], [170, 255]])
    data = stored(GREY.astype(np.uint8), transparency=85)
    assert np.array_equal(np.asarray(decode_image(data, "x", "L")), [[0, 255], [170, 255]])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (tiff(RAMP.astype(np.float32)), "its floats have no declared range"),
        (tiff(RAMP.astype(np.float32), low=0.0, high=0.0), "its declared range is empty"),
        (tiff((RAMP * 5).astype(np.float32), low=0.0, high=1.0), "values outside its declared range from 0 to 1"),
        (tiff(np.full((2, 2), np.nan, np.float32), low=0.0, high=1.0), "values outside its declared range"),
        (raw_tiff(np.full((2, 2), -5, np.int16), 2), "values outside its declared range from 0 to 32767"),
        (with_significant_bits(stored(ramp(65535, np.uint16)), 12), "outside its declared range from 0 to 4095"),
        (b"no image", "its format is unknown"),
        (stored(GREY.astype(np.uint8))[:-30], "it is damaged or cut off"),
    ],
    ids=["none", "empty", "above", "nan", "below", "12 bits", "no image", "cut"],
)
def test_a_value_without_a_range_and_a_damaged_file_are_refused(data, said):
    with pytest.raises(TaskError, match=f"^task.data: cannot (scale|decode) the image in row 3 of f: .*{said}"):
        decode_image(data, "row 3 of f")


def test_conversions_are_counted():
    names = [("a", "b"), ("b",), ()]
    assert describe_conversions(names) == "b (2), a (1)"
    assert describe_conversions([()]) == ""
