"""Hold out examples to choose a run's model where the data has no validation split (evaluate.validation-share).

| the data | the validation examples |
|---|---|
| has a validation split | that split; nothing is held out |
| has none | about the share of the examples; the others are the test split or, at a site, the training examples |

An example is held out by a hash of its inputs, under a fixed key. So every run holds out the same examples, added
examples do not move the others, and examples with the same inputs, such as several answers to one question, stay
together. The inputs of a conversation are its turns before the last answer. Rows of an own model are held out by their
numbers. With `dp.unit-column`, the unit's id decides, so all its examples stay together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedveil import rng, tasks
from fedveil.config import RunConfig, TaskConfig
from fedveil.contract.task import Example, Examples, Task
from fedveil.data import images, units
from fedveil.data.conversations import ConversationError, read_conversation
from fedveil.data.split_files import has_split
from fedveil.data.tables import TableSelection
from fedveil.errors import TaskError
from fedveil.training.held_out import ExampleSubset

__all__ = ["KEY", "VALIDATION", "ValidationSplit", "holds_out_test", "mark_held_out", "read_test_split"]

KEY = "evaluate.validation-share"
VALIDATION = "validation"  # name of the split, and of a score view: the server's model on the validation split
_STREAM = rng.initial_stream(0, "validation share").bytes(32)  # not from run.seed: equal in every run


@dataclass(frozen=True)
class ValidationSplit:
    """The examples of a test split, without those that are held out for validation.

    Attributes:
        test: the examples for scores.
        validation: the held-out examples; empty if none are held out.
    """

    test: Examples
    validation: Examples

    def describe(self) -> str:
        """Return how many examples are held out; "" if none are."""
        held, total = len(self.validation), len(self.validation) + len(self.test)
        if not held:
            return ""
        return f"{KEY}: {held:,} of {total:,} test examples choose the model, and the other {len(self.test):,} test it"


def holds_out_test(config: RunConfig, data: Path) -> bool:
    """Return whether test examples of the server's data are held out for validation. Raises TaskError; see `has_split`.

    They are not if `data` has a validation split, or if the sites hold out training examples instead.
    """
    return bool(config.task.evaluation and config.evaluate.validation_share) and not has_split(data, VALIDATION)


def read_test_split(task: Task, config: RunConfig, data: Path, split: str = "test") -> ValidationSplit:
    """Return the examples of a test split, divided if the run holds out some of them.

    Args:
        split: another split is returned whole, as `test`, except that without files of its own "validation" has the
            examples that are held out from "test".

    Raises:
        TaskError: the data cannot be read, or no example is left on one side.
    """
    if split not in ("test", VALIDATION) or not holds_out_test(config, data):
        return ValidationSplit(task.examples(data, split), ())
    examples = task.examples(data, "test")
    ids = None
    if column := config.dp.unit_column:
        origins = [example.origin for example in examples]
        ids = units.read_unit_ids(data, "test", column, origins, has_blanks=config.dp.no_unit == "one")
    marks = mark_held_out(examples, config, ids)
    if not 0 < sum(marks) < len(marks):
        raise TaskError(
            f"{KEY}: the test split must have at least one example to hold out and one to score, but "
            f"{sum(marks)} of {len(marks)} would be held out; add examples, or a validation split"
        )
    test, held = (_select(examples, [i for i, mark in enumerate(marks) if mark == side]) for side in (False, True))
    return ValidationSplit(test, held) if split == "test" else ValidationSplit(held, ())


def mark_held_out(examples: Iterable[Example], config: RunConfig, ids: Sequence[str] | None = None) -> list[bool]:
    """Return, for each example, whether it is held out.

    Args:
        ids: the unit of each example; None if each example is a unit.

    Raises:
        TaskError: an example has an input of an unknown kind, or its image cannot be read.
    """
    limit = round(config.evaluate.validation_share * 2**64)
    if ids is not None:
        texts: Iterable[bytes] = (each.encode() for each in ids)
    else:
        task = config.task
        columns = tasks.task_info(task.name).columns(task)
        inputs = [name for name in columns if name not in (task.target_column, task.rejected_column)]
        texts = (_content(example, inputs, task) for example in examples)
    return [int.from_bytes(_digest(text), "little") < limit for text in texts]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8, key=_STREAM).digest()


def _content(example: Example, inputs: Sequence[str], task: TaskConfig) -> bytes:
    """Return the inputs of an example as bytes, which are equal for equal inputs."""
    values = {name: example.values[name] for name in inputs if name in example.values} or dict(example.values)
    image, conversation = task.image_column, task.messages_column
    if conversation and conversation in values:
        # A conversation that cannot be read is dropped or refused later, so all of it may decide.
        with contextlib.suppress(ConversationError):
            values[conversation] = read_conversation(values[conversation])[0].texts
    if image in values:
        values[image] = hashlib.sha256(images.image_bytes(example, image)).hexdigest()
    try:
        return json.dumps(values, sort_keys=True, default=_plain).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        raise TaskError(
            f"{KEY}: only texts, numbers, lists and images in {', '.join(values)} can be held out by content, and "
            f"{example.where} has another kind of value; add a validation split instead"
        ) from None


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent to one that it can. Raises TypeError for an unknown kind."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(type(value).__name__)


def _select(examples: Examples, at: Sequence[int]) -> Examples:
    if isinstance(examples, TableSelection):
        return examples.select(at)
    return ExampleSubset(examples, at)
