"""Word tags: which entity a word begins or continues. All tags are converted to IOB2 and numbered for the run.

| task.class-names | the tags, by number |
|---|---|
| entity names: PER,LOC | O, B-PER, I-PER, B-LOC, I-LOC |
| complete IOB2 tags: O,B-PER,I-PER | these tags, in this order |

| task.tag-scheme | a one-word entity; two words; three words; an entity right after one with the same name |
|---|---|
| iob2 | B; B I; B I I; B |
| iob1 | I; I I; I I I; B |
| iobes | S; B E; B I E; S or B |
| bilou | U; B L; B I L; U or B |

A row that breaks its scheme is refused, so one scheme is never mistaken for another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedveil.errors import ConfigError

__all__ = ["TagError", "TagSet", "convert_tags", "declared_tags", "split_words", "tag_spans"]

OUTSIDE = "O"
_MARKS = {"iob2": "BI", "iob1": "BI", "iobes": "BIES", "bilou": "BILU"}
_TAG = re.compile(r"([BIESLU])-(.+)", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")  # letters, digits, or one other character


class TagError(ValueError):
    """Invalid tags or spans. The error text contains no row value."""


@dataclass(frozen=True)
class TagSet:
    """The tag set of a run.

    Attributes:
        tags: the IOB2 tags, by number.
        is_given: whether task.class-names lists the complete tags, and so determines their order.
    """

    tags: tuple[str, ...]
    is_given: bool

    @staticmethod
    def from_names(names: Sequence[str]) -> TagSet:
        """Return the tag set for the names in task.class-names.

        Raises:
            ConfigError: there are no names, or the tags are not a complete IOB2 set.
        """
        if not names:
            raise ConfigError(
                "task.class-names: set it to the names of all entities, or to all IOB2 tags, separated by commas "
                "and in the same order for all sites"
            )
        if OUTSIDE not in names:
            if all(map(_TAG.fullmatch, names)):
                raise ConfigError('task.class-names: the tags lack "O"; add it, or give only the names of the entities')
            return TagSet(_tags_of(names), is_given=False)
        found = [_TAG.fullmatch(name) for name in names if name != OUTSIDE]
        whole = set(_tags_of([tag[2] for tag in found if tag]))
        if not found or whole != set(names):
            raise ConfigError(
                f'task.class-names: the {len(names)} names are not the complete IOB2 tags, which are "O", and "B-" '
                'and "I-" for every entity; correct them, or give only the names of the entities'
            )
        return TagSet(tuple(names), is_given=True)

    @property
    def entities(self) -> frozenset[str]:
        """Return the names of the entities."""
        return frozenset(tag[2:] for tag in self.tags if tag != OUTSIDE)


def _tags_of(entities: Iterable[str]) -> tuple[str, ...]:
    return (OUTSIDE, *(f"{mark}-{name}" for name in dict.fromkeys(entities) for mark in "BI"))


def declared_tags(names: Sequence[str], scheme: str) -> tuple[str, ...]:
    """Return the IOB2 tags for the tags that a data set declares; a name that isn't a tag in the scheme stays as is."""
    marks = _MARKS[scheme]
    found = [_TAG.fullmatch(name) for name in names if name != OUTSIDE]
    entities = [tag[2] for tag in found if tag and tag[1] in marks]
    others = [name for name in names if name != OUTSIDE and not ((tag := _TAG.fullmatch(name)) and tag[1] in marks)]
    return (*_tags_of(entities), *others)


def convert_tags(tags: Sequence[str], scheme: str, entities: frozenset[str]) -> list[str]:
    """Convert the tags of a row to IOB2.

    Raises:
        TagError: a tag is not in the scheme or has an unknown entity, or the scheme does not allow it at its position.
    """
    last, alone = {"iobes": ("E", "S"), "bilou": ("L", "U")}.get(scheme, ("", ""))
    converted: list[str] = []
    before, is_open = "", False  # the entity of the previous word, and whether it must continue
    for number, tag in enumerate(tags, start=1):
        found = _TAG.fullmatch(tag)
        mark, name = (found[1], found[2]) if found else (OUTSIDE, "")
        if tag != OUTSIDE and (found is None or mark not in _MARKS[scheme] or name not in entities):
            raise TagError(f"a tag at word {number:,} that does not belong to task.class-names under {_named(scheme)}")
        goes_on = mark in ("I", last) and name == before
        if is_open and not goes_on:
            raise TagError(f"an entity that does not end before word {number:,}, as {_named(scheme)} requires")
        if scheme == "iob1":
            is_right = mark != "B" or name == before
        else:
            is_right = mark not in ("I", last) or (goes_on and (not last or is_open))
        if not is_right:
            kind = "a B tag at" if mark == "B" else "a tag that continues an entity at"
            raise TagError(
                f"{kind} word {number:,}, which no entity of that name precedes, as {_named(scheme)} requires"
            )
        starts = mark in ("B", alone) or (mark == "I" and not goes_on)
        converted.append(tag if mark == OUTSIDE else f"{'B' if starts else 'I'}-{name}")
        before, is_open = name, bool(last) and mark in "BI"
    if is_open:
        raise TagError(f"an entity that does not end in the row, as {_named(scheme)} requires")
    return converted


def _named(scheme: str) -> str:
    others = ", ".join(f'"{each}"' for each in _MARKS if each != scheme)
    return f'task.tag-scheme = "{scheme}" (or {others})'


def split_words(text: str) -> list[tuple[int, int]]:
    """Return the [start, end) of each word in a text: runs of letters, runs of digits, and other single characters."""
    return [found.span() for found in _WORD.finditer(text)]


def tag_spans(
    text: str, words: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, str]], entities: frozenset[str]
) -> tuple[list[str], int]:
    """Return the tags of words from character spans [start, end), and how many spans began or ended with whitespace.

    Raises:
        TagError: a span lies outside the text, is empty, has an unknown entity, begins or ends inside a word, or
            overlaps another span.
    """
    starts = {start: at for at, (start, _) in enumerate(words)}
    ends = {end: at for at, (_, end) in enumerate(words)}
    tags, trimmed = [OUTSIDE] * len(words), 0
    for number, (start, end, name) in enumerate(spans, start=1):
        if not 0 <= start < end <= len(text):
            raise TagError(f"span {number:,} that is empty, or not within the {len(text):,} characters of the text")
        if name not in entities:
            raise TagError(f"span {number:,} with a name that is not in task.class-names")
        inner = text[start:end]
        first, past = end - len(inner.lstrip()), start + len(inner.rstrip())
        trimmed += (first, past) != (start, end)
        if first >= past:
            raise TagError(f"span {number:,} that contains only whitespace")
        if first not in starts or past not in ends:
            raise TagError(f"span {number:,} that begins or ends inside a word")
        inside = range(starts[first], ends[past] + 1)
        if any(tags[at] != OUTSIDE for at in inside):
            raise TagError(f"span {number:,} that overlaps another one")
        for at in inside:
            tags[at] = f"{'B' if at == inside[0] else 'I'}-{name}"
    return tags, trimmed
