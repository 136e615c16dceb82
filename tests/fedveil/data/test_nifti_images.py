"""Generated NIfTI files: the slice, its values, and refusals that quote no content."""

from __future__ import annotations

import gzip
import logging
import sys

import nibabel
import numpy as np
import pytest

from fedveil.data import nifti_images
from fedveil.data.image_decoding import decode_image, image_conversions
from fedveil.errors import TaskError

MARK = "Quendolin"
GREY = np.array([[0, 85], [170, 255]])
OWN = "grey by the window in the file"
MIDDLE = "middle one of several slices"


def nifti(
    picture: np.ndarray, slope: float = 1, inter: float = 0, window: tuple[float, float] | None = None, kind: int = 1,
    order: str = "<",
) -> bytes:  # fmt: skip
    """A file with `picture`, (rows, columns) or (rows, columns, slices), whose texts name the patient."""
    make, header = ((nibabel.Nifti1Image, nibabel.Nifti1Header), (nibabel.Nifti2Image, nibabel.Nifti2Header))[kind - 1]
    about = header(endianness=order)
    about["descrip"], about["aux_file"], about["intent_name"] = f"{MARK} has", MARK, MARK
    if window:
        about["cal_min"], about["cal_max"] = window
    image = make(picture.swapaxes(0, 1), np.eye(4), about, dtype=picture.dtype)
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", f"{MARK} has diabetes".encode()))
    content = bytearray(image.to_bytes())
    fields = nibabel.Nifti1Header if kind == 1 else nibabel.Nifti2Header
    size = fields().sizeof_hdr
    changed = fields(bytes(content[:size]), check=False)
    changed["scl_slope"], changed["scl_inter"] = slope, inter
    content[:size] = changed.binaryblock
    return bytes(content)


def with_bytes(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


STORED = (GREY // 5).astype(np.int16)  # 0, 17, 34, 51
VOLUME = np.dstack([STORED * 0, STORED * 2, STORED, STORED * 3]).astype(np.int16)  # the middle one has the index 2
KINDS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "8 bits": (nifti(GREY.astype(np.uint8)), ()),
    "a window": (nifti(STORED, window=(0, 51)), (OWN,)),
    "rescaled": (nifti(STORED, 2, -10, window=(-10, 92)), (OWN,)),
    "no slope": (nifti(STORED, 0, 7, window=(0, 51)), (OWN,)),
    "a volume": (nifti(VOLUME, window=(0, 51)), (OWN, MIDDLE)),
    "a volume of one slice": (nifti(STORED[:, :, None], window=(0, 51)), (OWN,)),
    "floats": (nifti(STORED.astype(np.float32) / 51, window=(0, 1)), (OWN,)),
    "gzipped": (gzip.compress(nifti(VOLUME, window=(0, 51))), (OWN, MIDDLE)),
    "NIfTI-2": (nifti(VOLUME, window=(0, 51), kind=2), (OWN, MIDDLE)),
    "big endian": (nifti(STORED, window=(0, 51), order=">"), (OWN,)),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_has_its_values_and_says_its_conversion(name):
    data, said = KINDS[name]
    assert MARK.encode() in (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    assert image_conversions(data, "x") == said
    for mode, wanted in (("RGB", np.dstack([GREY] * 3)), ("L", GREY)):
        picture = decode_image(data, "x", mode)
        assert picture.mode == mode
        assert np.array_equal(np.asarray(picture).astype(int), wanted)


def test_a_stated_window_replaces_the_files_own():
    data = nifti(STORED, 2, -10, window=(0, 1))
    assert image_conversions(data, "x", (-10.0, 41.0)) == ("grey window from -10 to 41 to 8 bits",)
    assert np.array_equal(np.asarray(decode_image(data, "x", "L", (-10.0, 41.0))), [[0, 170], [255, 255]])


PLAIN = nifti(STORED, window=(0, 51))
REFUSED: dict[str, tuple[bytes, str]] = {
    "no range": (nifti(STORED), "it declares no range of its values .*; set task.image-window"),
    "no range of 8 bits": (nifti(GREY.astype(np.uint8), 2, 0), "it declares no range"),
    "several volumes": (nifti(np.zeros((2, 2, 1, 2), np.int16)), "another number of axes"),
    "one axis": (with_bytes(PLAIN, 40, b"\1\0"), "another number of axes"),
    "no size": (with_bytes(PLAIN, 42, b"\0\0"), "another number of axes"),
    "colors": (with_bytes(PLAIN, 70, b"\x80\0"), "found another type"),
    "complex": (with_bytes(PLAIN, 70, b"\x20\0"), "found another type"),
    "an unknown type": (with_bytes(PLAIN, 70, b"\x03\0"), "an unknown type"),
    "a bomb": (gzip.compress(with_bytes(PLAIN, 42, b"\xff\x7f\xff\x7f")), "it has more than"),
    "many gray pixels": (with_bytes(PLAIN, 42, b"\0\x20\1\x10"), "more than 33,554,432 gray pixels"),
    "a large volume": (with_bytes(PLAIN, 40, b"\3\0\0\x10\0\x10\xff\x1f"), "more than 2,147,483,648 bytes"),
    "a slope": (nifti(STORED, 1e30, 0, window=(0, 1)), "too large"),
    "no number": (nifti(np.full((2, 2), np.nan, np.float32), window=(0, 1)), "not finite"),
    "cut off": (PLAIN[:-1], "damaged or cut off"),
    "a slice is missing": (nifti(VOLUME, window=(0, 51))[:-1], "damaged or cut off"),
    "cut gzip": (gzip.compress(PLAIN)[:-20], "damaged or cut off|format is unknown"),
    "no gzip": (b"\x1f\x8b" + MARK.encode() * 9, "format is unknown"),
    "two files": (with_bytes(PLAIN, 344, b"ni1"), "in another file"),
    "an offset": (with_bytes(PLAIN, 108, b"\0\0\0\0"), "damaged or cut off"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_file_and_no_value(name, caplog, capfd, recwarn):
    data, said = REFUSED[name]
    with caplog.at_level(logging.DEBUG), pytest.raises(TaskError, match=said) as caught:
        assert image_conversions(data, "f.nii") == decode_image(data, "f.nii")
    text = str(caught.value)
    assert text.startswith("task.data: cannot ")
    assert "the image in f.nii: " in text
    assert caught.value.__cause__ is None
    everything = text + caplog.text + "".join(capfd.readouterr()) + "".join(str(w.message) for w in recwarn)
    assert MARK not in everything


def test_a_gzipped_file_is_inflated_no_further_than_its_header_says(monkeypatch):
    """A hundred megabytes behind a picture of eight bytes are never inflated."""
    bomb = gzip.compress(PLAIN) + gzip.compress(bytes(100 << 20), 1)
    read: list[int] = []
    whole = gzip.GzipFile.read

    def counted(self, size=-1):
        data = whole(self, size)
        read.append(len(data))
        return data

    monkeypatch.setattr(nifti_images.gzip.GzipFile, "read", counted)
    assert np.array_equal(np.asarray(decode_image(bomb, "x", "L")), GREY)
    assert sum(read) < 10_000


def test_without_nibabel_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(TaskError, match=r"row 1: it is a NIfTI file, .* nibabel; pip install 'fedveil\[nifti\]'$"):
        image_conversions(PLAIN, "row 1")
