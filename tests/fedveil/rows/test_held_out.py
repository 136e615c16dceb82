"""Which rows are held out: by hand, under appended rows, and over keys."""

from __future__ import annotations

import hashlib

import pytest

from fedveil.contract.held_out import LEAST_ROWS
from fedveil.contract.task import Origin
from fedveil.rows.held_out import Chosen, divided

KEY = bytes(range(32))


def rows(count: int) -> list[str]:
    return [f"row {i}" for i in range(count)]


def origins(count: int, file: str = "a.jsonl") -> list[Origin]:
    return [Origin(file, i + 1) for i in range(count)]


def test_each_row_is_on_one_side_that_its_own_name_decides():
    found = divided(rows(1000), origins(1000), KEY, 0.3)
    expected = []
    for i in range(1000):
        drawn = hashlib.blake2b(f"{i + 1} a.jsonl".encode(), digest_size=8, key=KEY).digest()
        expected += [f"row {i}"] if int.from_bytes(drawn, "little") / 2**64 < 0.3 else []
    assert list(found.held) == expected
    assert sorted([*found.trained, *found.held]) == sorted(rows(1000))
    assert not set(found.trained) & set(found.held)
    assert 240 < len(found.held) < 360  # four deviations


def test_rows_that_are_appended_move_no_other_one():
    before, after = (divided(rows(n), origins(n), KEY, 0.5) for n in (400, 900))
    assert set(before.held) <= set(after.held)
    assert set(before.trained) <= set(after.trained)


def test_another_run_s_key_and_another_file_hold_out_other_rows():
    sides = [set(divided(rows(600), origins(600, f), k, 0.5).held)
             for f, k in (("a", KEY), ("a", KEY[::-1]), ("b", KEY))]  # fmt: skip
    assert len({frozenset(side) for side in sides}) == 3


@pytest.mark.parametrize("count,part", [(0, 0.5), (100, 0.3), (LEAST_ROWS - 1, 1.0), (200, 1.0)])
def test_too_few_rows_are_all_trained_on(count, part):
    found = divided(rows(count), origins(count), KEY, part)
    assert list(found.trained) == rows(count)
    assert len(found.held) == 0


def test_rows_of_no_file_count_by_their_place():
    found = divided(rows(300), [None] * 300, KEY, 0.5)
    assert LEAST_ROWS <= len(found.held) < 300


@pytest.mark.parametrize("others", [99, 101])
def test_other_origins_than_rows_are_an_error(others):
    with pytest.raises(ValueError, match="zip"):
        divided(rows(100), origins(others), KEY, 0.5)


def test_a_part_of_the_rows_is_read_as_a_list_is():
    chosen = Chosen(rows(10), [1, 4, 7, 9])
    assert len(chosen) == 4
    assert chosen[2] == "row 7"
    assert chosen[-1] == "row 9"
    assert chosen[1:3] == ["row 4", "row 7"]
    assert list(chosen) == ["row 1", "row 4", "row 7", "row 9"]
