"""Excel workbooks made here: their rows beside the same table as CSV, and their refusals."""

from __future__ import annotations

import datetime
import io
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from openpyxl import Workbook

from fedveil.data import excel_files
from fedveil.data.row_files import RowFile
from fedveil.errors import TaskError

MARK = "Quendolin"
FORMULA = re.compile(rb"<c r=\"(\w+)\"[^>]*><f>")


def workbook(*rows: tuple[object, ...], formats: dict[str, str] | None = None, more: int = 0) -> bytes:
    """A workbook with these rows, and `more` empty sheets before them."""
    book, out = Workbook(), io.BytesIO()
    for _ in range(more):
        book.create_sheet(index=0)
    for row in rows:
        book.worksheets[-1].append(row)
    for cell, form in (formats or {}).items():
        book.worksheets[-1][cell].number_format = form
    book.save(out)
    return out.getvalue()


def changed(content: bytes, change: Callable[[bytes], bytes], part: str = "xl/worksheets/sheet1.xml") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name == part else old.read(name))
    return out.getvalue()


def with_result(content: bytes, result: bytes) -> bytes:
    """The workbook as Excel would save it: its formula has a result."""
    return changed(content, lambda xml: xml.replace(b"<v />", result).replace(b"<v></v>", result))


def rows_of(folder: Path, content: bytes) -> list[dict[str, str]]:
    (folder / "train.xlsx").write_bytes(content)
    return list(RowFile(folder / "train.xlsx"))


