"""Group a site's rows by unit, such as the patient. `dp.unit-column` names the column that holds the unit's id.

An id is the value as text: normalized to NFC, without surrounding whitespace, case-sensitive, with numbers as written.
The ids stay in this module, which returns only row indices and numbers, so that no log, error or report can contain an
id.

| case | result |
|---|---|
| no such column | TaskError with the file's columns |
| a row without an id: null, NaN, blank or invisible | TaskError with the row number: such rows may belong to one |
| | person. With `dp.no-unit = "one"`, all of them form one unit |
| ids that differ only in spelling (7, 7.0, 007 and 70e-1; a1 and A1; | TaskError with their rows: they would be two |
| digits, hyphens or accents in several encodings) | units, so a person with both would get less protection than the |
| | claim says |
| images in class folders, which have no columns | TaskError |
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig
from fedveil.contract.task import DatasetShard, ExampleOrigin, PreparedData
from fedveil.data import columnar_files, images, split_files
from fedveil.data.columnar_files import is_columnar
from fedveil.data.row_files import RowFile, describe_columns
from fedveil.errors import TaskError

__all__ = [
    "UnitCounts", "UnitRows", "count_rows", "count_units", "group_ids", "group_rows", "group_rows_of_run", "mark_rows",
    "plain_id", "read_ids", "read_ids_of_files",
]  # fmt: skip

UnitRows = tuple[tuple[int, ...], ...]  # the row indices of each unit; every row is in exactly one unit

_AT_ONCE = 10_000  # rows
log = logging.getLogger("fedveil.data")

_LISTED = 10  # pairs of rows in an error
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:e([+-]?[0-9]{1,9}))?")
_LONGEST = 400  # digits in a number that is written out
_MINUS, _ARABIC_POINT = "\u2212", "\u066b"


def group_rows_of_run(
    config: RunConfig, prepared: PreparedData, data: Path, share: DatasetShard | None = None
) -> UnitRows | None:
    """Return the units in a site's training rows; None if `dp.unit-column` is empty, so that each row is a unit.

    Raises:
        TaskError: as in the table above, or if the partition divides a unit's rows among sites.
    """
    if not config.dp.unit_column:
        return None
    if share is not None and config.task.partition != "natural":
        raise TaskError(
            f'task.partition: "{config.task.partition}" would give a unit\'s rows to several sites, which '
            'dp.unit-column does not allow; set "natural", or give every site its own data'
        )
    dp = config.dp
    ids = _ids_of_rows(data, "train", dp.unit_column, prepared.origins(), has_blanks=dp.no_unit == "one")
    units = group_ids(ids)
    if (found := sum(map(len, units))) != len(prepared.rows):
        raise TaskError(
            f"dp.unit-column: each row must give one training example, but {found} rows give {len(prepared.rows)}; "
            "leave dp.unit-column out"
        )
    if blanks := ids.count(""):
        log.warning(
            "dp.no-unit: %d of %d rows have no id and are one unit; a person with such rows and others is protected "
            "less than the guarantee says",
            blanks,
            len(ids),
        )
    return units


def group_rows(
    data: Path, split: str, column: str, origins: Iterable[ExampleOrigin | None], has_blanks: bool = False
) -> UnitRows:
    """Return the units in the rows with these origins, in the order of their first rows. Raises TaskError.

    Args:
        has_blanks: all rows without an id form one unit; otherwise they are an error.
    """
    return group_ids(_ids_of_rows(data, split, column, origins, has_blanks))


def mark_rows(
    data: Path,
    split: str,
    column: str,
    origins: Iterable[ExampleOrigin | None],
    is_marked: Callable[[str], bool],
) -> list[bool]:
    """Return, for each of these rows, whether `is_marked` is true for the plain form of its id. Raises TaskError."""
    ids = _ids_of_rows(data, split, column, origins)
    marks = {each: is_marked(_plain(each)) for each in set(ids)}
    return [marks[each] for each in ids]


def read_unit_ids(
    data: Path, split: str, column: str, origins: Iterable[ExampleOrigin | None], has_blanks: bool = False
) -> list[str]:
    """Return the id of each of these rows in its plain form; see `group_rows`. Raises TaskError."""
    return [_plain(each) for each in _ids_of_rows(data, split, column, origins, has_blanks)]


def count_rows(file: Path, column: str, plain: str) -> int:
    """Return the number of rows in a data file whose id has this plain form. Raises TaskError."""
    return sum(_plain(each) == plain for each in read_ids(file, column))


def plain_id(text: str) -> str:
    """Return the form that all spellings of an id share; "" for a blank id."""
    return _plain(unicodedata.normalize("NFC", text).strip())


def _ids_of_rows(
    data: Path, split: str, column: str, origins: Iterable[ExampleOrigin | None], has_blanks: bool = False
) -> list[str]:
    if images.is_by_class(data, split):
        raise TaskError(
            f'dp.unit-column: the images in class folders in "{split_files.find_split_folder(data, split)}" have '
            f'no column "{column}"; write {split}.jsonl with this column and the images\' paths'
        )
    files = split_files.split_files(data, split)
    ids_of_file = {
        str(file): ids for file, ids in zip(files, read_ids_of_files(files, column, has_blanks), strict=True)
    }
    chosen = []
    for origin in origins:
        ids = [] if origin is None else ids_of_file.get(origin.file, [])
        if origin is None or not 1 <= origin.row <= len(ids):
            raise TaskError(
                f'dp.unit-column: {origin} is not a row of "{files[0].parent}", so this task cannot be trained by units'
            )
        chosen.append(ids[origin.row - 1])
    return chosen


def read_ids_of_files(files: Sequence[Path], column: str, has_blanks: bool = False) -> list[list[str]]:
    """Return the id of each row in each file of a split. Raises TaskError like `read_ids`, once for all files."""
    found = [read_ids(file, column, has_blanks) for file in files]
    if similar := _similar(each for ids in found for each in ids):
        raise TaskError(
            f'dp.unit-column: {len(similar)} ids in column "{column}" have several spellings (such as 7, 7.0 and '
            f"007, or a1 and A1) in the split's {len(files):,} files, from \"{files[0]}\"; write each person's id "
            "the same way in all files"
        )
    return found


def group_ids(ids: Iterable[str]) -> UnitRows:
    """Return the row indices for each id, in order of first appearance."""
    units: defaultdict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(ids):
        units[each].append(index)
    return tuple(map(tuple, units.values()))


def read_ids(file: Path, column: str, has_blanks: bool = False) -> list[str]:
    """Return the id of each row in a data file. Raises TaskError as in the table above.

    Args:
        has_blanks: a row without an id has the id ""; otherwise it is an error.
    """
    ids = _texts(file, column)
    if "" in ids and not has_blanks:
        raise TaskError(
            f'dp.unit-column: row {ids.index("") + 1} of "{file}" has no id in column "{column}"; add it, drop the '
            'row, or count all such rows as one unit (dp.no-unit = "one")'
        )
    if similar := _similar(ids):
        pairs = "; ".join(f"{a} and {b}" for a, b, *_ in similar[:_LISTED])
        raise TaskError(
            f'dp.unit-column: {len(similar)} ids in column "{column}" of "{file}" have several spellings (such as '
            f"7, 7.0 and 007, or a1 and A1), first in rows {pairs}; write each person's id the same way in all rows"
        )
    return ids


@dataclass(frozen=True)
class UnitCounts:
    """Statistics on the units in one file, without any id.

    Attributes:
        rows: the number of rows in the file.
        units: the number of distinct ids; all spellings of an id count once.
        largest: the number of rows in the largest unit.
        without_id: the row numbers without an id.
        similar: for each id with several spellings, the first row with each spelling.
    """

    rows: int
    units: int
    largest: int
    without_id: tuple[int, ...]
    similar: tuple[tuple[int, ...], ...]


def count_units(file: Path, column: str) -> UnitCounts:
    """Count the units in a data file. Raises TaskError like `read_ids`, except for missing ids and spellings."""
    ids = _texts(file, column)
    sizes = Counter(_plain(each) for each in ids if each)
    missing = tuple(number for number, each in enumerate(ids, start=1) if not each)
    similar = tuple(tuple(rows) for rows in _similar(ids))
    return UnitCounts(len(ids), len(sizes), max(sizes.values(), default=0), missing, similar)


def _similar(ids: Iterable[str]) -> list[list[int]]:
    """Return, for each id with several spellings, the first row with each spelling."""
    writings: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for number, each in enumerate(ids, start=1):
        if each:
            writings[_plain(each)].setdefault(each, number)
    return [list(first_rows.values()) for first_rows in writings.values() if len(first_rows) > 1]


def _texts(file: Path, column: str) -> list[str]:
    """Return the id of each row; "" for a row without an id. Raises TaskError for a wrong type or a missing column."""
    return [_text(value, number, file, column) for number, value in enumerate(_values(file, column), start=1)]


def _values(file: Path, column: str) -> Sequence[Any]:
    if is_columnar(file):
        return _columnar_values(file, column)
    values, names = list[Any](), dict[str, None]()
    for row, plain in zip(RowFile(file, (column,)), RowFile(file), strict=True):  # numbers as written
        names |= dict.fromkeys(row)
        values.append(isinstance(plain.get(column), bool) or row.get(column))
    if column not in names:
        raise _no_column(file, column, list(names))
    return values


def _columnar_values(file: Path, column: str) -> Sequence[Any]:
    names = columnar_files.read_schema(file).names
    if column not in names:
        raise _no_column(file, column, names)
    values: list[Any] = []
    for table in columnar_files.iter_tables(file, [column], _AT_ONCE):
        try:
            values += table.column(0).to_pylist()
        except (ValueError, OverflowError):  # whose text may quote a value
            raise TaskError(
                f'dp.unit-column: cannot read column "{column}" of "{file}": a text is not UTF-8, or a date is '
                "after the year 9999; correct it"
            ) from None
    return values


def _no_column(file: Path, column: str, names: Sequence[str]) -> TaskError:
    has = describe_columns(file, names)
    return TaskError(f'dp.unit-column: "{file}" has no column "{column}"; it has {has}')


def _text(value: Any, number: int, file: Path, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal | None):
        raise TaskError(
            f'dp.unit-column: expected a text or number in column "{column}" of "{file}", found a value of type '
            f"{type(value).__name__} in row {number}; convert the column"
        )
    text = "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    name = unicodedata.normalize("NFC", text).strip()
    return name if _plain(name) else ""


def _plain(name: str) -> str:
    """Return a form that is equal for ids that differ only in spelling."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    text = "".join(map(_plain_character, folded))
    number = _NUMBER.fullmatch(text)
    if not number or not (number[2] or number[3]):
        return text
    written = (number[2] + (number[3] or "")).lstrip("0")
    digits, exponent = written.rstrip("0"), int(number[4] or 0) - len(number[3] or "")
    if not digits:
        return "0"
    return ("-" if number[1] == "-" else "") + _written_out(digits, exponent + len(written) - len(digits))


def _plain_character(character: str) -> str:
    """Return the ASCII form of a digit or hyphen in any script, and "" for an invisible character."""
    if character.isspace() or unicodedata.category(character) in ("Cf", "Cc"):
        return ""
    if character == _MINUS or unicodedata.category(character) == "Pd":
        return "-"
    value = unicodedata.decimal(character, None)
    return "." if character == _ARABIC_POINT else character if value is None else str(value)


def _written_out(digits: str, exponent: int) -> str:
    """Return digits x 10^exponent without an exponent, unless the result would be very long."""
    if abs(exponent) > _LONGEST:
        return f"{digits}e{exponent}"
    if exponent >= 0:
        return digits + "0" * exponent
    digits = digits.rjust(1 - exponent, "0")
    return f"{digits[:exponent]}.{digits[exponent:]}"
