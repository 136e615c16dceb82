"""Generated DICOM files: pixels by the standard's formulas, refusals, and identifiers that must not leak."""

from __future__ import annotations

import io
import logging
import math
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from pydicom import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels.encoders import RLELosslessEncoder
from pydicom.uid import UID

from fedveil.config import parse
from fedveil.data import gray_values
from fedveil.data.image_decoding import decode_image, image_conversions
from fedveil.errors import ConfigError, TaskError
from tests.fedveil.data.decoded_images import check_decoded

MARK = "Quendolin"
EXPLICIT, IMPLICIT, BIG = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2", "1.2.840.10008.1.2.2"
RLE, JPEG, JPEG_2000 = "1.2.840.10008.1.2.5", "1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.90"
DEFLATED = "1.2.840.10008.1.2.1.99"
GREY = np.array([[0, 85], [170, 255]])
RAMP = np.array([[0, 1365], [2730, 4095]])  # of 12 bits


def dicom(
    values: np.ndarray | bytes = RAMP.astype(np.uint16), syntax: str = EXPLICIT, mark: str = MARK, **changes: object
) -> bytes:
    """A file whose tags all name the patient; `changes` overwrite attributes, None removes one."""
    about, out = Dataset(), io.BytesIO()
    about.PatientName, about.PatientID, about.PatientComments = f"{mark}^Anna", f"{mark} 7", f"{mark} has diabetes"
    about.PatientBirthDate, about.SeriesDescription, about.WindowCenterWidthExplanation = "19310101", mark, mark
    about.add_new(0x00090010, "LO", mark)
    inner = Dataset()
    inner.PatientName = inner.PatientID = mark
    about.OtherPatientIDsSequence = [inner]
    array = values if isinstance(values, np.ndarray) else np.zeros((2, 2), np.uint8)
    about.Rows, about.Columns = array.shape[:2]
    about.SamplesPerPixel = 3 if array.ndim == 3 else 1
    about.PhotometricInterpretation = "RGB" if array.ndim == 3 else "MONOCHROME2"
    if array.ndim == 3:
        about.PlanarConfiguration = 0
    about.BitsAllocated = array.itemsize * 8
    about.BitsStored = 12 if array.itemsize == 2 else array.itemsize * 8
    about.HighBit = about.BitsStored - 1
    about.PixelRepresentation = int(np.issubdtype(array.dtype, np.signedinteger))
    about.PixelData = values if isinstance(values, bytes) else array.astype(
        array.dtype.newbyteorder(">" if syntax == BIG else "<")).tobytes()  # fmt: skip
    about["PixelData"].VR = "OW" if array.itemsize > 1 and syntax != JPEG else "OB"
    about["PixelData"].is_undefined_length = syntax in (RLE, JPEG, JPEG_2000)
    for name, value in changes.items():
        if value is None:
            del about[name]
        else:
            setattr(about, name, value)
        if name == "BitsStored":
            about.HighBit = about.BitsStored - 1
    about.file_meta = FileMetaDataset()
    about.file_meta.TransferSyntaxUID = UID(syntax)
    about.save_as(out, enforce_file_format=False, implicit_vr=syntax == IMPLICIT, little_endian=syntax != BIG)
    content = out.getvalue()
    return content if content[128:132] == b"DICM" else b"\0" * 128 + b"DICM" + content


def photo() -> tuple[bytes, np.ndarray]:
    picture, out = Image.new("RGB", (16, 16), (200, 40, 90)), io.BytesIO()
    picture.save(out, "JPEG", quality=95, subsampling=0)
    return encapsulate([out.getvalue()]), np.asarray(Image.open(io.BytesIO(out.getvalue())).convert("RGB"))


def as_rle(array: np.ndarray) -> bytes:
    frame = RLELosslessEncoder.encode(
        array, rows=2, columns=2, samples_per_pixel=1, bits_allocated=16, bits_stored=12, pixel_representation=0,
        number_of_frames=1, photometric_interpretation="MONOCHROME2", encoding_plugin="pydicom",
    )  # fmt: skip
    return encapsulate([frame])


