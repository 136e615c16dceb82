"""A value in a text column is read as the text that the file contains, in JSON Lines and in Parquet."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fedveil import config as run_config
from fedveil.adapters.lora import LoraAdapter
from fedveil.console.doctor import data_checks
from fedveil.data import tables
from fedveil.data.row_values import as_text
from fedveil.errors import TaskError
from fedveil.tasks import load_task

WRITTEN = [
    "1",
    "2.5",
    "2.50",
    "1e5",
    "-0",
    "true",
    "false",
    "9007199254740993",
    "123456789012345678901234567890",
    '"7"',
]


@pytest.fixture(scope="module")
def task():
    return load_task(run_config.parse({"task.max-tokens": 32}), LoraAdapter(), "cpu")


def targets(task, folder) -> list[str]:
    return [task.read_texts(example)[1] for example in task.examples(folder, "train")]


@pytest.mark.parametrize("scratch", [False, True])
def test_json_is_the_text_of_the_file(tmp_path, task, scratch):
    """In any company: each value stands alone, and all stand in one column."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f'{{"mr": {text}, "ref": {text}, "other": [1, 2.5]}}\n' for text in WRITTEN))
    wanted = [text.strip('"') for text in WRITTEN]
    table = tables.read_table(file, (), tmp_path / "scratch" if scratch else None, ("mr", "ref"))
    assert table["ref"][:] == table["mr"][:] == wanted
    assert table["other"][:] == [[1.0, 2.5]] * len(WRITTEN)  # a column that is not text keeps its type
    assert targets(task, tmp_path) == wanted
    assert len(task.prepare(tmp_path, "train", None, tmp_path / "cache").rows) == len(WRITTEN)
    config = run_config.parse({"task.data": str(tmp_path)})
    assert [check.verdict for check in data_checks.check_run_data(config.task, [])] == ["ok"]


def test_parquet_is_the_value_of_the_file(tmp_path, task):
    columns = {
        "1.0": pyarrow.array([1.0]),
        "0.1": pyarrow.array([0.1], pyarrow.float32()),
        "0.2": pyarrow.array([np.float16(0.2)], pyarrow.float16()),
        "true": pyarrow.array([True]),
        "12.50": pyarrow.array([decimal.Decimal("12.50")]),
        "0.0000001": pyarrow.array([decimal.Decimal("0.0000001")]),
        "2024-02-29": pyarrow.array([datetime.date(2024, 2, 29)]),
        "2024-02-29 07:05:00": pyarrow.array([datetime.datetime(2024, 2, 29, 7, 5)]),
        "07:05:00": pyarrow.array([datetime.time(7, 5)]),
        "18446744073709551615": pyarrow.array([2**64 - 1], pyarrow.uint64()),
        "a": pyarrow.array(["a"]).dictionary_encode(),
    }
    for wanted, column in columns.items():
        pyarrow.parquet.write_table(pyarrow.table({"mr": ["x"], "ref": column}), tmp_path / "train.parquet")
        assert targets(task, tmp_path) == [wanted]
        table = tables.read_table(tmp_path / "train.parquet", (), tmp_path / "scratch", ("ref",))
        assert as_text(table["ref"][0]) == wanted


@pytest.mark.parametrize("text", ["null", "NaN", "Infinity", "[1]", '{"a": 1}'])
def test_no_value_is_refused_whatever_it_is_called(tmp_path, task, text):
    (tmp_path / "train.jsonl").write_text(f'{{"mr": "x", "ref": {text}}}')
    with pytest.raises(TaskError, match='expected text in column "ref" of every row, found .* in row 1 of'):
        task.encode(task.examples(tmp_path, "train"))


@pytest.mark.parametrize("kind", [pyarrow.float64(), pyarrow.float32()])
def test_nan_of_parquet_is_refused(tmp_path, task, kind):
    column = pyarrow.array([float("nan")], kind)
    pyarrow.parquet.write_table(pyarrow.table({"mr": ["x"], "ref": column}), tmp_path / "train.parquet")
    with pytest.raises(TaskError, match='expected text in column "ref" of every row, found no'):
        task.encode(task.examples(tmp_path, "train"))


def test_choices_are_written_as_in_the_file(tmp_path):
    keys = {"task.name": "vision-language", "task.choices-column": "choices", "task.source-column": "q",
            "task.target-column": "answer", "task.max-tokens": 64}  # fmt: skip
    seen = load_task(run_config.parse(keys), LoraAdapter(), "cpu")
    (tmp_path / "train.jsonl").write_text(
        '{"image": "a", "q": "Which?", "choices": [1, 2.50, true], "answer": 0}\n'
        '{"image": "a", "q": "Which?", "choices": ["a", null], "answer": 0}\n'
    )
    first, second = seen.examples(tmp_path, "train")
    assert seen._asked(first).prompt.splitlines()[:4] == ["Which?", "A. 1", "B. 2.50", "C. true"]
    with pytest.raises(TaskError, match=r'for each choice in "choices", found 1 of 2 without, in row 2 of'):
        seen._asked(second)
