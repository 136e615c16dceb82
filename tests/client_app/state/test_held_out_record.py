"""Which rows of a data set are held out, over runs, and how many scores are given of them.

The adversary is a server that chooses part, run and config of each turn, and gets the mean loss of whatever set of rows
it is given. It learns a single row's loss if it ever gets two sets that differ by less than 64 rows.
"""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.client_app.state.held_out_record import HeldOutRecord
from fedveil.contract import held_out_report
from fedveil.contract.task import ExampleOrigin
from fedveil.errors import ConfigError, StateError
from fedveil.training.held_out import split_held_out

KEY, OTHER_KEY = bytes(range(32)), bytes(32)


def origins(count: int, file: str = "a.jsonl") -> list[ExampleOrigin]:
    return [ExampleOrigin(file, i + 1) for i in range(count)]


@pytest.fixture
def record(tmp_path) -> HeldOutRecord:
    return HeldOutRecord.open(tmp_path, "north")


def test_a_row_s_side_follows_from_its_name_and_the_first_run_s_key(record):
    chosen = record.select_rows("set", 0.3, KEY, origins(1000))
    expected = set()
    for i in range(1000):
        drawn = hashlib.blake2b(f"{i + 1} a.jsonl".encode(), digest_size=8, key=KEY).digest()
        expected |= {i} if int.from_bytes(drawn, "little") / 2**64 < 0.3 else set()
    assert chosen.indices == expected
    assert chosen.refusal == 0
    assert 240 < len(expected) < 360  # four deviations


def test_a_later_run_gets_the_same_rows_under_whatever_key(record):
    first = record.select_rows("set", 0.5, KEY, origins(400))
    assert record.select_rows("set", 0.5, OTHER_KEY, origins(400)) == first
    assert record.select_rows("other set", 0.5, OTHER_KEY, origins(400)).indices != first.indices


def test_another_part_gets_no_score_and_the_same_rows_stay_held_out(record):
    first = record.select_rows("set", 0.5, KEY, origins(400))
    later = record.select_rows("set", 0.501, KEY, origins(400))
    assert (later.indices, later.refusal) == (first.indices, held_out_report.OTHER_PART)


def test_rows_that_are_appended_or_in_a_new_file_are_trained_on(record):
    first = record.select_rows("set", 0.5, KEY, origins(400))
    more = record.select_rows("set", 0.5, KEY, [*origins(900), *origins(300, "b.jsonl")])
    assert more == first


def by_unit(count: int, size: int) -> list[tuple[int, ...]]:
    """Units whose rows are far from each other: rows i, i + count / size, ..."""
    units = count // size
    return [tuple(range(unit, count, units)) for unit in range(units)]


def test_no_unit_is_divided_and_its_first_row_decides(record):
    units = by_unit(1000, 5)
    chosen = record.select_rows("set", 0.4, KEY, origins(1000), units)
    assert chosen.refusal == 0
    assert {len(chosen.indices & set(unit)) for unit in units} == {0, 5}
    by_row = HeldOutRecord.open(record.file.parent, "by-row").select_rows("set", 0.4, KEY, origins(1000))
    assert {unit[0] for unit in units if unit[0] in chosen.indices} == {i for i in by_row.indices if i < 200}
    assert {len(by_row.indices & set(unit)) for unit in units} > {1, 2, 3}  # the control: rows divide units


def test_rows_appended_to_a_held_out_unit_are_neither_trained_on_nor_scored(record):
    units = by_unit(1000, 5)
    first = record.select_rows("set", 0.4, KEY, origins(1000), units)
    held = next(unit for unit in units if unit[0] in first.indices)
    grown = [(*unit, 1000) if unit == held else unit for unit in units]
    later = record.select_rows("set", 0.4, KEY, origins(1002), [*grown, (1001,)])
    assert (later.indices, later.unscored, later.refusal) == (first.indices | {1000}, {1000}, 0)
    rows = list(range(1002))
    split = split_held_out(rows, later.indices, later.unscored)
    assert list(split.held) == sorted(first.indices)
    assert 1001 in split.trained
    assert 1000 not in split.trained


