"""Generated Excel workbooks: their rows compared with the same table as CSV, and refusals."""

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
NUMBER = re.compile(rb'<c r="A2"[^>]*><v>7</v></c>')
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
    "negative duration": (-datetime.timedelta(minutes=30), "-0:30:00"),
    "duration with a fraction": (datetime.timedelta(seconds=61.5), "0:01:01.5"),
    "large": (float(2**53), str(2**53)),
    "larger": (1e17, "1e+17"),
    "fraction of it": (1e300, "1e+300"),
    "escaped": ("a_x000D_b_x0009_", "a\rb\t"),
    "no escape": ("a_x00D_b", "a_x00D_b"),
    "escaped pair": ("_xD83D__xDE00_", "\U0001f600"),
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
    large = f"<v>{2**53}.0</v>".encode()
    stored = changed(workbook(("mr", "ref"), (7, "b")), lambda xml: xml.replace(b"<v>7</v>", large))
    assert rows_of(tmp_path, stored) == [{"mr": str(2**53), "ref": "b"}]


@pytest.mark.parametrize("shown", ["[$-de-CH]dd/mm/yyyy", 'yyyy"th"', r"yyyy\h", "dd/mm/yyyy;@"])
def test_a_letter_that_a_format_shows_makes_no_time_of_a_date(tmp_path, shown):
    content = workbook(("mr", "ref"), (DAY, "b"), formats={"A2": shown})
    assert rows_of(tmp_path, content) == [{"mr": "2024-05-31", "ref": "b"}]


def test_an_escape_is_its_character_in_every_kind_of_text(tmp_path):
    inline = b'<c r="A2" t="inlineStr"><is><t>a_x005F_x000D_b</t></is></c>'
    content = changed(workbook(("m_x000D_r", "ref"), (7, "b")), lambda xml: NUMBER.sub(inline, xml))
    assert rows_of(tmp_path, content) == [{"m\rr": "a_x000D_b", "ref": "b"}]


def test_an_escape_in_the_shared_texts_is_its_character(tmp_path):
    """Excel writes its texts so; openpyxl writes them into the cells."""
    kind, space = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml", b"spreadsheetml/2006"
    texts = b'<sst xmlns="http://schemas.openxmlformats.org/' + space + b'/main"><si><t>a_x000D_b</t></si></sst>'
    out = io.BytesIO()
    cell = b'<c r="A2" t="s"><v>0</v></c>'
    plain = changed(workbook(("mr",), (7,)), lambda xml: NUMBER.sub(cell, xml))
    with zipfile.ZipFile(io.BytesIO(plain)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            override = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kind}"/></Types>'.encode()
            new.writestr(name, old.read(name).replace(b"</Types>", override))
        new.writestr("xl/sharedStrings.xml", texts)
    assert rows_of(tmp_path, out.getvalue()) == [{"mr": "a\rb"}]


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
SHEET = "xl/worksheets/sheet1.xml"


def moved(content: bytes, path: str) -> bytes:
    """The workbook with its sheet in another part."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith((".rels", "[Content_Types].xml")):
                data = data.replace(SHEET.encode(), path.encode())
            new.writestr(path if name == SHEET else name, data)
    return out.getvalue()


def repacked(content: bytes, method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return out.getvalue()


def inside_rows(xml: bytes, more: bytes) -> bytes:
    return xml.replace(b"</row>", more + b"</row>", 1)


NO_ORDER = "are repeated or out of order"
REFUSED: dict[str, tuple[bytes, str]] = {
    "two sheets": (two_sheets(), "have rows \\(2 and 3\\); save each sheet"),
    "merged": (merged(), "has merged cells, of which all but the first are empty; unmerge them"),
    "a formula without a stored result": (
        workbook(("mr", "ref"), (MARK, f'="{MARK}"')),
        "found a formula without a stored result; replace",
    ),
    "an error": (workbook(("mr", "ref"), (MARK, "#N/A")), 'column 2, row 2 of the sheet in ".*", found an error'),
    "repeated column name": (workbook(("mr", MARK, MARK), (MARK, MARK)), "repeated column name"),
    "a column without a name": (workbook(("mr", None, "ref"), (MARK, MARK)), "empty or repeated column name"),
    "a title": (
        workbook((MARK,), (), ("mr", "ref"), (MARK, MARK)),
        "expected 1 values in row 3 of the sheet in .* put no text above",
    ),
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
    "a formula alone": (workbook((f'="{MARK}"',)), "found a formula without a stored result"),
    "a row twice": (changed(PLAIN, lambda xml: xml.replace(b'r="2"', b'r="1"')), NO_ORDER),
    "rows backwards": (changed(PLAIN, lambda xml: xml.replace(b'r="1"', b'r="3"')), NO_ORDER),
    "a column twice": (changed(PLAIN, lambda xml: xml.replace(b'r="B2"', b'r="A2"')), NO_ORDER),
    "columns backwards": (changed(PLAIN, lambda xml: xml.replace(b'r="A2"', b'r="C2"')), NO_ORDER),
    "a cell of another row": (changed(PLAIN, lambda xml: xml.replace(b'r="B2"', b'r="B7"')), NO_ORDER),
    "merged, in another part": (moved(merged(), "xl/one.bin"), 'a sheet outside its part "worksheets"'),
    "half an escape": (workbook(("mr", "ref"), (f"{MARK}_xD83D_", MARK)), "damaged"),
    "BZIP2": (repacked(PLAIN, zipfile.ZIP_BZIP2), "does not use its kind of compression"),
    "LZMA": (repacked(PLAIN, zipfile.ZIP_LZMA), "does not use its kind of compression"),
    "a comment": (changed(PLAIN, lambda xml: inside_rows(xml, b"<!--</row>-->")), "damaged"),
    "a long row": (changed(PLAIN, lambda xml: inside_rows(xml, b"<c/>" * (1 << 20))), "more than 4,194,304 bytes"),
    "much beside rows": (
        changed(PLAIN, lambda xml: xml.replace(b"</sheetData>", b"</sheetData>" + b"<a></a>" * 2_400_000)),
        "16,777,216 bytes outside its rows",
    ),
    "large styles": (changed(PLAIN, lambda xml: xml + b" " * (1 << 24), "xl/styles.xml"), "part other than sheets"),
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
    with pytest.raises(TaskError, match="at most 524,288 bytes unpacked"):
        rows_of(tmp_path, bomb)
    monkeypatch.setattr(excel_files, "MAX_UNPACKED", 1 << 30)
    monkeypatch.setattr(excel_files, "MAX_OTHER", 1 << 4)
    with pytest.raises(TaskError, match="and 16 in any part other than sheets"):
        rows_of(tmp_path, PLAIN)


def test_cells_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(excel_files, "MAX_CELLS", 3)
    with pytest.raises(TaskError, match="or 3 cells"):
        rows_of(tmp_path, PLAIN)


def test_without_openpyxl_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(TaskError, match=r"need the package openpyxl; pip install 'fedveil\[excel\]', or save"):
        rows_of(tmp_path, PLAIN)
