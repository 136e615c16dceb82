from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from fedveil.config import parse
from fedveil.contract.task import DatasetShard, ExampleOrigin, PreparedData
from fedveil.data import units
from fedveil.errors import TaskError


def lines(folder: Path, *ids: str, name: str = "train.jsonl") -> Path:
    """Write rows whose ids are these JSON texts; "" leaves the column out of a row."""
    columns = (['"text": "x"', *([f'"patient": {text}'] if text else [])] for text in ids)
    rows = ("{" + ", ".join(each) + "}\n" for each in columns)
    (folder / name).write_text("".join(rows))
    return folder / name


def table(folder: Path, values) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"patient": values, "n": range(len(values))}), folder / "train.parquet")
    return folder / "train.parquet"


def test_ids_are_texts_as_written_without_whitespace_and_in_one_normal_form(tmp_path):
    file = lines(tmp_path, '" b "', "7", '"7"', "1.50", '"e\\u0301"', '"\\u00e9\\u2003"', '"B-1"')
    assert units.read_ids(file, "patient") == ["b", "7", "7", "1.50", "\u00e9", "\u00e9", "B-1"]
    assert units.read_ids(table(tmp_path, [7, 12, 7]), "patient") == ["7", "12", "7"]
    assert units.read_ids(table(tmp_path, [0.5, 12.0]), "patient") == ["0.5", "12.0"]


@pytest.mark.parametrize("missing", ["", "null", '""', '" \\u2003"', "NaN", '"\\u200b"'])
def test_a_row_without_an_id_is_refused_by_its_number(tmp_path, missing):
    with pytest.raises(TaskError, match=r'row 2 of .* has no id in column "patient"'):
        units.read_ids(lines(tmp_path, '"secret-id"', missing, '"x"'), "patient")
    with pytest.raises(TaskError, match="row 2 of .* has no id in"):
        units.read_ids(table(tmp_path, ["a", None]), "patient")


def test_rows_without_an_id_are_one_unit_where_the_run_asks_for_it(tmp_path, caplog):
    """Rows 2, 3 and 5 have none; the log says how many, and the default refuses them."""
    file = lines(tmp_path, '"a"', "null", '" "', '"b"', "", '"a"')
    prepared = PreparedData(list(range(6)), lambda: [ExampleOrigin(str(file), row) for row in range(1, 7)])
    keys = {"dp.unit-column": "patient"}
    with pytest.raises(TaskError, match=r'row 2 of .* has no id in .*dp.no-unit = "one"'):
        units.group_rows_of_run(parse(keys), prepared, tmp_path)
    assert not caplog.text
    one = units.group_rows_of_run(parse({**keys, "dp.no-unit": "one"}), prepared, tmp_path)
    assert one == ((0, 5), (1, 2, 4), (3,))
    assert "3 of 6 rows have no id and are one unit" in caplog.text


def test_rows_without_an_id_still_stop_a_site_that_looks_for_a_withdrawn_unit(tmp_path):
    """Each may be a row of the withdrawn person, whatever a run makes of it."""
    file = lines(tmp_path, '"a"', "null")
    with pytest.raises(TaskError, match="row 2 of .* has no id in"):
        units.mark_rows(tmp_path, "train", "patient", [ExampleOrigin(str(file), 1)], lambda plain: False)


def test_a_missing_column_is_refused_with_those_that_there_are(tmp_path):
    for file in (lines(tmp_path, '"a"'), table(tmp_path, ["a"])):
        with pytest.raises(TaskError, match=r'has no column "person"; it has .*patient'):
            units.read_ids(file, "person")


@pytest.mark.parametrize("value", ["true", "[1]", '{"a": 1}'])
def test_an_id_that_is_no_text_or_number_is_refused(tmp_path, value):
    with pytest.raises(TaskError, match=r"expected a text or number .* in row 1; convert"):
        units.read_ids(lines(tmp_path, value), "patient")


