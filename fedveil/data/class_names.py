"""The number of each class, the same at every site of a run.

| a label, without surrounding whitespace | its number |
|---|---|
| a name: text, a number, true or false | the position of the name in the list of names |
| an integer in a column that declares names (ClassLabel) | the position of the name it stands for |
| an integer from 0, also as text, if no name in task.class-names is an integer | the integer |

| source of the names (the first that is available) | the classes are numbered by |
|---|---|
| task.class-names | the run config |
| the base model's names, if they include all names of the data set | the base model |
| names that the data set declares: class folders, ClassLabel | the first data set read |

The last source works only for a run in one process. Otherwise each site would number its own classes, so
`require_shared` refuses it. Text values in rows do not declare names, because a single additional row could add a class
and so change the numbers of all others.

Messages may contain class names that a data set declares, but never a label, because a label is a row value.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import final

from fedveil.config import TaskConfig
from fedveil.contract.task import Example
from fedveil.data.row_values import as_text, describe_value
from fedveil.errors import TaskError
from fedveil.sanitize import sanitize

__all__ = ["ClassNumbering", "are_numbers", "format_class_names", "has_integers"]

_INTEGER = re.compile(r"0|[1-9][0-9]{0,8}")
_MOST_LISTED = 24  # names in a message
_LONGEST_LISTED = 60  # characters of a name in a list
_LONGEST_LINE = 2000  # characters of a line to copy


def are_numbers(names: Iterable[str]) -> bool:
    """Return whether all names are integers from 0, as with the folders 0, 1, ... 10."""
    return all(map(_INTEGER.fullmatch, names))


def has_integers(names: Iterable[str]) -> bool:
    """Return whether any name is an integer from 0, so that an integer in a row may mean that name."""
    return any(map(_INTEGER.fullmatch, names))


def format_class_names(names: Sequence[str]) -> str:
    """Return the run config line that gives these names, or instructions for writing it if it would be too long."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(names)
    line = f"task.class-names = {json.dumps(out.getvalue(), ensure_ascii=False)}"
    if len(line) > _LONGEST_LINE or not line.isprintable():
        return f"task.class-names = all {len(names):,} names, separated by commas, in the same order for all sites"
    return line


@final
class ClassNumbering:
    """The class numbers for all examples that one task reads.

    Args:
        task: the task section of the run config.
        model_names: returns the model's class names by number; () if the model has no names. A call may load the
            model.
        model_classes: returns the model's number of classes; 0 if the names determine it.
    """

    def __init__(
        self,
        task: TaskConfig,
        model_names: Callable[[], tuple[str, ...]] = tuple,
        model_classes: Callable[[], int] = int,
    ) -> None:
        self._task, self._model_names, self._model_classes = task, model_names, model_classes
        self._given = task.class_list
        self._integer_names = has_integers(self._given)
        self._adopted: tuple[str, ...] = ()
        self._numbers: dict[str, int] = {name: i for i, name in enumerate(self._given)}
        self._checked: set[tuple[str, ...]] = set()
        self._noted: dict[tuple[str, ...], str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names by number; () if no source has provided names yet."""
        return self._given or self._adopted

    @property
    def count(self) -> int:
        """Return the number of classes; 0 if neither the model nor the names determine it."""
        return self._model_classes() or len(self.names)

    def note(self, declared: tuple[str, ...], folder: str) -> None:
        """Record the names that the data set in `folder` declares, for `require_shared`, without loading a model."""
        if declared:
            self._noted[declared] = folder

    def require_shared(self) -> None:
        """Check that every site in the run uses the same class numbers as this task.

        Raises:
            TaskError: the names of a data set number the classes; the message has the line to add to the run config.
        """
        for declared, folder in self._noted.items():
            self._check(declared, folder)
        if self._adopted and self._adopted != self._model_names():
            raise TaskError(
                f"task.class-names: only the data, not the run config, names the {len(self._adopted):,} classes, "
                "so each site would number its own; add this line to the run config: "
                f"{format_class_names(self._adopted)}"
            )

    def number(self, example: Example) -> int:
        """Return the number of an example's class.

        Raises:
            TaskError: the example has no class, or its data set declares names that are not among those of the run or
                of the data sets read before.
        """
        column = self._task.target_column
        value: object = example.values.get(column)
        if (number := self.find(value, example)) is not None:
            return number
        count = self.count
        expected = f"a class from 0 to {count - 1}, or its name," if count else "the name of a class"
        raise TaskError(
            f'task.data: expected {expected} in column "{column}", found {describe_value(value)} in {example.where}; '
            "correct or drop the row, set task.target-column, or name all classes in task.class-names"
        )

    def find(self, value: object, example: Example) -> int | None:
        """Return the number of a label in an example; None for a value that isn't a label.

        Raises:
            TaskError: the data set declares names that are not among those of the run or of the data sets read before.
        """
        text = (as_text(value) or "").strip()
        if declared := example.class_names:
            self._check(declared, example.folder)
            if isinstance(value, int) and not isinstance(value, bool):
                text = declared[value] if 0 <= value < len(declared) else ""
        elif not self.names and (own := self._model_names()):
            self._adopt(own)
        if (number := self._numbers.get(text)) is not None:
            return number
        if not declared and not self._integer_names and _INTEGER.fullmatch(text) and int(text) < self.count:
            return int(text)
        return None

    def _check(self, declared: tuple[str, ...], folder: str) -> None:
        """Check the names that a data set declares.

        If the config gives no names, the first declared names become the task's.
        """
        if declared in self._checked:
            return
        if not self.names:
            own = self._model_names()
            self._adopt(own if set(declared) <= set(own) else self._counted(declared, folder))
        if unknown := [name for name in declared if name not in self._numbers]:
            source = "of the run" if self._given else "known so far"
            raise TaskError(
                f'task.class-names: expected the classes of "{folder}" among the {len(self.names):,} {source} '
                f"({_listed(self.names)}), found {len(declared):,} ({_listed(declared)}); the unknown ones are "
                f"{_listed(unknown)}; rename them, or set task.class-names to the names of all sites"
            )
        self._checked.add(declared)

    def _counted(self, declared: tuple[str, ...], folder: str) -> tuple[str, ...]:
        """Return the names that a data set declares; raise TaskError if the model has a different number of classes."""
        count = self._model_classes()
        if count and count != len(declared):
            raise TaskError(
                f'task.class-names: the model has {count} classes, but "{folder}" names {len(declared):,} '
                f"({_listed(declared)}); set task.class-names to the names of all {count}, or use integers as "
                "labels"
            )
        return declared

    def _adopt(self, names: tuple[str, ...]) -> None:
        self._adopted, self._numbers = names, {name: i for i, name in enumerate(names)}


def _listed(names: Sequence[str]) -> str:
    """Return the names for a message, limited in length."""
    more = f" and {len(names) - _MOST_LISTED:,} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(sanitize(name, _LONGEST_LISTED) for name in names[:_MOST_LISTED]) + more