SCALED = "grey from 0 to 4095 scaled to 8 bits"
SIGNED = (RAMP - 2048).astype(np.int16)
TWELVE = RAMP.astype(np.uint16)
KINDS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "8 bits": (dicom(GREY.astype(np.uint8)), ()),
    "12 bits in 16": (dicom(), (SCALED,)),
    "implicit VR": (dicom(syntax=IMPLICIT), (SCALED,)),
    "big endian": (dicom(syntax=BIG), (SCALED,)),
    "RLE": (dicom(as_rle(TWELVE), RLE, BitsAllocated=16, BitsStored=12), (SCALED,)),
    "rescaled": (
        dicom(RescaleSlope="2", RescaleIntercept="-1024"),
        ("grey from -1024 to 7166 scaled to 8 bits",),
    ),
    "a negative slope": (
        dicom((4095 - RAMP).astype(np.uint16), RescaleSlope="-1", RescaleIntercept="0"),
        ("grey from -4095 to 0 scaled to 8 bits",),
    ),
    "signed": (dicom(SIGNED), ("grey from -2048 to 2047 scaled to 8 bits",)),
    "signed, high bits empty": (
        dicom((SIGNED.view(np.uint16) & 0x0FFF).view(np.int16)),
        ("grey from -2048 to 2047 scaled to 8 bits",),
    ),
    "an overlay in the high bits": (dicom((RAMP + 0xF000).astype(np.uint16)), (SCALED,)),
    "17 bits in 32": (
        dicom(np.array([[0, 43690], [87381, 131071]], np.uint32), BitsStored=17),
        ("grey from 0 to 131071 scaled to 8 bits",),
    ),
    "MONOCHROME1": (
        dicom((4095 - RAMP).astype(np.uint16), PhotometricInterpretation="MONOCHROME1"),
        (SCALED, "inverted, because 0 is white"),
    ),
    "frames": (
        dicom(np.concatenate([TWELVE, TWELVE // 3]), Rows=2, NumberOfFrames="2"),
        (SCALED, "first of several frames"),
    ),
    "a window": (
        dicom(RescaleIntercept="-100", WindowCenter="128", WindowWidth="256",
              values=np.array([[0, 185], [270, 4000]], np.uint16)),
        ("grey by the window in the file",),
    ),
    "the first of two windows": (
        dicom(WindowCenter=["128", "9"], WindowWidth=["256", "9"], values=np.array([[0, 85], [170, 999]], np.uint16)),
        ("grey by the first window in the file",),
    ),
    "an empty second window": (
        dicom(WindowCenter=["128", "9"], WindowWidth=["256", "0"], values=np.array([[0, 85], [170, 999]], np.uint16)),
        ("grey by the first window in the file",),
    ),
    "RGB": (dicom(np.dstack([GREY] * 3).astype(np.uint8)), ()),
    "RGB by planes": (
        dicom(np.dstack([GREY] * 3).astype(np.uint8).transpose(2, 0, 1).copy().reshape(2, 2, 3),
              PlanarConfiguration=1),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_has_its_values_and_says_its_conversion(name):
    check_decoded(*KINDS[name], GREY)


def by_the_standard(x: float, c: float, w: float, function: str) -> float:
    """PS3.3 C.11.2.1.2 and C.11.2.1.3, for the output range 0 to 1, as it is written there."""
    if function == "SIGMOID":
        return 1 / (1 + math.exp(min(-4 * (x - c) / w, 700)))
    if function == "LINEAR_EXACT":
        return 0 if x <= c - w / 2 else 1 if x > c + w / 2 else (x - c) / w + 0.5
    if x <= c - 0.5 - (w - 1) / 2:
        return 0
    return 1 if x > c - 0.5 + (w - 1) / 2 else (x - (c - 0.5)) / (w - 1) + 0.5


@pytest.mark.parametrize("function", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize(("center", "width"), [(40, 400), (-600, 1500), (30.5, 2), (0, 1)])
def test_a_window_is_that_of_the_standard(function, center, width):
    stored = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    more = {"VOILUTFunction": function} if function else {}
    data = dicom(stored, RescaleIntercept="-1024", WindowCenter=str(center), WindowWidth=str(width), **more)
    wanted = [255 * by_the_standard(x - 1024, center, width, function or "LINEAR") for x in range(4096)]
    assert np.abs(np.asarray(decode_image(data, "x", "L")).ravel() - np.array(wanted)).max() <= 0.5 + 1e-9


def test_a_stated_window_replaces_the_files_own():
    data = dicom(RescaleIntercept="-1024", WindowCenter="1", WindowWidth="2", PhotometricInterpretation="MONOCHROME1")
    window = parse({"task.image-window": "-1024, 341"}).task.gray_window
    assert image_conversions(data, "x", window)[0] == "grey window from -1024 to 341 to 8 bits"
    assert np.array_equal(np.asarray(decode_image(data, "x", "L", window)), [[255, 0], [0, 0]])


def test_colors_of_a_jpeg_are_rgb():
    data, wanted = photo()
    for photometric in ("YBR_FULL_422", "YBR_FULL"):
        file = dicom(data, JPEG, Rows=16, Columns=16, SamplesPerPixel=3, PlanarConfiguration=0,
                     PhotometricInterpretation=photometric)  # fmt: skip
        assert image_conversions(file, "x") == (f"{photometric} to RGB",)
        assert np.abs(np.asarray(decode_image(file, "x")).astype(int) - wanted).max() <= 2


def marked_jpeg(transform: int | None, jfif: bool, stored: str = "YCbCr") -> tuple[bytes, np.ndarray]:
    """A JPEG of one color, with or without the two markers, and that color; `stored` as RGB or as YCbCr."""
    out = io.BytesIO()
    picture = Image.new("RGB", (16, 16), (200, 40, 90))
    picture.save(out, "JPEG", quality=95, subsampling=0, keep_rgb=stored == "RGB")
    content = out.getvalue()
    body = content[2:]
    while body[:2] in (b"\xff\xe0", b"\xff\xee"):  # the markers that Pillow writes
        body = body[2 + int.from_bytes(body[2:4]) :]
    markers = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0" if jfif else b""
    if transform is not None:
        markers += b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
    return encapsulate([content[:2] + markers + body]), np.asarray(picture)


def jpeg_file(data: bytes, photometric: str) -> bytes:
    return dicom(data, JPEG, Rows=16, Columns=16, SamplesPerPixel=3, PlanarConfiguration=0,
                 PhotometricInterpretation=photometric)  # fmt: skip


@pytest.mark.parametrize("photometric", ["YBR_FULL_422", "YBR_FULL", "RGB"])
@pytest.mark.parametrize(("transform", "jfif"), [(1, False), (1, True), (None, True)])
def test_colors_of_a_jpeg_are_converted_once(photometric, transform, jfif):
    data, wanted = marked_jpeg(transform, jfif)
    found = np.asarray(decode_image(jpeg_file(data, photometric), "x")).astype(int)
    assert np.abs(found - wanted).max() <= 2


@pytest.mark.parametrize(("transform", "photometric"), [(0, "RGB"), (None, "RGB"), (0, "YBR_FULL")])
def test_colors_of_a_jpeg_that_is_stored_as_rgb_are_not_converted(transform, photometric):
    data, wanted = marked_jpeg(transform, jfif=False, stored="RGB")
    found = np.asarray(decode_image(jpeg_file(data, photometric), "x")).astype(int)
    assert np.abs(found - wanted).max() <= 2


def test_luma_and_chroma_are_rgb():
    gray = np.dstack([GREY, np.full((2, 2), 128), np.full((2, 2), 128)]).astype(np.uint8)
    file = dicom(gray, PhotometricInterpretation="YBR_FULL")
    assert image_conversions(file, "x") == ("YBR_FULL to RGB",)
    assert np.array_equal(np.asarray(decode_image(file, "x")), np.dstack([GREY] * 3))


def gray_jpeg() -> bytes:
    out = io.BytesIO()
    Image.new("L", (16, 16), 90).save(out, "JPEG")
    return encapsulate([out.getvalue()])


def two_syntaxes() -> bytes:
    """A deflated file of which a reader of the first element sees an uncompressed one."""
    syntax = b"\x02\0\x10\0UI" + len(DEFLATED).to_bytes(2, "little") + DEFLATED.encode()
    content = dicom()
    at = content.index(b"\x02\0\x10\0UI")
    end = at + 8 + int.from_bytes(content[at + 6 : at + 8], "little")
    packer = zlib.compressobj(wbits=-15)
    return content[:end] + syntax + packer.compress(content[end:]) + packer.flush()


def table() -> list[Dataset]:
    return [Dataset()]


REFUSED: dict[str, tuple[bytes, str]] = {
    "JPEG 2000": (dicom(encapsulate([b"x" * 8]), JPEG_2000),
                  '"JPEG 2000 Image Compression (Lossless Only)"; convert it to Explicit VR Little Endian'),
    "deflated": (dicom(syntax=DEFLATED), 'found the transfer syntax "Deflated Explicit VR Little Endian"'),
    "an unknown syntax": (dicom().replace(EXPLICIT.encode() + b"\0", b"1.2.840.99999.12.00"), "an unknown one"),
    "no syntax": (b"\0" * 128 + b"DICM", "an unknown one"),
    "no pixels": (dicom(PixelData=None), "it has no pixel data"),
    "no rows": (dicom(Rows=None), "it has no image with rows"),
    "no frame": (dicom(NumberOfFrames="0"), "it has no image with rows"),
    "a bomb": (dicom(Rows=65535, Columns=65535), "it has more than"),
    "a palette": (dicom(PhotometricInterpretation="PALETTE COLOR"), "found the colors PALETTE COLOR; export it as PNG"),
    "other colors": (dicom(PhotometricInterpretation=MARK.upper()), "found the colors an unknown kind"),
    "samples": (dicom(SamplesPerPixel=3), "samples per pixel"),
    "bits": (dicom(BitsAllocated=1, BitsStored=1), "expected gray with 8, 16 or 32 bits"),
    "colors of 16 bits": (dicom(np.zeros((2, 2, 3), np.uint16)), "or colors with 8"),
    "high bit": (dicom(HighBit=15), "do not end at the lowest bit"),
    "planes": (dicom(PlanarConfiguration=2), "planar configuration"),
    "a slope of zero": (dicom(RescaleSlope="0"), "its rescale slope is 0"),
    "two slopes": (dicom(RescaleSlope=["1", "2"]), "expected one number in its attribute RescaleSlope"),
    "a width for each": (dicom(WindowCenter=["1", "2"], WindowWidth="2"), "a window width for each"),
    "an empty range": (dicom(np.zeros((2, 2), np.int8), BitsStored=1, RescaleSlope="1e-300", RescaleIntercept="9"),
                       "its rescale slope is too small"),
    "no sign": (dicom(PixelRepresentation=None), "whether its values are signed"),
    "many gray pixels": (dicom(Rows=8192, Columns=4097), "more than 33,554,432 gray pixels"),
    "a narrow window": (dicom(WindowCenter="1", WindowWidth="0"), "its window is too small; set task.image-window"),
    "a function": (dicom(WindowCenter="1", WindowWidth="9", VOILUTFunction=MARK.upper()), "function of its window"),
    "modality table": (dicom(ModalityLUTSequence=table()), "Modality LUT"),
    "window table": (dicom(VOILUTSequence=table()), "VOI LUT"),
    "enhanced": (dicom(SharedFunctionalGroupsSequence=table()), "given per frame"),
    "cut off": (dicom()[:-3], "cut off"),
    "fewer frames": (dicom(NumberOfFrames="3"), "cut off"),
    "a number that is none": (dicom(RescaleSlope="12345678").replace(b"12345678", b"Quen1234"), "damaged"),
    "an infinite number": (dicom(RescaleSlope="12345678").replace(b"12345678", b"inf     "),
                           "RescaleSlope is not a number up to 1e+15"),
    "no JPEG": (dicom(encapsulate([MARK.encode() * 9]), JPEG), "damaged"),
    "no RLE": (dicom(encapsulate([MARK.encode() * 20]), RLE), "damaged"),
    "another size": (dicom(photo()[0], JPEG, Rows=4, Columns=64, SamplesPerPixel=3, PlanarConfiguration=0,
                           PhotometricInterpretation="YBR_FULL"), "do not have the size"),
    "an Adobe marker for RGB": (jpeg_file(marked_jpeg(0, jfif=False)[0], "YBR_FULL"), "contradict each other"),
    "two markers": (jpeg_file(marked_jpeg(0, jfif=True)[0], "RGB"), "contradict each other"),
    "an unknown Adobe marker": (jpeg_file(marked_jpeg(2, jfif=False)[0], "RGB"), "contradict each other"),
    "a gray JPEG": (jpeg_file(gray_jpeg(), "RGB"), "samples per pixel"),
    "two syntaxes": (two_syntaxes(), "more than one transfer syntax"),
    "another character set": (
        dicom(SpecificCharacterSet="ISO_IR 100", Rows=None).replace(b"ISO_IR 100", b"QUENDOLIN1"), "no image with rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_file_and_what_to_do_and_no_value(name, caplog, capfd, recwarn):
    data, said = REFUSED[name]
    with caplog.at_level(logging.DEBUG), pytest.raises(TaskError) as caught:
        assert image_conversions(data, "f.dcm") == decode_image(data, "f.dcm")
    text = str(caught.value)
    assert text.startswith("task.data: cannot decode the image in f.dcm: ")
    assert said in text
    assert caught.value.__cause__ is None
    everything = text + caplog.text + "".join(capfd.readouterr()) + "".join(str(w.message) for w in recwarn)
    assert MARK.lower() not in everything.lower().replace("quen1234", MARK.lower())


def test_every_cut_and_many_changed_files_give_an_image_or_one_error(caplog):
    """Also: a file whose header is whole, but whose pixels are cut, is never an image."""
    whole, draw, refusals = KINDS["a window"][0], np.random.default_rng(63), list[str]()
    with caplog.at_level(logging.DEBUG):
        for end in range(132, len(whole), 7):
            with pytest.raises(TaskError, match="image in row 7"):
                decode_image(whole[:end], "row 7")
        for _ in range(300):
            changed = bytearray(whole)
            for at in draw.integers(132, len(whole), 3):
                changed[at] = draw.integers(256)
            try:
                assert decode_image(bytes(changed), "row 7").mode == "RGB"
            except TaskError as error:
                refusals.append(str(error))
    assert 0 < len(refusals) < 300
    assert all("row 7" in text for text in refusals)
    assert not any(MARK in text for text in (*refusals, caplog.text))


def test_without_pydicom_the_message_says_how_to_install_it(monkeypatch):
    data = dicom()
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(TaskError, match=r"row 1: it is a DICOM file, .* pydicom; pip install 'fedveil\[dicom\]'$"):
        image_conversions(data, "row 1")


@pytest.mark.parametrize(
    ("text", "window"), [("", None), ("-1000,400", (-1000, 400)), ("0, 1", (0, 1)), ("1e3,2e3", (1000, 2000))]
)
def test_a_stated_window_is_two_numbers(text, window):
    assert parse({"task.image-window": text}).task.gray_window == window


@pytest.mark.parametrize("text", ["1", "1,2,3", "2,1", "1,1", "a,b", "nan,1", "0,inf", "-1e308,1e308", "0,2e15"])
def test_another_window_is_refused(text):
    with pytest.raises(ConfigError, match=r"task\.image-window"):
        parse({"task.image-window": text})


def test_a_window_may_have_the_numbers_that_a_file_may_have():
    assert parse({"task.image-window": f"{-gray_values.LARGEST},{gray_values.LARGEST}"}).task.gray_window


def test_an_empty_range_is_refused_rather_than_black():
    with pytest.raises(gray_values.RangeError, match="range is empty"):
        gray_values.apply_range(np.array([[9.0]]), 9, 9)


def test_the_identifiers_are_in_the_files():
    """The control: every file that is searched has the mark where a careless reader would meet it."""
    makers: list[Callable[[], bytes]] = [dicom, lambda: dicom(PatientID=f"{MARK} 8")]
    assert all(make().count(MARK.encode()) >= 6 for make in makers)
