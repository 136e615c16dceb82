"""Read the rows of an Excel workbook (.xlsx) with the package openpyxl (the extra "excel"). All values become text.

| in the workbook | in the row |
|---|---|
| text | the same text; an escape such as _x000D_ becomes its character. In shared texts, openpyxl removes x005F_, which
  escapes an escape, so there even an _x000D_ that is meant literally becomes the character |
| a number | as stored, not as displayed: 0.5 for 50 %; 7 for 7.0 |
| a date; a date with time; a time; a duration | 2024-05-31; 2024-05-31 13:45:00; 13:45:00; 26:30:00, -0:30:00 |
| TRUE, FALSE | true, false |
| a formula | its stored result; refused if the file has none |
| an error, such as #N/A; merged cells | refused |
| an empty cell; an empty row | an empty text, as in CSV; skipped, as in CSV |
| hidden rows, columns and sheets | read like the others |
| rows in several sheets | refused |
| rows or columns that are repeated or out of order | refused |

The first row with a value names the columns. Sizes are bounded by what the archive declares, which `zipfile` enforces,
and while reading.
"""

from __future__ import annotations

import datetime
import re
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from fedveil.data.quiet_packages import quiet_package
from fedveil.data.row_values import as_text
from fedveil.errors import TaskError

__all__ = ["EXCEL_SUFFIX", "HOW_EXCEL_IS_READ", "iter_excel_rows"]

EXCEL_SUFFIX = ".xlsx"
HOW_EXCEL_IS_READ = "read as Excel, values as stored rather than as displayed"
MAX_UNPACKED = 1 << 30  # bytes of all parts of a workbook
MAX_PART = 1 << 28  # bytes of a part that is not a sheet, such as the texts or a picture
MAX_OTHER = 1 << 24  # bytes of any other part, and of a sheet outside its rows; openpyxl turns them into objects
MAX_ROW = 1 << 22  # bytes of a row, which also becomes objects
MAX_CELLS = 100_000_000
_MOST_PARTS = 10_000
_MOST_ROWS, _MOST_COLUMNS = 1 << 20, 1 << 14  # Excel's own limits
_ENCRYPTED_OR_OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_SHEETS = re.compile(r"(^|/)(worksheets/[^/]*|sheet\d*)\.xml$")
_LARGE = re.compile(r"(^|/)sharedStrings\.xml$|^xl/(media|embeddings)/", re.IGNORECASE)
_MERGED = re.compile(rb"<(?:\w+:)?mergeCell[\s/>]")
_ROW, _TAG_START = re.compile(rb"row[\s/>]"), re.compile(rb"<(/?)(?:\w+:)?\Z")
_ESCAPE = re.compile(r"_x([0-9A-Fa-f]{4})_")
_NO_CODES = re.compile(r'"[^"]*"|\[[^\]]*\]|[\\_*].')  # the parts of a number format that are displayed literally
_PIECE = 1 << 20


