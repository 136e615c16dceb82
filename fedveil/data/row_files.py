"""Files of rows: JSON Lines, JSON, CSV, TSV and CoNLL, plain or gzipped, and Excel. Values stay as written.

| question | answer |
|---|---|
| format | by file extension, ignoring case; a JSON document in .jsonl and JSON Lines in .json are recognized |
| encoding | as given in the file name (train.cp1252.csv), else by byte order mark, else UTF-8, else cp1252 if every |
| | byte means the same in similar code pages; otherwise the file is refused |
| CSV separator | as given in a first line "sep=;", else the only one of comma, semicolon, tab and bar that splits all
  rows equally; |
| | otherwise the file is refused |
| Excel | see `excel_files` |
| Label Studio export | rows with its data and a column for each kind of label; see `label_studio` |
| size | at most MAX_INFLATED bytes from a compressed file, MAX_LINE in a line, and MAX_DOCUMENT in a JSON document |
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from fedveil.data import label_studio
from fedveil.data.columnar_files import COLUMNAR_SUFFIXES
from fedveil.data.conll_files import CONLL_SUFFIXES, describe_conll, parse_sentences
from fedveil.data.excel_files import EXCEL_SUFFIX, HOW_EXCEL_IS_READ, iter_excel_rows
from fedveil.data.row_values import as_text, describe_value
from fedveil.errors import TaskError
from fedveil.sanitize import sanitize

__all__ = [
    "ENCODINGS",
    "SUFFIXES",
    "TEXT_SUFFIXES",
    "RowFile",
    "describe_columns",
    "has_header",
    "parse_line",
    "row_suffix",
]

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *CONLL_SUFFIXES)
SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES), EXCEL_SUFFIX, *COLUMNAR_SUFFIXES)
ENCODINGS = (
    "utf-8", "utf-16", "utf-16-le", "utf-16-be", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1257", "cp850",
    "latin-1", "iso8859-2", "iso8859-15", "mac-roman", "koi8-r", "gb18030", "shift-jis", "euc-kr",
)  # fmt: skip
MAX_INFLATED = 1 << 32
MAX_LINE = 1 << 26
MAX_DOCUMENT = 1 << 28  # bytes; Python objects take several times as many
_SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": '"|"'}
_SAMPLE_LINES, _SAMPLE_BYTES = 200, 1 << 18
_PIECE = 1 << 20
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def _same_in_code_pages() -> bytes:
    """Return the bytes for letters, degree and micro that mean the same in code pages 1250, 1252 and 1254."""
    pages = ("cp1250", "cp1252", "cp1254")
    same = [b for b in range(0xC0, 0x100) if len({bytes([b]).decode(page) for page in pages}) == 1]
    return bytes([*same, 0xB0, 0xB5])


_UNSURE = re.compile(b"[^\\x00-\\x7f" + re.escape(_same_in_code_pages()) + b"]|[\\x80-\\xff]{3}")


def row_suffix(file: Path) -> str:
    """Return the lowercase extension of a file of rows, such as ".csv.gz"; "" for any other file."""
    name = file.name.lower()
    return next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")


def has_header(file: Path) -> bool:
    """Return whether the first line of a file names its columns."""
    return row_suffix(file).removesuffix(".gz") in (".csv", ".tsv", EXCEL_SUFFIX)


def describe_columns(file: Path, names: Sequence[str]) -> str:
    """Describe a file's column names for an error.

    For CSV and Excel, give only their number, because the first line may be a row.
    """
    if has_header(file):
        return f"{len(names):,} other names in its first line, which a CSV or Excel file needs"
    return sanitize(", ".join(names))


@final
class RowFile:
    """The rows of a text file or an Excel workbook. Each iteration reads the file again.

    Args:
        file: a file whose name ends in .xlsx or in one of TEXT_SUFFIXES, with or without .gz.
        texts: JSON columns whose numbers, true and false stay as written; in CSV and Excel, all values are text.
        most: detect the encoding from only this many bytes; 0 means all.

    Attributes:
        bytes_read: the number of decompressed bytes that the current iteration has read; for Excel, the bytes of the
            values.

    Raises:
        TaskError: on creation or iteration, if the file cannot be read in the format that its extension indicates.
    """

    def __init__(self, file: Path, texts: tuple[str, ...] = (), most: int = 0) -> None:
        self._file, self._texts = file, texts
        suffix = row_suffix(file)
        self._format = suffix.removesuffix(".gz")
        self.bytes_read = 0
        self._encoding = self._separator = ""
        if self._format == EXCEL_SUFFIX:
            return
        status = file.stat()
        self._encoding = _detect_encoding(file, most, status.st_size, status.st_mtime_ns)
        self._separator = self._find_separator() if self._format in (".csv", ".tsv") else ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._format == EXCEL_SUFFIX:
            return self._excel_rows()
        if self._format in CONLL_SUFFIXES:
            return parse_sentences(self._lines(), self._file)
        return self._csv_rows() if self._separator else self._json_rows()

    def describe(self) -> str:
        """Return how the file is read; "" for JSON in UTF-8."""
        if self._format == EXCEL_SUFFIX:
            return HOW_EXCEL_IS_READ
        encoding = "UTF-8" if self._encoding.startswith("utf-8") else self._encoding
        if self._separator:
            return f"read as {encoding}, columns separated by {_SEPARATORS[self._separator]}"
        if self._format in CONLL_SUFFIXES and (columns := describe_conll(self._lines())):
            return f"read as {encoding}, {columns}"
        return f"read as {encoding}" if encoding != "UTF-8" else ""

    def _excel_rows(self) -> Iterator[dict[str, Any]]:
        self.bytes_read = 0
        for row in iter_excel_rows(self._file):
            self.bytes_read += sum(len(text.encode(errors="replace")) for text in row.values())
            yield row

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of the file, in UTF-8."""
        self.bytes_read = 0
        with _open_inflated(self._file) as stream:
            if self._encoding == "utf-8":
                lines = iter(lambda: stream.readline(MAX_LINE + 1), b"")
            else:
                text = io.TextIOWrapper(stream, self._encoding, newline="\n")
                lines = iter(lambda: text.readline(MAX_LINE + 1).encode("utf-8"), b"")
            try:
                for number, line in enumerate(lines, start=1):
                    if len(line) > MAX_LINE:
                        raise TaskError(
                            f'task.data: line {number} of "{self._file}" has more than {MAX_LINE:,} bytes; write '
                            "one row per line"
                        )
                    self.bytes_read += len(line)
                    yield line
            except UnicodeError:
                raise self._wrong_encoding() from None

    def _wrong_encoding(self) -> TaskError:
        return TaskError(
            f'task.data: "{self._file}" has bytes that are not {self._encoding.removesuffix("-sig")}; save the '
            "file as UTF-8, or correct the encoding in its name"
        )

    def _json_rows(self) -> Iterator[dict[str, Any]]:
        numbered = ((number, line) for number, line in enumerate(self._lines(), start=1) if line.strip())
        first = next(numbered, None)
        if first is None:
            return
        second = next(numbered, None)
        if self._is_document(first[1], second is None):
            yield from self._document_rows(first, second, numbered)
            return
        for number, line in itertools.chain([first], [second] if second else [], numbered):
            yield parse_line(line, number, self._file, self._texts)

    def _is_document(self, first: bytes, is_alone: bool) -> bool:
        """Return whether a file with this first line may be one JSON document rather than JSON Lines."""
        try:
            value = json.loads(first)
        except (ValueError, RecursionError):
            return True
        return isinstance(value, list) or (is_alone and isinstance(value, dict) and self._format == ".json")

    def _document_rows(
        self, first: tuple[int, bytes], second: tuple[int, bytes] | None, others: Iterator[tuple[int, bytes]]
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a JSON document: a list of objects, or an object that contains one list of objects."""
        lines = [first[1]]
        size = len(first[1])
        for _, line in itertools.chain([second] if second else [], others):
            lines.append(line)
            if (size := size + len(line)) > MAX_DOCUMENT:
                if self._format != ".json":
                    break
                raise TaskError(
                    f'task.data: the JSON document "{self._file}" has more than {MAX_DOCUMENT:,} bytes; write JSON '
                    "Lines, one row per line"
                )
        text = b"".join(lines)
        try:
            document = json.loads(text)
            written = json.loads(text, parse_int=str, parse_float=str, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            if self._format != ".json":  # JSON Lines with an error in its first line
                yield parse_line(first[1], first[0], self._file, self._texts)
            reason = "unreadable"
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg} in line {error.lineno + first[0] - 1}, column {error.colno}"
            raise TaskError(f'task.data: "{self._file}" is not JSON ({reason}); correct it') from None
        rows, as_written = document, written
        if isinstance(document, dict):
            keys = [key for key, value in document.items() if _is_list_of_objects(value)]
            if len(keys) != 1:
                raise TaskError(
                    f'task.data: the object in "{self._file}" must contain exactly one list of objects, but '
                    f"contains {len(keys)}; write a list of objects"
                )
            rows, as_written = document[keys[0]], written[keys[0]]
        if label_studio.is_export(rows):
            rows, as_written = (label_studio.flatten_rows(each, self._file) for each in (rows, as_written))
        for number, (row, values) in enumerate(zip(rows, as_written, strict=True), start=1):
            if not isinstance(row, dict):
                raise TaskError(
                    f'task.data: expected an object in row {number} of "{self._file}", found {describe_value(row)}; '
                    "correct it"
                )
            yield row | {column: _written(values[column]) for column in self._texts if column in values}

    def _find_separator(self) -> str:
        lines = list(itertools.islice(self._sample(), _SAMPLE_LINES))
        if not lines:
            return ","
        if (separator := _separator_said(lines[0])) in _SEPARATORS:
            return separator
        widths = {mark: _widths(lines, mark) for mark in _SEPARATORS}
        splitting = [mark for mark, found in widths.items() if found and found[0] > 1]
        if self._format == ".tsv" and "\t" in splitting:
            return "\t"
        if len(splitting) > 1:
            splitting = [mark for mark in splitting if len(set(widths[mark])) == 1] or splitting
        if len(splitting) == 1:
            return splitting[0]
        names = ", ".join(_SEPARATORS[mark] for mark in splitting) or "none"
        raise TaskError(
            f'task.data: the column separator of "{self._file}" is not clear (comma, semicolon, tab or "|"); it '
            f'could be: {names}. Write a first line that names it, such as "sep=;"'
        )

    def _sample(self) -> Iterator[str]:
        size = 0
        for line in self._lines():
            if (size := size + len(line)) > _SAMPLE_BYTES:
                return
            yield line.decode("utf-8")

    def _csv_rows(self) -> Iterator[dict[str, Any]]:
        csv.field_size_limit(MAX_LINE)
        lines: Iterator[str] = (line.decode("utf-8") for line in self._lines())
        first = next(lines, "")
        lines = lines if _separator_said(first) in _SEPARATORS else itertools.chain([first], lines)
        records = csv.reader(lines, delimiter=self._separator, strict=True)
        names: list[str] = []
        number = 0
        try:
            for record in records:
                if not record:  # an empty line
                    continue
                if not names:
                    names = record
                    if len(set(names)) < len(names):
                        raise TaskError(
                            f'task.data: the first line of "{self._file}" has a column name twice; correct it'
                        )
                    continue
                number += 1
                if len(record) != len(names):
                    raise TaskError(
                        f'task.data: expected {len(names)} values in row {number} of "{self._file}", as in its first '
                        f"line, found {len(record)}; put values that contain the separator in quotes"
                    )
                yield dict(zip(names, record, strict=True))
        except UnicodeDecodeError:  # in bytes after those that the encoding was detected from
            raise self._wrong_encoding() from None
        except csv.Error:
            raise TaskError(
                f'task.data: cannot read row {number + 1} of "{self._file}" as CSV: a quote in it is not closed, or '
                "is followed by text; double a quote inside quotes"
            ) from None


def _separator_said(line: str) -> str:
    """Return the separator from a first line "sep=;" as written by Excel; "" for any other line."""
    text = line.strip("\r\n")
    return text[4:] if text[:4].lower() == "sep=" else ""


def _widths(lines: list[str], separator: str) -> list[int]:
    """Return the number of values in each of the first records, except the last, which may be truncated."""
    try:
        found = [len(record) for record in csv.reader(lines, delimiter=separator) if record]
    except csv.Error:
        return []
    return found[:-1] if len(found) > 2 else found


@lru_cache(maxsize=16)
def _detect_encoding(file: Path, most: int, size: int, changed: int) -> str:
    """Return the name of the codec for a file. `size` and `changed` serve only as part of the cache key.

    Raises:
        TaskError: the encoding is not certain.
    """
    named = file.name.lower().removesuffix(row_suffix(file)).partition(".")[2]
    if named:
        if named not in ENCODINGS:
            raise TaskError(
                f'task.data: the name of "{file}" does not have a known encoding between its dots; rename the '
                f"file, with one of {', '.join(ENCODINGS)}"
            )
        return "utf-8-sig" if named == "utf-8" else named
    decoder, is_utf8, is_sure, read, end = codecs.getincrementaldecoder("utf-8")(), True, True, 0, b""
    with _open_inflated(file) as stream:
        while piece := stream.read(_PIECE):
            if not read:
                if mark := next((name for start, name in _MARKS if piece.startswith(start)), ""):
                    return mark
                if b"\0" in piece[:4]:
                    raise _unsure(file, "UTF-16 without a byte order mark")
            read += len(piece)
            try:
                is_utf8 = is_utf8 and decoder.decode(piece) is not None
            except UnicodeDecodeError:
                is_utf8 = False
            is_sure = is_sure and not _UNSURE.search(end + piece)
            end = piece[-2:]
            if not is_utf8 and not is_sure:
                raise _unsure(file, "bytes in a different encoding")
            if 0 < most <= read:
                break
        else:
            try:
                decoder.decode(b"", final=is_utf8)
            except UnicodeDecodeError:
                is_utf8 = False
    if not is_utf8 and not is_sure:
        raise _unsure(file, "an incomplete character at its end")
    return "utf-8" if is_utf8 else "cp1252"


def _unsure(file: Path, found: str) -> TaskError:
    suffix = row_suffix(file)
    stem = file.name[: len(file.name) - len(suffix)]
    return TaskError(
        f'task.data: expected UTF-8 in "{file}", found {found}; save the file as UTF-8, or put its encoding into '
        f'its name, as in "{stem}.cp1252{suffix}"'
    )


def _open_inflated(file: Path) -> io.BufferedReader:
    """Open a file for reading, decompressed if its name ends in .gz."""
    if not file.name.lower().endswith(".gz"):
        return file.open("rb")
    return io.BufferedReader(_BoundedGzip(file), _PIECE)


class _BoundedGzip(io.RawIOBase):
    """The content of a gzip file. Raises TaskError for more than MAX_INFLATED bytes and for a damaged file."""

    def __init__(self, file: Path) -> None:
        self._file, self._left = file, MAX_INFLATED
        self._inner = gzip.GzipFile(file, "rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error):
            raise TaskError(
                f'task.data: cannot decompress "{self._file}": it is truncated, or not a gzip file; write it again'
            ) from None
        self._left -= len(piece)
        if self._left < 0:
            raise TaskError(
                f'task.data: "{self._file}" has more than {MAX_INFLATED:,} bytes when decompressed; divide the '
                "file, or write Parquet"
            )
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._inner.close()
        super().close()


def parse_line(line: bytes, number: int, file: Path, texts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parse the row in a line of JSON; numbers, true and false in the columns `texts` stay as written.

    Raises:
        TaskError: the line has no row.
    """
    try:
        row, written = json.loads(line), dict[str, object]()
        if isinstance(row, dict) and any(isinstance(row.get(column), int | float | list) for column in texts):
            written = json.loads(line, parse_int=str, parse_float=str, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else "unreadable"
        raise TaskError(f'task.data: line {number} of "{file}" is not JSON ({reason}); correct the line') from None
    if not isinstance(row, dict):
        raise TaskError(
            f'task.data: expected an object in line {number} of "{file}", found {describe_value(row)}; correct it'
        )
    return row | {column: _written(written[column]) for column in texts if column in written}


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _written(value: object) -> object:
    """Return a JSON value with true and false as "true" and "false"; its numbers are already text."""
    if isinstance(value, list):
        return [_written(entry) for entry in value]
    return as_text(value) if isinstance(value, bool) else value
