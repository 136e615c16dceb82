"""Label Studio's JSON export, as rows with the columns of the task data and one column per kind of label.

The short export, JSON-MIN, already has this form. The full export is recognized by its rows: each is an object with
`data` and with `annotations`, a list of objects that have `result`, and at least one of these lists is not empty:

| in a row of the full export | in the resulting row |
|---|---|
| id | the column id, unless data has a column id |
| data | its columns |
| the labels of the only annotation, by from_name | lists of {start, end, text, labels}, in a column for each
  from_name |
| relations, predictions, an annotation with was_cancelled | not read |

Errors name the file and the row. They may name a column, because column names come from the project template and are
not row values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.data.row_values import describe_value
from fedveil.errors import TaskError

__all__ = ["flatten_rows", "is_export"]

_MAX_NAMES = 100  # maximum number of kinds of labels, each of which is a column in every row


def is_export(rows: Sequence[object]) -> bool:
    """Return whether all rows are tasks of Label Studio's full export, and one of them has an annotation."""
    found = list(map(_annotations_of, rows))
    return None not in found and any(found)


def _annotations_of(row: object) -> list[Any] | None:
    """Return the annotations of a task; None for a row that is not a Label Studio task."""
    if not isinstance(row, dict) or not isinstance(row.get("data"), dict):
        return None
    done = row.get("annotations")
    is_list = isinstance(done, list) and all(isinstance(each, dict) and "result" in each for each in done)
    return done if is_list else None


def flatten_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Return the rows of an export, each with a list, possibly empty, for every from_name in the file.

    Raises:
        TaskError: a row has no annotation, several annotations, or an annotation in a different form; or there are too
            many kinds of labels.
    """
    results = [_results_of(row, number, file) for number, row in enumerate(rows, start=1)]
    names = dict.fromkeys(name for result in results for name in result)
    if len(names) > _MAX_NAMES:
        raise TaskError(
            f'task.data: "{file}" has {len(names):,} kinds of labels (from_name), but at most {_MAX_NAMES} are '
            "allowed; export the tasks of a single project"
        )
    flat = []
    for number, (row, result) in enumerate(zip(rows, results, strict=True), start=1):
        columns = {"id": row.get("id"), **row["data"]}
        if any(name in columns for name in names):
            raise TaskError(
                f'task.data: in row {number} of "{file}", a column of the data and a kind of label (from_name) '
                "have the same name; rename the column"
            )
        flat.append(columns | {name: result.get(name, []) for name in names})
    return flat


def _results_of(row: Mapping[str, Any], number: int, file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the labels of a row's annotation by their from_name."""
    done = [each for each in row["annotations"] if not each.get("was_cancelled")]
    if len(done) != 1:
        raise TaskError(
            f'task.data: expected one finished annotation in row {number} of "{file}", found {len(done)}; export only '
            "annotated texts, and choose one annotation of each"
        )
    entries = done[0]["result"]
    found = dict[str, list[dict[str, Any]]]()
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict):
            raise TaskError(
                f'task.data: expected labels as objects in row {number} of "{file}", found {describe_value(entry)}; '
                "export the project again"
            )
        if entry.get("type") == "relation":
            continue
        name, value = entry.get("from_name"), entry.get("value")
        if not isinstance(name, str) or not isinstance(value, dict):
            raise TaskError(
                f'task.data: a label in row {number} of "{file}" lacks its from_name or its value; export the '
                "project again"
            )
        found.setdefault(name, []).append(value)
    return found
