"""Folders and tables of DICOM files, as sites have them."""

from __future__ import annotations

import numpy as np

from fedveil.config import parse
from fedveil.console.doctor import data_checks
from fedveil.data import images
from fedveil.data.image_decoding import decode_image
from tests.fedveil.data.test_dicom_images import GREY, KINDS, SCALED, dicom


def write(path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


CLASSES = {"task.name": "image-classification", "task.class-names": "edema,normal", "task.target-column": "label"}


def test_folders_of_files_with_and_without_an_extension_are_read_and_counted(tmp_path):
    for at, name in enumerate(("a.dcm", "b.DCM", "IM000001", "1.2.840.113619.2.55")):
        write(tmp_path / "train" / "edema" / name, dicom())
        write(tmp_path / "train" / "normal" / f"{at}" / name, KINDS["a window"][0])
    write(tmp_path / "train" / "normal" / "README", b"no image")
    write(tmp_path / "train" / "normal" / "DICOMDIR", dicom())
    found = images.scan_class_folders(tmp_path / "train")
    assert len(found.images) == 8
    assert found.describe_unread() == "2 files were not read: no ending (2)"
    task = parse(CLASSES | {"task.data": str(tmp_path)}).task
    said = [check.text for check in data_checks.check_run_data(task, [])]
    assert any("8 of the first 8 images are converted: " in text and f"{SCALED} (4)" in text for text in said)
    assert any("grey by the window in the file (4)" in text for text in said)


def test_a_table_may_name_files_or_omit_their_extension(tmp_path):
    write(tmp_path / "scans" / "0001.dcm", dicom())
    (tmp_path / "train.csv").write_text("image,label\n0001,edema\n")
    table = images.image_table(tmp_path, "train", parse(CLASSES).task)
    (example,) = table.examples("train", None, parse(CLASSES))
    assert np.array_equal(np.asarray(decode_image(images.image_bytes(example, "image"), "x", "L")), GREY)