def iter_excel_rows(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the only sheet that has any.

    Raises:
        TaskError: openpyxl is missing, or the table above says that the file is refused.
    """
    _require_openpyxl(file)
    try:
        _check_archive(file)
        yield from _rows(file)
    except TaskError:
        raise
    except Exception as error:  # openpyxl raises errors of many types for damaged files; their texts quote values
        reason = (isinstance(error, OSError) and error.strerror) or "it is damaged or in a different format"
        raise TaskError(f'task.data: cannot read "{file}" as Excel: {reason}; save it again as .xlsx') from None


def _require_openpyxl(file: Path) -> None:
    """Check that openpyxl is installed, and keep its warnings, which may quote a value, from the log."""
    try:
        import openpyxl  # noqa: F401
    except ImportError:
        raise TaskError(
            f"task.data: cannot read \"{file}\": Excel files need the package openpyxl; pip install 'fedveil[excel]', "
            "or save the table as CSV"
        ) from None
    quiet_package("openpyxl")


def _check_archive(file: Path) -> None:
    """Raise TaskError for an archive that is too large or encrypted, or a sheet with merged cells."""
    with file.open("rb") as opened:
        if opened.read(len(_ENCRYPTED_OR_OLD)) == _ENCRYPTED_OR_OLD:
            raise TaskError(
                f'task.data: cannot read "{file}": it is encrypted, or an .xls file with a different extension; '
                "save it as .xlsx without a password"
            )
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for part in parts):
            raise TaskError(
                f'task.data: cannot read "{file}" as Excel: Excel does not use its kind of compression; save it '
                "again as .xlsx"
            )
        sizes = {part.filename: part.file_size for part in parts}
        held = {name: size for name, size in sizes.items() if not _SHEETS.search(name)}
        if (
            len(parts) > _MOST_PARTS
            or sum(sizes.values()) > MAX_UNPACKED
            or any(size > (MAX_PART if _LARGE.search(name) else MAX_OTHER) for name, size in held.items())
        ):
            raise TaskError(
                f'task.data: "{file}" is too large: at most {MAX_UNPACKED:,} bytes unpacked, {MAX_PART:,} of '
                f"texts, and {MAX_OTHER:,} in any part other than sheets are allowed; save the table as CSV, or "
                "divide it"
            )
        for name in sizes:
            if _SHEETS.search(name):
                with archive.open(name) as part:
                    _check_sheet(file, part)


def _check_sheet(file: Path, part: IO[bytes] | Any) -> None:
    """Raise TaskError for a sheet with merged cells, a long row, or too much content outside its rows."""
    rest, is_row, in_row, beside, is_start = b"", False, 0, 0, True
    while piece := part.read(_PIECE):
        text = rest + piece
        if is_start and b"\0" in text[:64]:
            raise zipfile.BadZipFile  # UTF-16, in which the search would miss merged cells
        if b"<!" in text or text.find(b"<?", 8 if is_start else 0) >= 0:
            raise zipfile.BadZipFile  # a comment or similar, in which tags do not count
        end, last, is_start = text.rfind(b">") + 1, 0, False
        if b"mergeCell" in text and _MERGED.search(text, 0, end):
            raise TaskError(f'task.data: "{file}" has merged cells, of which all but the first are empty; unmerge them')
        for at, opens in (*_row_tags(text, end), (end, None)):
            size = at - last
            in_row, beside = (in_row + size, beside) if is_row else (0, beside + size)
            if max(in_row, len(text) - end) > MAX_ROW or beside > MAX_OTHER:
                raise TaskError(
                    f'task.data: a row of "{file}" has more than {MAX_ROW:,} bytes, or a sheet has more than '
                    f"{MAX_OTHER:,} bytes outside its rows; save the table as CSV"
                )
            if opens is not None:
                last, is_row, in_row = at, opens, 0
        rest = text[end:]


def _row_tags(text: bytes, end: int) -> Iterator[tuple[int, bool]]:
    """Yield the position of each row tag in `text[:end]`, and whether the row's content follows the tag."""
    for found in _ROW.finditer(text, 0, end):
        if start := _TAG_START.search(text, max(0, found.start() - 64), found.start()):
            close = text.find(b">", found.end() - 1)
            yield start.start(), not start[1] and text[close - 1 : close] != b"/"


def _rows(file: Path) -> Iterator[dict[str, str]]:
    from openpyxl import load_workbook

    book = load_workbook(file, read_only=True, data_only=True, keep_links=False)
    try:
        if not all(_SHEETS.search(sheet._worksheet_path) for sheet in book.worksheets):
            raise TaskError(f'task.data: "{file}" has a sheet outside its part "worksheets"; save it again with Excel')
        filled = [at for at, sheet in enumerate(book.worksheets) if next(_records(file, sheet), None)]
        if len(filled) > 1:
            numbers = " and ".join(str(at + 1) for at in filled[:4])
            raise TaskError(
                f'task.data: several sheets of "{file}" have rows ({numbers}); save each sheet as a separate file'
            )
        for at in filled:
            yield from _named_rows(file, _records(file, book.worksheets[at]))
    finally:
        book.close()


def _named_rows(file: Path, records: Iterator[tuple[int, list[str]]]) -> Iterator[dict[str, str]]:
    _, names = next(records)
    if not all(names) or len(set(names)) < len(names):
        raise TaskError(f'task.data: the first row of "{file}" has an empty or repeated column name; correct it')
    for number, record in records:
        if len(record) > len(names):
            raise TaskError(
                f'task.data: expected {len(names)} values in row {number} of the sheet in "{file}", as in its '
                f"first row, found {len(record)}; name every column, and put no text above or next to the table"
            )
        yield dict(zip(names, record + [""] * (len(names) - len(record)), strict=True))


def _records(file: Path, sheet: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the texts of each nonempty row, without the empty cells at its end.

    Raises:
        TaskError: a cell has an error or a formula without a result, there are too many rows, columns or cells, or
            they are not in order.
    """
    from openpyxl.cell.read_only import ReadOnlyCell

    count, last_row = 0, 0
    for at, cells in _parsed_rows(sheet):
        columns = [cell["column"] for cell in cells]
        width = max(columns, default=0)
        count += width
        if at > _MOST_ROWS or width > _MOST_COLUMNS or count > MAX_CELLS:
            raise TaskError(
                f'task.data: "{file}" has more than {_MOST_ROWS:,} rows, {_MOST_COLUMNS:,} columns or '
                f"{MAX_CELLS:,} cells; save the table as CSV"
            )
        is_ordered = all(left < right for left, right in pairwise([0, *columns]))
        if at <= last_row or not is_ordered or any(cell["row"] != at for cell in cells):
            raise TaskError(
                f'task.data: rows or columns in the sheet in "{file}" are repeated or out of order; save the file '
                "with Excel"
            )
        last_row, texts = at, [""] * width
        for cell in cells:
            kind, is_formula = cell["data_type"], cell.pop("is_formula")
            if kind == "e" or (is_formula and cell["value"] is None and kind != "str"):
                found = "an error" if kind == "e" else "a formula without a stored result"
                raise TaskError(
                    f'task.data: expected a value in column {cell["column"]}, row {at} of the sheet in "{file}", '
                    f"found {found}; replace it with its value, or save the file with Excel"
                )
            texts[cell["column"] - 1] = _text_of(ReadOnlyCell(sheet, **cell))
        while texts and not texts[-1]:
            texts.pop()
        if texts:
            yield at, texts


def _parsed_rows(sheet: Any) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each row's number and cells, as they are in the file, with the stored results of formulas.

    openpyxl's own row iterator omits a row or cell that is out of order, and does not tell which cells are formulas.
    """
    from openpyxl.worksheet._reader import FORMULA_TAG, WorkSheetParser

    book = sheet.parent
    with sheet._get_source() as source:
        parser: Any = WorkSheetParser(
            source, sheet._shared_strings, data_only=True, epoch=book.epoch, date_formats=book._date_formats,
            timedelta_formats=book._timedelta_formats,
        )  # fmt: skip
        parse_cell = parser.parse_cell
        parser.parse_cell = lambda cell: {**parse_cell(cell), "is_formula": cell.find(FORMULA_TAG) is not None}
        yield from parser.parse()


def _text_of(cell: Any) -> str:
    """Return a cell's value as text; see the table above."""
    value = cell.value
    match value:
        case None:
            return ""
        case str():
            return _unescape(value)
        case float() if value.is_integer() and abs(value) <= 2**53:
            return str(int(value))
        case datetime.datetime() if value.time() == datetime.time():
            codes = _NO_CODES.sub("", str(cell.number_format)).lower()
            return value.isoformat(" ") if "h" in codes else value.date().isoformat()
        case datetime.timedelta():
            minutes, rest = divmod(abs(value), datetime.timedelta(minutes=1))
            fraction = f".{rest.microseconds:06}".rstrip("0") if rest.microseconds else ""
            sign = "-" if value < datetime.timedelta() else ""
            return f"{sign}{minutes // 60}:{minutes % 60:02}:{rest.seconds:02}{fraction}"
    return as_text(value) or ""


def _unescape(text: str) -> str:
    """Replace the escapes (ST_Xstring) in a text by their characters.

    Raises ValueError for half of a surrogate pair.
    """
    found = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)
    return found if found == text else found.encode("utf-16", "surrogatepass").decode("utf-16")
