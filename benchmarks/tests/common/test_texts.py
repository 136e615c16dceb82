"""Texts of the presets: the rows of each split, and a selection of sources."""

from __future__ import annotations

from fedveil_bench.common import texts


def test_rows_of_dart_go_to_one_split_each(folder):
    train, validation, test = (texts.load_rows("dart", s) for s in ("train", "validation", "test"))
    assert train[0] == {"mr": "a | b | 0; c | d | e", "ref": "one"}
    assert len(train) == 16
    assert len(validation) + len(test) == 16
    assert not {r["mr"] for r in validation} & {r["mr"] for r in test}
    assert [r["ref"] for r in texts.select_rows(train, 2, 1, 0)] == ["one", "one"]