DAY = datetime.datetime(2024, 5, 31)
VALUES: dict[str, tuple[object, str]] = {
    "text": ("a, b;\n\u00e9", "a, b;\n\u00e9"),
    "text of digits": ("007", "007"),
    "integer": (7, "7"),
    "integral float": (7.0, "7"),
    "fraction": (0.1, "0.1"),
    "tiny": (1e-07, "1e-07"),
    "long": (123456789012345, "123456789012345"),
    "true": (True, "true"),
    "date": (DAY.date(), "2024-05-31"),
    "date with time": (DAY.replace(hour=13, minute=45), "2024-05-31 13:45:00"),
    "midnight": (DAY, "2024-05-31 00:00:00"),
    "time": (datetime.time(13, 45), "13:45:00"),
    "duration": (datetime.timedelta(hours=26, minutes=30), "26:30:00"),
    "empty": (None, ""),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_the_text_that_stands_in_the_file(tmp_path, name):
    value, text = VALUES[name]
    assert rows_of(tmp_path, workbook(("mr", "ref"), (value, "b"))) == [{"mr": text, "ref": "b"}]


def test_a_number_is_as_stored_and_a_displayed_form_changes_nothing(tmp_path):
    content = workbook(("mr", "ref"), (0.5, 1234.5), formats={"A2": "0%", "B2": "#,##0.00"})
    assert rows_of(tmp_path, content) == [{"mr": "0.5", "ref": "1234.5"}]
    stored = changed(workbook(("mr", "ref"), (7, "b")), lambda xml: xml.replace(b"<v>7</v>", b"<v>7.0</v>"))
    assert rows_of(tmp_path, stored) == [{"mr": "7", "ref": "b"}]


def test_empty_rows_and_cells_and_empty_sheets_are_as_in_csv(tmp_path):
    content = workbook((), ("mr", "ref"), (), ("a",), (None, None), (None, "b"), more=2)
    assert rows_of(tmp_path, content) == [{"mr": "a", "ref": ""}, {"mr": "", "ref": "b"}]
    assert rows_of(tmp_path, workbook()) == []


def test_a_formula_has_its_stored_result(tmp_path):
    content = workbook(("mr", "ref"), ("a", "=1+1"))
    assert rows_of(tmp_path, with_result(content, b"<v>2</v>")) == [{"mr": "a", "ref": "2"}]
    empty = changed(content, lambda xml: FORMULA.sub(rb'<c r="\1" t="str"><f>', xml))  # a result that is empty text
    assert rows_of(tmp_path, empty) == [{"mr": "a", "ref": ""}]


def two_sheets() -> bytes:
    book, out = Workbook(), io.BytesIO()
    for name in ("one", MARK):
        sheet = book.create_sheet(name)
        sheet.append(("mr", "ref"))
        sheet.append((MARK, MARK))
    book.save(out)
    return out.getvalue()


def merged() -> bytes:
    book, out = Workbook(), io.BytesIO()
    for row in (("mr", "ref"), (MARK, MARK), (MARK, MARK)):
        book.active.append(row)
    book.active.merge_cells("A2:A3")
    book.save(out)
    return out.getvalue()


PLAIN = workbook(("mr", "ref"), (MARK, MARK))
REFUSED: dict[str, tuple[bytes, str]] = {
    "two sheets": (two_sheets(), "found rows in the sheets 2 and 3; save each sheet"),
    "merged": (merged(), "found some, of which all but the first are empty; unmerge them"),
    "a formula without its result": (
        workbook(("mr", "ref"), (MARK, f'="{MARK}"')),
        "found a formula without its result; replace",
    ),
    "an error": (workbook(("mr", "ref"), (MARK, "#N/A")), 'column 2, row 2 of the sheet in ".*", found an error'),
    "a name twice": (workbook(("mr", MARK, MARK), (MARK, MARK)), "a name twice"),
    "a column without a name": (workbook(("mr", None, "ref"), (MARK, MARK)), "found an empty name"),
    "a title": (workbook((MARK,), ("mr", "ref"), (MARK, MARK)), "expected 1 values in row 1 of .* put no text above"),
    "encrypted": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + MARK.encode() * 99, "it is encrypted, or an .xls file"),
    "no archive": (MARK.encode() * 99, "damaged or in a different format"),
    "cut": (PLAIN[:-99], "damaged or in a different format"),
    "no workbook": (changed(PLAIN, lambda xml: xml[:-9], "xl/workbook.xml"), "damaged"),
    "no sheet": (changed(PLAIN, lambda xml: xml.replace(b"</row>", b"")), "damaged"),
    "UTF-16": (changed(PLAIN, lambda xml: xml.decode().encode("utf-16")), "damaged"),
    "entities": (
        changed(PLAIN, lambda xml: b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc">]>' + xml.replace(b"B2", b"&a;")),
        "damaged",
    ),
    "a row far below": (changed(PLAIN, lambda xml: xml.replace(b'r="2"', b'r="999999999"')), "1,048,576 rows"),
    "a column far right": (changed(PLAIN, lambda xml: xml.replace(b'r="B2"', b'r="ZZZ2"')), "16,384 columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_file_and_no_value(tmp_path, name, capfd, caplog):
    content, said = REFUSED[name]
    with pytest.raises(TaskError, match=said) as caught:
        rows_of(tmp_path, content)
    assert str(tmp_path / "train.xlsx") in str(caught.value)
    assert str(caught.value).startswith("task.data: ")
    assert caught.value.__cause__ is None
    assert MARK not in str(caught.value) + caplog.text + "".join(capfd.readouterr())


def test_a_size_is_bounded_by_what_the_archive_declares(tmp_path, monkeypatch):
    bomb = changed(PLAIN, lambda xml: xml.replace(b"<sheetData>", b"<sheetData>" + b" " * (1 << 20)))
    assert len(bomb) < 1 << 15
    monkeypatch.setattr(excel_files, "MAX_UNPACKED", 1 << 19)
    with pytest.raises(TaskError, match="expected at most 524,288 bytes unpacked"):
        rows_of(tmp_path, bomb)
    monkeypatch.setattr(excel_files, "MAX_UNPACKED", 1 << 30)
    monkeypatch.setattr(excel_files, "MAX_PART", 1 << 8)
    with pytest.raises(TaskError, match="and 256 of its texts, found more"):
        rows_of(tmp_path, PLAIN)


def test_cells_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(excel_files, "MAX_CELLS", 3)
    with pytest.raises(TaskError, match="and 3 cells in"):
        rows_of(tmp_path, PLAIN)


def test_without_openpyxl_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(TaskError, match=r"need the package openpyxl; pip install 'fedveil\[excel\]', or save"):
        rows_of(tmp_path, PLAIN)
