"""Facts about a row are kept outside its columns, so that no user column can be mistaken for one."""

from __future__ import annotations

import json

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from fedveil.config import parse
from fedveil.contract.task import DatasetShard, Example, ExampleOrigin
from fedveil.data import images, tables
from fedveil.errors import TaskError

# Names that FedVeil or its partitioners have, or had, for columns of their own.
NAMES = (
    "fedveil row", "fedveil folder", "fedveil classes", "__fedveil_label__", "index", "label", "origin", "where",
    "values",
)  # fmt: skip
ROWS = [{"image": f"{i}.png", "mr": "abc"[i % 3], **{name: f"{name} {i}" for name in NAMES}} for i in range(12)]
BY_LABEL = ("dirichlet", "pathological", "natural")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.mark.parametrize("partition", ["iid", *BY_LABEL])
def test_a_user_s_columns_come_through_whatever_their_names(folder, partition):
    config = parse({"task.partition": partition, "task.alpha": 5.0})
    table = tables.read_split(folder, "train", ("mr",))
    examples = [example for i in range(2) for example in table.examples("train", DatasetShard(i, 2), config)]
    assert sorted(examples, key=lambda e: e.values["index"]) == sorted(
        [Example(row, ExampleOrigin(str(folder / "train.jsonl"), i + 1), str(folder)) for i, row in enumerate(ROWS)],
        key=lambda e: e.values["index"],
    )


@pytest.mark.long
@pytest.mark.parametrize("column", NAMES)
@pytest.mark.parametrize("partition", BY_LABEL)
def test_any_column_can_be_cut_by(folder, partition, column):
    """The cut by the column is the cut by "mr", which holds the same."""
    rows = [row | {column: row["mr"]} for row in ROWS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table, origins = tables.read_split(folder, "train", ()), []
    for name in (column, "mr"):
        config = parse({"task.partition": partition, "task.alpha": 5.0, "task.label-column": name})
        origins.append([[e.origin for e in table.examples("train", DatasetShard(i, 2), config)] for i in range(2)])
    assert origins[0] == origins[1]


def test_at_most_so_many_training_rows_in_file_order_with_their_own_origins(folder):
    config = parse({"task.examples-per-site": 5})
    table = tables.read_split(folder, "train", ())
    examples = table.examples("train", None, config)
    at = [ROWS.index(example.values) for example in examples]
    assert at == sorted(at)
    assert len(at) == 5
    assert [e.origin for e in examples] == [ExampleOrigin(str(folder / "train.jsonl"), i + 1) for i in at]
    assert len(table.examples("test", None, config)) == 12


def test_class_names_are_those_that_the_column_declares_and_never_its_texts(folder):
    task = parse({"task.target-column": "mr"}).task
    assert images.image_table(folder, "train", task).class_names == ()
    features = Features({"image": Value("string"), "mr": ClassLabel(names=["z", "b"])})
    (folder / "other").mkdir()
    Dataset.from_list([{"image": "0.png", "mr": 1}], features=features).to_parquet(folder / "other" / "test.parquet")
    assert images.image_table(folder / "other", "test", task).class_names == ("z", "b")


def test_two_files_of_a_split_are_refused_and_other_files_are_named(folder, caplog):
    from fedveil.console.doctor import data_checks

    for name in ("validation.jsonl", "test.parquet", "extra.csv", "old-0.jsonl.gz", "notes.txt", ".dev.jsonl"):
        (folder / name).write_text("")
    (folder / "val").mkdir()
    tables.read_split(folder, "train", ())
    said = "not read: extra.csv, old-0.jsonl.gz, val, validation.jsonl"
    assert f'task.data: "{folder}": {said}' in caplog.text
    task = parse({"task.data": str(folder), "task.target-column": "label"}).task
    (check,) = data_checks.check_run_data(task, [])
    assert check.text.endswith(f"with mr, label; {said}")
    (folder / "train.parquet").write_text("")
    with pytest.raises(TaskError, match=r'in .* are named for the split "train": train.jsonl and train.parquet;'):
        tables.read_split(folder, "train", ())


def test_a_message_names_a_row_by_its_origin_else_by_its_columns():
    assert Example({"a": 1, "origin": "x"}).where == "a row with a, origin"
    assert Example({"a": 1}, ExampleOrigin("f", 3)).where == "row 3 of f"
    assert Example({"a": 1}, ExampleOrigin("f")).where == "f"


def test_shards_with_other_class_names_are_refused(tmp_path):
    """Both have integers, which the first shard's names would stand for."""
    for at, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        features = Features({"mr": Value("string"), "label": ClassLabel(names=names)})
        rows = Dataset.from_list([{"mr": "a", "label": "cat"}], features=features)
        rows.to_parquet(tmp_path / f"train-{at}.parquet")
    with pytest.raises(TaskError, match=r"the columns of .*train-1\.parquet.* in order, type or class names"):
        tables.read_split(tmp_path, "train", ("mr", "label"))
    assert len(tables.read_files(sorted(tmp_path.glob("*.parquet")), ("mr",), only=("mr",)).rows) == 2
