"""Tags and spans: all schemes give the same entities, none is mistaken for another, and spans cover whole words."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.data.entity_tags import TagError, TagSet, convert_tags, declared_tags, split_words, tag_spans
from fedveil.errors import ConfigError
from fedveil.training.entity_scores import entities_of

NAMES = ("PER", "B-cell", "LOC")
SCHEMES = ("iob2", "iob1", "iobes", "bilou")

# A sentence as a list of words without an entity (None) and entities (name, length).
sentences = st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(NAMES), st.integers(1, 4))), min_size=1, max_size=8)


def written(parts, scheme: str) -> list[str]:
    """The tags of a sentence in a scheme, from the definition of the scheme."""
    tags: list[str] = []
    before = None
    for part in parts:
        if part is None:
            tags.append("O")
        else:
            name, length = part
            first, inside, last, alone = {
                "iob2": ("B", "I", "I", "B"), "iobes": ("B", "I", "E", "S"), "bilou": ("B", "I", "L", "U"),
                "iob1": ("B" if before == name else "I", "I", "I", "B" if before == name else "I"),
            }[scheme]  # fmt: skip
            marks = [alone] if length == 1 else [first, *[inside] * (length - 2), last]
            tags += [f"{mark}-{name}" for mark in marks]
        before = part and part[0]
    return tags


@given(sentences, st.sampled_from(SCHEMES))
def test_every_scheme_gives_the_tags_of_iob2(parts, scheme):
    assert convert_tags(written(parts, scheme), scheme, frozenset(NAMES)) == written(parts, "iob2")


@given(sentences, st.sampled_from(SCHEMES), st.sampled_from(SCHEMES))
def test_no_scheme_is_read_as_another(parts, scheme, other):
    if scheme == other or not any(parts):
        return
    with pytest.raises(TagError):
        convert_tags(written(parts, scheme), other, frozenset(NAMES))


@given(st.lists(st.sampled_from(["O", *(f"{m}-{n}" for m in "BIES" for n in ("PER", "LOC"))]), max_size=6))
def test_what_a_scheme_accepts_can_be_written_in_it(tags):
    """Any tags at all: either they are refused, or writing the entities that were read gives them back."""
    for scheme in SCHEMES:
        try:
            converted = convert_tags(tags, scheme, frozenset(("PER", "LOC")))
        except TagError:
            continue
        starts = {start: (name, end - start) for start, end, name in entities_of(converted)}
        parts, at = [], 0
        while at < len(tags):
            parts.append(starts.get(at))
            at += starts[at][1] if at in starts else 1
        assert written(parts, scheme) == tags


@pytest.mark.parametrize(
    ("tags", "scheme", "words"),
    [
        (["O", "I-PER"], "iob2", "continues an entity at word 2, which no entity of that name precedes"),
        (["B-PER", "I-LOC"], "iob2", "continues an entity at word 2"),
        (["B-PER"], "iob1", "a B tag at word 1, which no entity"),
        (["I-LOC", "B-PER"], "iob1", "a B tag at word 2, which no entity"),
        (["B-PER", "O"], "iobes", "does not end before word 2"),
        (["B-PER", "S-PER"], "iobes", "does not end before word 2"),
        (["B-PER"], "iobes", "does not end in the row"),
        (["B-PER", "E-PER", "I-PER"], "iobes", "continues an entity at word 3"),
        (["S-PER"], "iob2", "a tag at word 1 that does not belong to task.class-names"),
        (["B-ORG"], "iob2", "a tag at word 1 that does not belong"),
        (["b-PER"], "iob2", "a tag at word 1 that does not belong"),
        (["PER"], "iob2", "a tag at word 1 that does not belong"),
        (["B-"], "iob2", "a tag at word 1 that does not belong"),
        (["o"], "iob2", "a tag at word 1 that does not belong"),
        ([""], "iob2", "a tag at word 1 that does not belong"),
    ],
)
def test_tags_that_break_a_scheme_are_refused_without_a_value(tags, scheme, words):
    with pytest.raises(TagError, match=words) as error:
        convert_tags(tags, scheme, frozenset(NAMES))
    assert f'task.tag-scheme = "{scheme}"' in str(error.value)
    assert "PER" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "tags", "is_given"),
    [
        (("PER",), ("O", "B-PER", "I-PER"), False),
        (("B-cell", "PER"), ("O", "B-B-cell", "I-B-cell", "B-PER", "I-PER"), False),
        (("O", "B-PER", "I-PER"), ("O", "B-PER", "I-PER"), True),
        (("I-PER", "O", "B-PER"), ("I-PER", "O", "B-PER"), True),
    ],
)
def test_class_names_are_entities_or_all_tags(names, tags, is_given):
    assert TagSet.from_names(names) == TagSet(tags, is_given)


@pytest.mark.parametrize(
    "names",
    [(), ("B-PER", "I-PER"), ("O",), ("O", "PER"), ("O", "B-PER"), ("O", "I-PER"), ("O", "B-PER", "I-PER", "S-PER")],
)
def test_other_class_names_are_refused(names):
    with pytest.raises(ConfigError, match=r"task.class-names: (set it|the)"):
        TagSet.from_names(names)


def test_declared_tags_are_those_of_iob2_and_what_is_no_tag():
    assert declared_tags(("S-PER", "E-PER", "O", "B-PER", "I-PER"), "iobes") == ("O", "B-PER", "I-PER")
    assert declared_tags(("O", "B-PER", "S-LOC", "x"), "iob2") == ("O", "B-PER", "I-PER", "S-LOC", "x")


@given(st.text(max_size=30))
def test_words_hold_every_character_but_space_once(text):
    ranges = split_words(text)
    assert [text[a:b] for a, b in ranges] == re.findall(r"[^\W\d_]+|\d+|[^\w\s]|_", text)
    inside = {at for a, b in ranges for at in range(a, b)}
    assert all((at in inside) != bool(re.match(r"\s", text[at])) for at in range(len(text)))
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))


TEXT = "Ada Lovelace took 20mg in Köln."


def test_spans_of_whole_words_become_tags():
    spans = [(26, 30, "LOC"), (0, 13, "PER"), (18, 20, "B-cell")]  # the second has a space at its end
    tags, trimmed = tag_spans(TEXT, split_words(TEXT), spans, frozenset(NAMES))
    assert [(TEXT[a:b], tag) for (a, b), tag in zip(split_words(TEXT), tags, strict=True)] == [
        ("Ada", "B-PER"), ("Lovelace", "I-PER"), ("took", "O"), ("20", "B-B-cell"), ("mg", "O"), ("in", "O"),
        ("Köln", "B-LOC"), (".", "O"),
    ]  # fmt: skip
    assert trimmed == 1


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 2, "PER")], "span 1 that begins or ends inside a word"),
        ([(1, 3, "PER")], "span 1 that begins or ends inside a word"),
        ([(3, 4, "PER")], "span 1 that contains only whitespace"),
        ([(3, 3, "PER")], "span 1 that is empty"),
        ([(4, 3, "PER")], "span 1 that is empty"),
        ([(26, 99, "PER")], "not within the 31 characters"),
        ([(0, 3, "ORG")], "span 1 with a name that is not in"),
        ([(0, 12, "PER"), (4, 12, "LOC")], "span 2 that overlaps another one"),
        ([(0, 3, "PER"), (0, 3, "PER")], "span 2 that overlaps another one"),
    ],
)
def test_other_spans_are_refused(spans, words):
    with pytest.raises(TagError, match=words):
        tag_spans(TEXT, split_words(TEXT), spans, frozenset(NAMES))
