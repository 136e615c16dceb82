"""Entity scores compared with values by hand and with a reference that uses seqeval's rules for chunks."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import TaskError
from fedveil.training.entity_scores import entities_of, score_sentences

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def starts(before: str, tag: str, name_before: str, name: str) -> bool:
    """seqeval's start_of_chunk, for B, I and O."""
    if tag == "B":
        return True
    if before == "O" and tag == "I":
        return True
    return tag != "O" and name_before != name


def ends(before: str, tag: str, name_before: str, name: str) -> bool:
    """seqeval's end_of_chunk, for B, I and O."""
    if before == "B" and tag in "BO":
        return True
    if before == "I" and tag in "BO":
        return True
    return before != "O" and name_before != name


def chunks(tags) -> set[tuple[int, int, str]]:
    """seqeval's get_entities: (first word, word behind the last, name)."""
    found, begin, before, name_before = set(), 0, "O", ""
    for at, each in enumerate([*tags, "O"]):
        tag, name = each[0], each[1:].split("-", maxsplit=1)[-1] or "_"
        if ends(before, tag, name_before, name):
            found.add((begin, at, name_before))
        if starts(before, tag, name_before, name):
            begin = at
        before, name_before = tag, name
    return found


sentences = st.lists(st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1), min_size=1)


@given(st.lists(st.sampled_from(TAGS)))
def test_entities_are_the_chunks_of_seqeval(tags):
    assert entities_of(tags) == chunks(tags)


@given(sentences)
def test_scores_are_those_of_all_chunks_together(pairs):
    predicted, wanted = ([[pair[side] for pair in each] for each in pairs] for side in (0, 1))
    found = {(number, *chunk) for number, tags in enumerate(predicted) for chunk in chunks(tags)}
    true = {(number, *chunk) for number, tags in enumerate(wanted) for chunk in chunks(tags)}
    scores = score_sentences(predicted, wanted, "loss")
    every = [pair for each in pairs for pair in each]
    assert scores["accuracy"] == sum(a == b for a, b in every) / len(every)
    if not true:
        assert set(scores) == {"accuracy"}
        return
    both = len(found & true)
    precision, recall = both / len(found) if found else 0.0, both / len(true)
    harmonic = 2 * precision * recall / (precision + recall) if both else 0.0
    assert scores["precision"] == precision
    assert scores["recall"] == recall
    assert scores["f1"] == pytest.approx(harmonic)


def test_the_example_of_seqevals_page():
    wanted = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert score_sentences(predicted, wanted, "f1") == {"accuracy": 0.8, "precision": 0.5, "recall": 0.5, "f1": 0.5}


def test_without_an_entity_only_the_accuracy_exists(caplog):
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        assert score_sentences([["O", "B-PER"]], [["O", "O"]], "loss") == {"accuracy": 0.5}
    assert "no precision, recall and f1 of 1 scored examples" in caplog.text
    with pytest.raises(TaskError, match="evaluate.metric: f1 of 1 scored examples: their tags contain no entity"):
        score_sentences([["O", "B-PER"]], [["O", "O"]], "f1")