def test_few_units_get_no_score_though_they_have_many_rows(record):
    """The mean loss of a single patient with many rows would be that patient's loss."""
    units = by_unit(1000, 100)
    assert record.select_rows("set", 0.5, KEY, origins(1000), units).refusal == held_out_report.TOO_FEW


def test_a_record_by_rows_gives_no_score_by_units(record):
    record.select_rows("set", 0.4, KEY, origins(1000))
    later = record.select_rows("set", 0.4, KEY, origins(1000), by_unit(1000, 5))
    assert later.refusal == held_out_report.CHANGED


def test_rows_that_the_run_does_not_read_any_more_end_the_scores(record):
    """Such as by task.examples-per-site, which the server sets: sets that differ by one row."""
    first = record.select_rows("set", 0.5, KEY, origins(400))
    last = max(first.indices)
    fewer = record.select_rows("set", 0.5, KEY, origins(last))
    assert (fewer.indices, fewer.refusal) == (first.indices - {last}, held_out_report.CHANGED)
    assert record.select_rows("set", 0.5, KEY, origins(last + 1)).refusal == 0


@pytest.mark.parametrize("count, part", [(0, 0.5), (100, 0.3), (63, 1.0), (200, 1.0)])
def test_too_few_rows_fix_nothing(record, count, part):
    chosen = record.select_rows("set", part, KEY, origins(count))
    assert (chosen.indices, chosen.refusal) == (frozenset(), held_out_report.TOO_FEW)
    assert record.select_rows("set", 0.5, KEY, origins(400)).refusal == 0


def test_rows_of_no_file_count_by_their_place(record):
    chosen = record.select_rows("set", 0.5, KEY, [None] * 300)
    assert held_out_report.LEAST_ROWS <= len(chosen.indices) < 300
    assert record.select_rows("set", 0.5, OTHER_KEY, [None] * 300) == chosen


def test_scores_are_counted_by_data_set_and_flower_run(record):
    for name in ("set", "other"):
        record.select_rows(name, 0.5, KEY, origins(400))
    assert [record.count_score("set", "7", 2) for _ in range(3)] == [True, True, False]
    assert record.count_score("set", "8", 2)
    assert record.count_score("other", "7", 2)
    assert not record.count_score("set", "9", 0)


def test_a_record_that_cannot_be_read_is_an_error_and_names_the_file(record):
    record.select_rows("set", 0.5, KEY, origins(400))
    content = record.file.read_text()
    for damaged in ("", "[" * 2000, content.replace("0.5", "0.6"), json.dumps({"sets": {}})):
        record.file.write_text(damaged)
        with pytest.raises(StateError, match="north.json: cannot read the list of examples that this site holds out"):
            record.select_rows("set", 0.5, KEY, origins(400))


def test_a_site_whose_name_is_no_file_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="site"):
        HeldOutRecord.open(tmp_path, "../north")


TURNS = st.tuples(
    st.sampled_from([0.2, 0.3, 0.3001, 0.5, 0.9, 1.0]), st.binary(min_size=32, max_size=32),
    st.integers(0, 500), st.booleans(),
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(TURNS, max_size=8))
def test_a_server_never_gets_scores_of_two_sets_of_rows(tmp_path_factory, turns):
    record = HeldOutRecord.open(tmp_path_factory.mktemp("site"), "north")
    scored = set()
    for part, key, count, is_shuffled in turns:
        rows = origins(count)[:: -1 if is_shuffled else 1]
        chosen = record.select_rows("set", part, key, rows)
        if not chosen.refusal:
            scored.add(frozenset(rows[i] for i in chosen.indices))
    assert len(scored) <= 1
    assert all(len(rows) >= held_out_report.LEAST_ROWS for rows in scored)
