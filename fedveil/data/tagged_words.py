"""The words of an example with their tags, in common formats.

| source column | target column | format |
|---|---|---|
| a list of words | a list with one tag per word: names, or numbers of names stored in the file | words with tags |
| text | a list of [start, end, name] | spans, as Doccano writes them |
| text | a list of objects with start_offset, end_offset and label | spans, as Doccano writes them with relations |
| text | a list of objects with start, end and labels, or label | spans, as Label Studio writes them |

Offsets count characters (code points) from 0, and the end is exclusive. If a span includes its text, that text must
match the text at the offsets; this detects offsets that are not in characters. Errors name the file and row but no row
value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from fedveil.config import TaskConfig
from fedveil.contract.task import Example
from fedveil.data import entity_tags
from fedveil.data.entity_tags import TagError, TagSet
from fedveil.data.row_values import as_text, describe_value, filled_text
from fedveil.errors import TaskError

__all__ = ["TaggedWords", "TaggedWordsReader", "describe_form"]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_CORRECT = "correct or drop the row"
_NO_SPANS = (
    "write an empty list for a text without entities, or use Label Studio's full JSON export instead of "
    "JSON-MIN, which omits such a list"
)


@dataclass(frozen=True)
class TaggedWords:
    """The words of one example.

    Attributes:
        text: the text that the model reads; words from a list are joined with spaces.
        words: the position of each word in the text, as [start, end).
        tags: the tag number of each word.
        trimmed: the number of spans that began or ended with whitespace, which belongs to no word.
    """

    text: str
    words: list[tuple[int, int]]
    tags: list[int]
    trimmed: int = 0


def describe_form(feature: Any) -> str:
    """Describe how a target column with this `datasets` type is read; "" for lists of tags."""
    entry = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else None)
    if isinstance(entry, Mapping):
        kind = "Doccano" if "start_offset" in entry else "Label Studio"
        return f"objects with character offsets, as {kind} writes them"
    is_list = isinstance(entry, list) or hasattr(entry, "feature")
    return "lists [start, end, name] with character offsets, as Doccano writes them" if is_list else ""


@final
class TaggedWordsReader:
    """Reads the words and tags of one task's examples."""

    def __init__(self, task: TaskConfig, tags: TagSet) -> None:
        self._task, self._set = task, tags
        self._numbers = {tag: number for number, tag in enumerate(tags.tags)}

    def read(self, example: Example) -> TaggedWords:
        """Return an example's words.

        Raises:
            TaskError: the example has no words, no tags, or tags that the run does not have.
        """
        source, target = (example.values.get(name) for name in (self._task.source_column, self._task.target_column))
        if isinstance(source, list):
            return self._read_words(source, target, example)
        text = source if isinstance(source, str) else as_text(source)
        if text is None or filled_text(text) is None:
            raise self._refusal(self._task.source_column, "a list of words or a text", describe_value(source), example)
        return self._read_spans(text, target, example)

    def _read_words(self, source: list[Any], target: object, example: Example) -> TaggedWords:
        column = self._task.target_column
        words = [filled_text(word) for word in source]
        if not words or None in words:
            found = f"{describe_value(source[words.index(None)])} as one of them" if words else "an empty list"
            raise self._refusal(self._task.source_column, "a list of nonempty words", found, example)
        if not isinstance(target, list):
            raise self._refusal(column, "a list with one tag per word", describe_value(target), example)
        if len(target) != len(words):
            raise self._refusal(column, f"{len(words):,} tags, one per word,", f"{len(target):,}", example)
        names = [self._tag_name(tag, number, example) for number, tag in enumerate(target, start=1)]
        try:
            tags = entity_tags.convert_tags(names, self._task.tag_scheme, self._set.entities)
        except TagError as error:
            raise self._refusal(column, "tags of one scheme", str(error), example) from None
        text, ranges = "", list[tuple[int, int]]()
        for word in words:
            text += " " if ranges else ""
            ranges.append((len(text), len(text) + len((word or "").strip())))
            text += (word or "").strip()
        return TaggedWords(text, ranges, [self._numbers[tag] for tag in tags])

    def _tag_name(self, tag: object, number: int, example: Example) -> str:
        """Return the name of a tag, which may be given by its number."""
        declared = example.class_names or (self._set.tags if self._set.is_given else ())
        digits = str(tag) if isinstance(tag, int) and not isinstance(tag, bool) else tag
        if isinstance(digits, str) and _NUMBER.fullmatch(digits) and int(digits) < len(declared):
            return declared[int(digits)]
        if isinstance(tag, str) and not _NUMBER.fullmatch(tag):
            return tag.strip()
        more = "" if declared else ', or give all tags in task.class-names ("O,B-PER,I-PER"), so that they have numbers'
        expected = f"the name of a tag{f', or its number from 0 to {len(declared) - 1},' if declared else ''}"
        found = "an integer" if isinstance(digits, str) and digits.isdecimal() else describe_value(tag)
        raise self._refusal(self._task.target_column, expected, f"{found} at word {number:,}", example, _CORRECT + more)

    def _read_spans(self, text: str, target: object, example: Example) -> TaggedWords:
        column = self._task.target_column
        if not isinstance(target, list):
            expected = "a list of spans, such as [start, end, name], for a text"
            remedy = _NO_SPANS if target is None else _CORRECT
            raise self._refusal(column, expected, describe_value(target), example, remedy)
        if self._task.tag_scheme != "iob2":
            raise TaskError(
                f'task.tag-scheme: "{self._task.tag_scheme}" has no effect, because spans have no tags; leave it out'
            )
        words = entity_tags.split_words(text)
        try:
            spans = [_read_span(entry, number, text) for number, entry in enumerate(target, start=1)]
            tags, trimmed = entity_tags.tag_spans(text, words, spans, self._set.entities)
        except TagError as error:
            raise self._refusal(column, "spans of whole words", str(error), example) from None
        return TaggedWords(text, words, [self._numbers[tag] for tag in tags], trimmed)

    def _refusal(self, column: str, expected: str, found: str, example: Example, remedy: str = _CORRECT) -> TaskError:
        return TaskError(
            f'task.data: expected {expected} in column "{column}", found {found}, in {example.where}; {remedy}'
        )


def _read_span(entry: object, number: int, text: str) -> tuple[int, int, str]:
    """Return the offsets and the name of a span. Raises TagError."""
    if isinstance(entry, Sequence) and not isinstance(entry, str | bytes) and len(entry) == 3:
        start, end, names, own = *entry, None
    elif isinstance(entry, Mapping):
        start, end = (_first_of(entry, name, f"{name}_offset") for name in ("start", "end"))
        names, own = _first_of(entry, "labels", "label"), entry.get("text")
    else:
        raise TagError(f"span {number:,} that is {describe_value(entry)}")
    offsets = [_offset(value) for value in (start, end)]
    if isinstance(names, list):
        if len(names) != 1:
            raise TagError(f"span {number:,} with {len(names)} names instead of one")
        names = names[0]
    if offsets[0] is None or offsets[1] is None or not isinstance(names, str):
        raise TagError(f"span {number:,} without whole numbers from 0 as its offsets, or without a name")
    if isinstance(own, str) and own != text[offsets[0] : offsets[1]]:
        raise TagError(
            f"span {number:,} with a text that differs from the text at its offsets, which must count characters"
        )
    return offsets[0], offsets[1], names.strip()


def _first_of(entry: Mapping[str, Any], *names: str) -> object:
    return next((entry[name] for name in names if entry.get(name) is not None), None)


def _offset(value: object) -> int | None:
    """Return an offset, which may be a number from JSON kept as text."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
