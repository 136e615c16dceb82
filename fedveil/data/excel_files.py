"""Read the rows of an Excel workbook (.xlsx) with the package openpyxl (the extra "excel"). All values become text.

| in the workbook | in the row |
|---|---|
| text | the same |
| a number | as stored, not as displayed: 0.5 for 50 %; 7 for 7.0 |
| a date; a date with time; a time; a duration | 2024-05-31; 2024-05-31 13:45:00; 13:45:00; 26:30:00 |
| TRUE, FALSE | true, false |
| a formula | its stored result; refused without one |
| an error, such as #N/A; merged cells | refused |
| an empty cell; an empty row | an empty text, as in CSV; skipped, as in CSV |
| hidden rows, columns and sheets | read like the others |
| rows in several sheets | refused |

The first row with a value names the columns. Sizes are bounded by what the archive declares, which `zipfile` enforces,
and while reading.
"""

from __future__ import annotations

import datetime
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedveil.data.row_values import as_text
from fedveil.errors import TaskError

__all__ = ["EXCEL_SUFFIX", "HOW_EXCEL_IS_READ", "iter_excel_rows"]

EXCEL_SUFFIX = ".xlsx"
HOW_EXCEL_IS_READ = "read as Excel, values as stored rather than as displayed"
MAX_UNPACKED = 1 << 30  # bytes of all parts of a workbook
MAX_PART = 1 << 28  # bytes of a part that is held in memory: every part except the sheets
MAX_CELLS = 100_000_000
_MOST_PARTS = 10_000
_MOST_ROWS, _MOST_COLUMNS = 1 << 20, 1 << 14  # Excel's own limits
_ENCRYPTED_OR_OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_SHEETS = re.compile(r"worksheets/[^/]*\.xml$")
_FORMULA, _MERGED = (re.compile(rb"<(?:\w+:)?" + name + rb"[\s/>]") for name in (b"f", b"mergeCell"))
_PIECE, _OVERLAP = 1 << 20, 64
_QUIET: Any = ("ignore", None, Warning, re.compile("openpyxl"), 0)  # as in warnings.filters