@pytest.mark.parametrize(
    "first,second",
    [("7", "7.0"), ("7", '"007"'), ('"7"', "7.00"), ('"a1"', '"A1"'), ('"+7"', "7"), ('"a 1"', '"a1"'), ('"-0"', "0"),
     ('"a\\u200b1"', '"a1"'), ('"\\uff17"', "7"), ('"Stra\\u00dfe"', '"STRASSE"'), ("1.5", '"1.50"'),
     ("1e3", "1000"), ("1e3", '"1E+3"'), ("1.5e-3", '".0015"'), ('"1e900"', '"10e899"'), ("100", '"1e2"'),
     ('"\\u0661\\u0660"', "10"), ('"a\\u06f7"', '"a7"'), ('"\\u0661\\u066b\\u0665"', "1.5"), ('"\\u22127"', "-7"),
     ('"a\\u20131"', '"a-1"'), ('"a\\u20111"', '"a-1"'), ('"Zo\\u00eb"', '"ZOE\\u0308"'), ('"a\\u0000"', '"a"')],
)  # fmt: skip
def test_two_writings_of_one_id_are_refused_by_their_number_alone(tmp_path, first, second):
    with pytest.raises(
        TaskError, match=r"1 ids in column .* have several spellings .*, first in rows 1 and 3;"
    ) as refused:
        units.read_ids(lines(tmp_path, first, '"Zoe-4711"', second), "patient")
    assert "Zoe" not in str(refused.value)


@pytest.mark.parametrize(
    "first,second",
    [
        ("7", "70"),
        ("7.1", "7.01"),
        ('"-7"', "7"),
        ('"a1"', '"a01"'),
        ('"\\u00e9"', '"e"'),
        ("1e3", "1e4"),
        ('"1e900"', '"1e901"'),
        ('"e3"', '"1e3"'),
        ('"."', '"0"'),
        ('"1e9999999999"', '"1e9999999998"'),
    ],
)
def test_other_ids_are_other_units(tmp_path, first, second):
    assert len(set(units.read_ids(lines(tmp_path, first, second), "patient"))) == 2


def test_rows_are_grouped_by_their_place_in_the_file_whatever_was_selected(tmp_path):
    file = lines(tmp_path, '"a"', '"b"', '"a"', '"c"', '"b"')
    chosen = [ExampleOrigin(str(file), row) for row in (5, 3, 1, 2)]
    assert units.group_rows(tmp_path, "train", "patient", chosen) == ((0, 3), (1, 2))
    for wrong in (None, ExampleOrigin("other.jsonl", 1), replace(chosen[0], row=6), replace(chosen[0], row=0)):
        with pytest.raises(TaskError, match="cannot be trained by units"):
            units.group_rows(tmp_path, "train", "patient", [wrong])
    (tmp_path / "images" / "train" / "cat").mkdir(parents=True)
    with pytest.raises(TaskError, match="the images in class folders"):
        units.group_rows(tmp_path / "images", "train", "patient", [])


def test_a_run_without_a_unit_column_groups_nothing_and_other_rows_than_the_files_are_refused(tmp_path):
    file, config = lines(tmp_path, '"a"', '"b"'), parse({"dp.unit-column": "patient"})
    origins = [ExampleOrigin(str(file), 1), ExampleOrigin(str(file), 2)]
    prepared = PreparedData([1, 2], lambda: origins)
    assert units.group_rows_of_run(parse({}), prepared, tmp_path) is None
    assert units.group_rows_of_run(config, prepared, tmp_path) == ((0,), (1,))
    with pytest.raises(TaskError, match="2 rows give 3"):
        units.group_rows_of_run(config, replace(prepared, rows=[1, 2, 3]), tmp_path)
    with pytest.raises(TaskError, match="would give a unit's rows to several sites"):
        units.group_rows_of_run(config, prepared, tmp_path, DatasetShard(0, 2))
    natural = parse({"dp.unit-column": "patient", "task.partition": "natural"})
    assert units.group_rows_of_run(natural, prepared, tmp_path, DatasetShard(0, 2)) == ((0,), (1,))


def test_held_out_rows_without_an_id_are_one_unit_too(tmp_path):
    file = lines(tmp_path, '"a"', "null", '"b"', "")
    rows = [ExampleOrigin(str(file), row) for row in range(1, 5)]
    with pytest.raises(TaskError, match="row 2 of .* has no id in"):
        units.group_rows(tmp_path, "train", "patient", rows)
    assert units.group_rows(tmp_path, "train", "patient", rows, has_blanks=True) == ((0,), (1, 3), (2,))
