"""The labels of an example that may belong to any number of classes.

| value in the target column | labels |
|---|---|
| a name in task.class-names | only that label |
| several names separated by task.label-separator | those labels |
| an integer from 0, also as text, unless a class name is an integer | only the label with that number |
| a list of names or integers | those labels; no label for an empty list |
| empty text | no label |
| a missing value | refused |
"""

from __future__ import annotations

from fedveil.config import TaskConfig
from fedveil.contract.task import Example
from fedveil.data.class_names import ClassNumbering, has_integers
from fedveil.data.row_values import describe_value
from fedveil.errors import ConfigError, TaskError

__all__ = ["read_labels", "refuse_label", "require_class_names"]


def require_class_names(task: TaskConfig) -> tuple[str, ...]:
    """Return the names in task.class-names, by number.

    Raises ConfigError if there are fewer than two names, or if a name contains the label separator.
    """
    names = task.class_list
    if len(names) < 2:
        raise ConfigError(
            "task.class-names: expected at least two class names, separated by commas and in the same order for "
            f"all sites, found {len(names)}"
        )
    if task.multi_label and (joined := [name for name in names if task.label_separator in name]):
        raise ConfigError(
            f'task.label-separator: "{task.label_separator}" occurs in the class name "{joined[0]}"; set a '
            "separator that no class name contains"
        )
    return names


def read_labels(example: Example, numbering: ClassNumbering, task: TaskConfig) -> tuple[float, ...]:
    """Return 1.0 or 0.0 for each class of task.class-names.

    Raises:
        TaskError: the example has no value or its value isn't a label, or the names in its data set differ from the
            run's names.
    """
    value = example.values.get(task.target_column)
    several: list[object]
    if isinstance(value, str) and not example.class_names:
        several = [name for name in map(str.strip, value.split(task.label_separator)) if name]
    else:
        several = value if isinstance(value, list) else [value]
    numbers = [numbering.find(each, example) for each in several]
    if None in numbers:
        raise refuse_label(example, task)
    return tuple(float(i in numbers) for i in range(len(task.class_list)))


def refuse_label(example: Example, task: TaskConfig) -> TaskError:
    """Return the error for an example whose value isn't a label or, with task.multi-label, a list of labels."""
    names, value = task.class_list, example.values.get(task.target_column)
    kind = f'classes separated by "{task.label_separator}" or a list of them' if task.multi_label else "a class"
    number = f", or its number from 0 to {len(names) - 1}," if not has_integers(names) else ""
    return TaskError(
        f"task.data: expected {kind}, of the {len(names)} names in task.class-names{number} in column "
        f'"{task.target_column}", found {describe_value(value)} in {example.where}; correct or drop the row, or '
        "set task.class-names"
    )
