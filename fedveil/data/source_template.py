"""The source text of a row, from one column or from several columns in a template (task.source-template).

    task.source-template = "{instruction}\\n\\n{input}"

A name in braces is replaced by the text in that column; `{{` and `}}` stand for braces. Rows often leave a
template column empty, as half of the Alpaca rows do:

| case | the row's source |
|---|---|
| one column, no template | its text, unchanged |
| a template | the filled template, without whitespace at the start and end |
| a template column is null or empty text | the name is removed |
| all columns are null or empty | the row has no source |
| a list, an object, bytes, NaN or infinity in a column | the row has no source |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from fedveil.config import TaskConfig, parse_source_template
from fedveil.data.row_values import as_text, describe_value, filled_text

__all__ = ["SourceTemplate"]


@final
@dataclass(frozen=True)
class SourceTemplate:
    """The columns of a source and the text around them.

    Attributes:
        parts: texts, each with the column that follows it; "" for the last text.
        trims: whether whitespace at the start and end of a source is removed.
    """

    parts: tuple[tuple[str, str], ...]
    trims: bool = True

    @classmethod
    def from_task(cls, task: TaskConfig) -> SourceTemplate:
        """Return the template for a task: task.source-template or, without one, only task.source-column."""
        if task.source_template:
            return cls(parse_source_template(task.source_template))
        return cls((("", task.source_column),), trims=False)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return the column names without duplicates, in order of appearance."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column))

    def fill(self, values: Mapping[str, object]) -> str | None:
        """Return the source text of a row; None if the row has none."""
        texts = dict[str, str]()
        for column in self.columns:
            text = as_text(value := values.get(column))
            if text is None and value is not None:
                return None
            texts[column] = text or ""
        if not any(text.strip() for text in texts.values()):
            return None
        source = "".join(literal + texts.get(column, "") for literal, column in self.parts)
        return filled_text(source.strip() if self.trims else source)

    def describe_columns(self) -> str:
        """Return a description of the columns for an error."""
        names = ", ".join(f'"{column}"' for column in self.columns)
        return f"column {names}" if len(self.columns) == 1 else f"at least one of the columns {names}"

    def describe_values(self, values: Mapping[str, object]) -> str:
        """Return a description of a row's values in the columns, without any content."""
        return ", ".join(describe_value(values.get(column)) for column in self.columns)