def iter_excel_rows(file: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the only sheet that has any.

    Raises:
        TaskError: openpyxl is missing, or the file is not such a workbook; see the table above.
    """
    _require_openpyxl(file)
    try:
        has_formulas = _check_archive(file)
        yield from _rows(file, has_formulas)
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
    logging.getLogger("openpyxl").setLevel(logging.CRITICAL + 1)
    if _QUIET not in warnings.filters:  # not catch_warnings, which is not safe in threads
        warnings.filterwarnings("ignore", module="openpyxl")


def _check_archive(file: Path) -> bool:
    """Return whether a sheet has formulas. Raises TaskError for an archive that is too large, or has merged cells."""
    with file.open("rb") as opened:
        if opened.read(len(_ENCRYPTED_OR_OLD)) == _ENCRYPTED_OR_OLD:
            raise TaskError(
                f'task.data: cannot read "{file}": it is encrypted, or an .xls file with another ending; save it as '
                ".xlsx without a password"
            )
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        sizes = {part.filename: part.file_size for part in parts}
        held = [size for name, size in sizes.items() if not _SHEETS.search(name)]
        if len(parts) > _MOST_PARTS or sum(sizes.values()) > MAX_UNPACKED or max(held, default=0) > MAX_PART:
            raise TaskError(
                f'task.data: expected at most {MAX_UNPACKED:,} bytes unpacked from "{file}", and {MAX_PART:,} of its '
                "texts, found more; save the table as CSV, or divide it"
            )
        sheets = [name for name in sizes if _SHEETS.search(name)]
        has_formulas = not sheets
        for name in sheets:
            with archive.open(name) as part:
                end = b""
                while piece := part.read(_PIECE):
                    if not end and b"\0" in piece[:64]:
                        raise zipfile.BadZipFile  # UTF-16, in which formulas would not be found
                    has_formulas = has_formulas or bool(_FORMULA.search(end + piece))
                    if _MERGED.search(end + piece):
                        raise TaskError(
                            f'task.data: expected no merged cells in "{file}", found some, of which all but the first '
                            "are empty; unmerge them"
                        )
                    end = piece[-_OVERLAP:]
    return has_formulas


def _rows(file: Path, has_formulas: bool) -> Iterator[dict[str, str]]:
    from openpyxl import load_workbook

    book = load_workbook(file, read_only=True, data_only=True, keep_links=False)
    plain = load_workbook(file, read_only=True, data_only=False, keep_links=False) if has_formulas else None
    try:
        filled = [at for at, sheet in enumerate(book.worksheets) if next(_records(file, sheet, None), None)]
        if len(filled) > 1:
            numbers = " and ".join(str(at + 1) for at in filled[:4])
            raise TaskError(
                f'task.data: expected rows in one sheet of "{file}", found rows in the sheets {numbers}; save each '
                "sheet as a file of its own"
            )
        for at in filled:
            yield from _named_rows(file, _records(file, book.worksheets[at], plain and plain.worksheets[at]))
    finally:
        book.close()
        if plain:
            plain.close()


def _named_rows(file: Path, records: Iterator[list[str]]) -> Iterator[dict[str, str]]:
    names = next(records)
    if not all(names) or len(set(names)) < len(names):
        raise TaskError(
            f'task.data: expected different names in the first row of "{file}", found an empty name or a name twice; '
            "correct the row"
        )
    for number, record in enumerate(records, start=1):
        if len(record) > len(names):
            raise TaskError(
                f'task.data: expected {len(names)} values in row {number} of "{file}", as in its first row, found '
                f"{len(record)}; name every column, and put no text above or beside the table"
            )
        yield dict(zip(names, record + [""] * (len(names) - len(record)), strict=True))


def _records(file: Path, sheet: Any, plain: Any) -> Iterator[list[str]]:
    """Yield the texts of the rows that have any, without empty cells at their end.

    Args:
        sheet: the sheet with the stored results of formulas.
        plain: the sheet with the formulas; None if it has none.

    Raises:
        TaskError: a cell has an error or a formula without a result, or there are too many rows, columns or cells.
    """
    sheet.reset_dimensions()  # the size that the sheet declares may be wrong
    if plain is not None:
        plain.reset_dimensions()
    others = plain.iter_rows() if plain is not None else None
    count = 0
    for at, row in enumerate(sheet.iter_rows(), start=1):
        formulas = next(others, ()) if others is not None else ()
        count += len(row)
        if at > _MOST_ROWS or len(row) > _MOST_COLUMNS or count > MAX_CELLS:
            raise TaskError(
                f"task.data: expected at most {_MOST_ROWS:,} rows, {_MOST_COLUMNS:,} columns and {MAX_CELLS:,} cells "
                f'in "{file}", found more; save the table as CSV'
            )
        texts = []
        for column, cell in enumerate(row):
            is_formula = column < len(formulas) and formulas[column].data_type == "f"
            if cell.data_type == "e" or (is_formula and cell.value is None and cell.data_type != "str"):
                found = "an error" if cell.data_type == "e" else "a formula without its result"
                raise TaskError(
                    f'task.data: expected a value in column {column + 1}, row {at} of the sheet in "{file}", found '
                    f"{found}; replace it by its value, or save the file with Excel"
                )
            texts.append(_text_of(cell))
        while texts and not texts[-1]:
            texts.pop()
        if texts:
            yield texts


def _text_of(cell: Any) -> str:
    """Return a cell's value as text; see the table above."""
    value = cell.value
    match value:
        case None:
            return ""
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case datetime.datetime() if value.time() == datetime.time() and "h" not in str(cell.number_format).lower():
            return value.date().isoformat()
        case datetime.timedelta():
            minutes, seconds = divmod(round(value.total_seconds()), 60)
            return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    return as_text(value) or ""
