"""The maximum tokens of an example, set or derived from the examples; a derived limit is always logged."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from fedveil import tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.contract.task import Example
from fedveil.data import token_limits
from fedveil.errors import ConfigError, TaskError

CONTEXT = 192  # of the tiny base


@pytest.fixture(scope="module")
def base():
    return make().base


def make(base=None, **keys):
    flat = {"train.batch-size": 4} | {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    task = tasks.load_task(parse(flat), LoraAdapter(rank=2), "cpu")
    if base is not None:
        task.base = base
    return task


def texts(*counts: int) -> list[Example]:
    """Examples with that many words in the source."""
    return Example.from_columns({"mr": " ".join(["fish"] * n), "ref": "a pub"} for n in counts)


def test_a_length_is_twice_what_99_of_100_have_and_at_most_the_context():
    assert token_limits.length_of([10] * 99 + [50], None) == 20
    assert token_limits.length_of([10] * 98 + [50] * 2, None) == 100
    assert token_limits.length_of([10] * 98 + [50] * 2, 64) == 64
    assert token_limits.length_of([], 64) == 64
    assert token_limits.percentile([7, 3, 5], 95) == 7
    assert token_limits.percentile([7, 3, 5], 50) == 5


@pytest.mark.parametrize("count", [0, 1, 1999, 2000, 2001, 3999, 4001, 10**6])
def test_the_measured_examples_are_spread_over_the_file(count):
    chosen = list(token_limits.spread_indices(count))
    assert len(chosen) <= token_limits.SAMPLE
    assert len(chosen) == min(count, len(chosen)) >= min(count, token_limits.SAMPLE // 2)
    assert not chosen or chosen[-1] > 0.99 * (count - 1) - 1
    if count <= token_limits.SAMPLE:
        assert chosen == list(range(count))


def test_without_a_length_nothing_is_cut_but_what_is_twice_as_long_as_the_others(base, caplog):
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        rows = make(base).encode(texts(*[30] * 99, 50))
        assert caplog.messages == []
        assert not rows.cuts.any()
        assert list(rows.wholes) == list(rows.lengths)
        ninety_nine = rows[0].length
        rows = make(base).encode(texts(*[20] * 199, 120))
    assert [row.cut for row in rows] == [0] * 199 + [1]
    assert rows[199].length == 2 * rows[0].length < rows.wholes[199]
    assert ninety_nine > rows[0].length
    (said,) = caplog.messages
    assert said.startswith(
        "task.max-tokens = 0: 1 of 200 (0.5 %) examples lose the end of their source, and 0 of these"
    )
    assert said.endswith(f"set task.max-tokens to keep more (now at most {2 * rows[0].length})")


def test_a_context_that_cuts_more_than_5_percent_is_refused_unless_a_length_is_given(base):
    few, many = texts(*[30] * 95, *[300] * 5), texts(*[30] * 94, *[300] * 6)
    assert int((make(base).encode(few).cuts > 0).sum()) == 5
    with pytest.raises(TaskError) as refused:
        make(base).encode(many)
    said = str(refused.value)
    assert said.startswith(f"task.max-tokens: 6 of 100 (6.0 %) of the examples are longer than {CONTEXT} tokens")
    assert "but at most 5 % may be" in said
    assert said.endswith(f"or set task.max-tokens = {CONTEXT} to train on the truncated examples")
    assert int((make(base, task__max_tokens=CONTEXT).encode(many).cuts > 0).sum()) == 6


def test_a_given_length_says_which_one_would_keep_95_percent(base, caplog):
    with caplog.at_level(logging.WARNING, "fedveil.data"):
        rows = make(base, task__max_tokens=20).encode(texts(*[5] * 94, *[30] * 6))
    kept = rows.wholes.max()
    assert caplog.messages == [
        "task.max-tokens = 20: 6 of 100 (6.0 %) examples lose the end of their source, and 0 of these also the end of "
        f"their target; raise it, to at most {CONTEXT} ({kept} tokens keep 95 % whole)"
    ]


def test_prepared_examples_know_what_was_cut_in_memory_and_in_a_cache(base, tmp_path):
    lines = "".join(f'{{"mr": "{" ".join(["fish"] * n)}", "ref": "a pub"}}\n' for n in [20] * 199 + [120])
    (tmp_path / "train.jsonl").write_text(lines)
    for shelf in (None, tmp_path / "shelf", tmp_path / "shelf"):
        prepared = make(base).prepare(tmp_path, "train", shelf=shelf)
        assert list(np.flatnonzero(prepared.cut)) == [199]
        assert prepared.counts is not None
        assert prepared.counts.words == "1 of 200 rows cut (0.5 %), 0 left out as empty"
    given = make(base, task__max_tokens=16).prepare(tmp_path, "train", shelf=tmp_path / "shelf")
    assert given.cut is not None
    assert given.cut.all()


def test_a_file_has_the_same_lengths_at_every_reading_and_the_widths_follow_the_batch(base):
    task, examples = make(base), texts(*[20] * 199, 120)
    assert list(task.encode(examples)) == list(task.encode(examples))
    rows = task.encode(examples)
    assert task.training_batch(rows[:4]).ids.shape[1] == rows[0].length
    packed = make(base, train__packing=True)
    assert packed.training_batch(rows[:4]).ids.shape == (4, rows[0].length)


@pytest.mark.parametrize("tokens", [1, 7, -1])
def test_a_length_is_0_or_at_least_8(tokens):
    with pytest.raises(ConfigError, match="task.max-tokens"):
        parse({"task.max-tokens": tokens})
    assert parse({"task.max-tokens": 8}).task.max_tokens == 8
    assert parse({}).task.max_tokens == 0
