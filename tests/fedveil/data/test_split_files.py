"""Layouts of a split that people and tools write: each is read completely, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from fedveil.config import parse
from fedveil.console.doctor import data_checks
from fedveil.console.runs.unit_exposure import list_row_files
from fedveil.contract.task import ExampleOrigin
from fedveil.data import images, split_files, tables, tokenized_dataset, units
from fedveil.data.reading_notes import collect_notes
from fedveil.errors import TaskError

ROWS = [{"mr": f"source {i}", "ref": f"target {i}", "patient": f"p{i // 2}"} for i in range(7)]
PARTS = (ROWS[:3], ROWS[3:5], ROWS[5:])


def parquet(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def jsonl(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def csv(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{','.join(row)}\n" for row in [list(rows[0]), *(list(row.values()) for row in rows)]))


def lay(folder: Path, names: str, write=parquet) -> None:
    for i, rows in enumerate(PARTS):
        write(folder / names.format(i), rows)


LAYOUTS = {
    "shards of the Hub": lambda folder: lay(folder, "data/train-{:05d}-of-00003.parquet"),
    "with the Hub's older digest": lambda folder: lay(folder, "train-{:05d}-of-00003-4c7e04d3d4b2bb2d.parquet"),
    "numbered": lambda folder: lay(folder, "Train_{}.jsonl", jsonl),
    "numbered CSV": lambda folder: lay(folder, "training{}.csv", csv),
    "Spark": lambda folder: (lay(folder, "train.parquet/part-{:05d}-c000.snappy.parquet"), spark(folder)),
    "Spark's CSV": lambda folder: lay(folder, "train.csv/part-{:05d}-c000.csv", csv),
    "a folder of the split": lambda folder: lay(folder, "Training/{:04d}.parquet"),
    "save_to_disk": lambda folder: DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(
        folder, num_shards={"train": 3}
    ),
    "save_to_disk of one data set": lambda folder: Dataset.from_list(ROWS).save_to_disk(folder),
    "an Arrow file": lambda folder: arrow_file(folder / "train.arrow"),
}


def spark(folder: Path) -> None:
    for name in ("_SUCCESS", "._SUCCESS.crc", ".part-00000-c000.snappy.parquet.crc"):
        (folder / "train.parquet" / name).write_text("")


def arrow_file(file: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_scratch", [False, True])
def test_every_row_is_read_with_its_origin(tmp_path, layout, with_scratch):
    data = tmp_path / "data set"
    data.mkdir()
    LAYOUTS[layout](data)
    (tmp_path / "scratch").mkdir(mode=0o700)
    table = tables.read_split(data, "train", ("mr", "ref"), tmp_path / "scratch" if with_scratch else None)
    examples = list(table.examples("train", None, parse({})))
    assert [example.values for example in examples] == ROWS
    files = split_files.split_files(data, "train")
    counts: dict[str, int] = {}
    for example in examples:  # rows are counted from 1 in each file
        counts[example.origin.file] = counts.get(example.origin.file, 0) + 1
        assert example.origin == ExampleOrigin(example.origin.file, counts[example.origin.file])
    assert list(counts) == [str(file) for file in files]
    packed = np.array(tokenized_dataset.pack_origins(examples, files), np.int64)
    assert list(tokenized_dataset.unpack_origins(packed, files)) == [example.origin for example in examples]
    assert units.group_rows(data, "train", "patient", [e.origin for e in examples]) == ((0, 1), (2, 3), (4, 5), (6,))
    assert set(files) <= set(list_row_files(data))  # a withdrawal looks into them
    task = parse({"task.data": str(data)}).task
    counted: list[int] = []
    (check,) = data_checks.check_run_data(task, counted)
    assert (check.verdict, counted) == ("ok", [7])


def test_what_is_read_is_said(tmp_path):
    lay(tmp_path, "train-{:05d}-of-00003.parquet")
    with collect_notes() as notes:
        tables.read_split(tmp_path, "train", ("mr",))
    said = '3 files are read as the split "train": train-00000-of-00003.parquet to train-00002-of-00003.parquet'
    assert notes == [f'"{tmp_path}": {said}']
    (tmp_path / "old").mkdir()
    csv(tmp_path / "old" / "Testing.csv", ROWS)
    with collect_notes() as notes:
        tables.read_split(tmp_path / "old", "test", ("mr",))
    assert notes[0] == f'"{tmp_path / "old"}": Testing.csv is read as the split "test"'


def faulty(name: str, folder: Path) -> None:
    match name:
        case "a missing shard":
            lay(folder, "train-{:05d}-of-00004.parquet")
        case "a shard twice":
            lay(folder, "train-{}.parquet")
            parquet(folder / "train-01.parquet", ROWS)
        case "shards beside a file":
            lay(folder, "train-{}.parquet")
            parquet(folder / "train.parquet", ROWS)
        case "two names":
            lay(folder, "{}")
            csv(folder / "train.csv", ROWS)
            csv(folder / "Training.csv", ROWS)
        case "other columns":
            lay(folder, "train-{}.parquet")
            pyarrow.parquet.write_table(
                pyarrow.table({"mr": [1], "ref": ["a"], "patient": ["a"]}), folder / "train-2.parquet"
            )
        case "no first line":
            lay(folder, "train-{}.csv", csv)
            (folder / "train-1.csv").write_text("a,b,c\nd,e,f\n")
        case "unfinished":
            lay(folder, "train.parquet/part-{}.parquet")
            (folder / "train.parquet" / "_temporary").mkdir()
        case "partitioned":
            lay(folder, "train.parquet/year=2020/part-{}.parquet")
        case "two formats":
            lay(folder, "train/{}.parquet")
            jsonl(folder / "train" / "b.jsonl", ROWS)
        case "a file outside":
            Dataset.from_list(ROWS).save_to_disk(folder)
            state = json.loads((folder / "state.json").read_text())
            (folder / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": "../x.arrow"}]}))
        case "no state":
            Dataset.from_list(ROWS).save_to_disk(folder)
            (folder / "state.json").write_text("[]")
        case "a lost file":
            Dataset.from_list(ROWS).save_to_disk(folder, num_shards=2)
            (folder / "data-00001-of-00002.arrow").unlink()
        case "a spreadsheet":
            (folder / "Train.xls").write_bytes(b"PK")


FAULTS = {
    "a missing shard": "by the name train-00000-of-00004.parquet, .* should have 4 shards, but it has 3",
    "a shard twice": "train-1.parquet in .* has the same shard number as another file",
    "shards beside a file": ": train.parquet and train-0.parquet; keep only one",
    "two names": ": Training.csv and train.csv; keep only one",
    "other columns": "the columns of .*train-2.parquet",
    "no first line": "the first line of .*train-1.csv.* differs from that of .*train-0.csv",
    "unfinished": "contains _temporary",
    "partitioned": "has the folder year; write the data set without partitions",
    "two formats": "must have the same format, found .jsonl and .parquet",
    "a file outside": "something other than .arrow files in the same folder",
    "no state": "does not contain the list of files that save_to_disk writes",
    "a lost file": "some of them are missing",
    "a spreadsheet": r"found Train\.xls; save the table Train\.xls as \.xlsx or as CSV",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_split_that_is_not_whole_is_refused(tmp_path, name):
    faulty(name, tmp_path)
    with pytest.raises(TaskError, match=FAULTS[name]):
        tables.read_split(tmp_path, "train", ("mr", "ref"))


def test_ids_of_one_person_differ_between_files(tmp_path):
    jsonl(tmp_path / "train-0.jsonl", [{"patient": "7"}])
    jsonl(tmp_path / "train-1.jsonl", [{"patient": "07"}])
    with pytest.raises(TaskError, match="have several spellings .* in the split's 2 files"):
        units.group_rows(tmp_path, "train", "patient", [ExampleOrigin(str(tmp_path / "train-0.jsonl"), 1)])


def test_class_folders_may_have_another_usual_name(tmp_path):
    for split in ("Training", "Testing"):
        for name in ("glioma", "notumor"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (8, 8), 9).save(tmp_path / split / name / "1.jpg")
    task = parse({"task.target-column": "label", "task.image-column": "image"}).task
    for split in ("train", "test"):
        assert images.image_table(tmp_path, split, task).rows["label"] == ["glioma", "notumor"]
    (tmp_path / "train").mkdir()
    with pytest.raises(TaskError, match=": Training and train; rename one"):
        images.image_table(tmp_path, "train", task)


@pytest.mark.parametrize(
    ("names", "pictures", "said"),
    [
        (["0.png", "1.png"], "images/{}.png", 'in the folder "images"'),
        (["0", "1"], "images/{}.JPG", 'in the folder "images", with the extension .JPG'),
        (["0", "1"], "{}.png", "next to the file, with the extension .png"),
        (["0.png", "1.png"], "train/{}.png", 'in the folder "train"'),
        (["a/0.png", "a/1.png"], "a/{}.png", None),
    ],
)
def test_a_table_beside_a_picture_folder(tmp_path, names, pictures, said):
    for i in range(2):
        file = tmp_path / pictures.format(i)
        file.parent.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 9 + i).save(file)
    (tmp_path / "train.csv").write_text("image,label\n" + "".join(f"{name},{i}\n" for i, name in enumerate(names)))
    task = parse({"task.target-column": "label", "task.data": str(tmp_path), "task.name": "image-classification"}).task
    with collect_notes() as notes:
        table = images.image_table(tmp_path, "train", task)
    assert any(f'the pictures that column "image" names are {said}' in note for note in notes) == bool(said)
    for i, example in enumerate(table.examples("train", None, parse({}))):
        assert images.image_bytes(example, "image") == (tmp_path / pictures.format(i)).read_bytes()
    (check,) = data_checks.check_run_data(task, [])
    assert check.verdict == "ok"
    assert (f"the pictures are {said}" in check.text) == bool(said)


def test_pictures_in_two_places_are_refused_and_names_stay_in_the_folder(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / folder / "0.png")
    task = parse({"task.target-column": "label"}).task
    (tmp_path / "train.csv").write_text("image,label\n0.png,1\n")
    with pytest.raises(TaskError, match='in the folder "a" and in the folder "b"; write their paths'):
        images.image_table(tmp_path, "train", task)
    (tmp_path / "train.csv").write_text("image,label\n../0.png,1\n")
    (example,) = images.image_table(tmp_path, "train", task).examples("train", None, parse({}))
    with pytest.raises(TaskError, match="the path leads outside the data folder"):
        images.image_bytes(example, "image")


def test_a_table_beside_pictures_in_the_split_s_own_folder(tmp_path):
    (tmp_path / "train" / "images").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "train" / "images" / "0.png")
    (tmp_path / "train" / "labels.csv").write_text("image,label\n0,1\n")
    task = parse({"task.target-column": "label"}).task
    (example,) = images.image_table(tmp_path, "train", task).examples("train", None, parse({}))
    assert images.image_bytes(example, "image").startswith(b"\x89PNG")


def test_columns_that_a_task_does_not_use_may_hold_anything(tmp_path):
    from fedveil import tasks

    task = parse({}).task
    rows = [{"mr": "a", "ref": "b", "x": 1, "y": "\ud800"}, {"mr": "c", "ref": "d", "x": {"k": []}}]
    jsonl(tmp_path / "train.jsonl", rows)
    info = tasks.task_info("text-generation")
    assert tables.read_for_task(tmp_path, "train", info, task).rows.to_list() == [
        {"mr": "a", "ref": "b"},
        {"mr": "c", "ref": "d"},
    ]
    (tmp_path / "train.jsonl").unlink()
    far = pyarrow.array([10**15], pyarrow.timestamp("s"))
    pairs = pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    columns = {"mr": ["a"], "ref": ["b"], "far": far, "pairs": pairs}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    table = tables.read_for_task(tmp_path, "train", info, task)
    assert [example.values for example in table.examples("train", None, parse({}))] == [{"mr": "a", "ref": "b"}]


def test_doctor_finds_a_last_row_without_its_target(tmp_path):
    rows = [{"mr": f"a {i}", "ref": "b"} for i in range(1500)]
    jsonl(tmp_path / "train-0.jsonl", rows)
    jsonl(tmp_path / "train-1.jsonl", [*rows, {"mr": "last", "ref": " "}])
    keys = {"task.data": str(tmp_path)}
    (check,) = data_checks.check_run_data(parse(keys).task, [])
    assert check.verdict == "fail"
    assert f"found 1 rows without one, the first is row 1501 of {tmp_path / 'train-1.jsonl'}" in check.text
    (check,) = data_checks.check_run_data(parse(keys | {"task.empty-texts": "drop"}).task, [])
    assert (check.verdict, "; 1 rows without a text are dropped" in check.text) == ("ok", True)


def test_the_descriptions_of_a_saved_data_set_are_no_rows(tmp_path):
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "all")
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert [split_files.describe_unread(tmp_path / name, "train") for name in ("all", "one")] == ["", ""]


def test_two_folders_of_another_split_do_not_stop_a_reading(tmp_path, monkeypatch):
    csv(tmp_path / "train.csv", ROWS)
    for name in ("test", "testing"):
        (tmp_path / name).mkdir()
    assert split_files.describe_unread(tmp_path, "train") == "not read: test, testing"

    def refused(data, split):
        raise PermissionError

    monkeypatch.setattr(split_files, "find_split_files", refused)
    assert split_files.describe_unread(tmp_path, "train") == "not read: test, testing, train.csv"


def test_files_beside_pictures_are_no_rows_beside_the_split_s_table(tmp_path):
    csv(tmp_path / "train.csv", ROWS)
    (tmp_path / "train").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "train" / "0001.png")
    (tmp_path / "train" / "0001.json").write_text("{}")
    assert split_files.split_files(tmp_path, "train") == (tmp_path / "train.csv",)
    csv(tmp_path / "train" / "metadata.csv", ROWS)
    with pytest.raises(TaskError, match=r": train\.csv and train/metadata\.csv; keep only one"):
        split_files.split_files(tmp_path, "train")


def test_a_folder_named_like_an_image_and_an_unreadable_file_are_no_images(tmp_path, monkeypatch):
    (tmp_path / "case1.nii").mkdir()
    (tmp_path / "IM1").write_bytes(b"\0" * 128 + b"DICM")
    assert not split_files.is_image_file(tmp_path / "case1.nii")
    assert split_files.is_image_file(tmp_path / "IM1")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    assert not split_files.is_image_file(tmp_path / "IM1")


def test_shards_may_count_from_1_and_a_huge_count_costs_nothing(tmp_path):
    for at in (1, 2):
        csv(tmp_path / f"train-{at}-of-2.csv", ROWS)
    assert len(split_files.split_files(tmp_path, "train")) == 2
    csv(tmp_path / "test-0-of-999999999.csv", ROWS)
    with pytest.raises(TaskError, match="should have 999,999,999 shards, but it has 1, numbered from 0 to 0"):
        split_files.split_files(tmp_path, "test")
    for at in (2, 3):
        csv(tmp_path / f"validation-{at}-of-2.csv", ROWS)
    with pytest.raises(TaskError, match="numbered from 2 to 3; copy the missing ones"):
        split_files.split_files(tmp_path, "validation")


def test_class_folders_come_before_the_folder_data(tmp_path):
    csv(tmp_path / "data" / "train.csv", ROWS)
    assert len(split_files.split_files(tmp_path, "train")) == 1
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "train" / "cat" / "1.png")
    assert images.class_folder(tmp_path, "train") == tmp_path / "train"


def test_a_text_that_is_not_utf_8_is_refused_without_its_bytes(tmp_path):
    wrong = pyarrow.array([b"secret\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"mr": wrong, "ref": ["b"], "image": wrong}), tmp_path / "train.parquet")
    keys = {"task.data": str(tmp_path), "task.target-column": "ref"}
    for more in ({}, {"task.name": "image-classification"}):
        (check,) = data_checks.check_run_data(parse(keys | more).task, [])
        assert (check.verdict, "a text is not UTF-8" in check.text, "secret" in check.text) == ("fail", True, False)
    table = images.image_table(tmp_path, "train", parse(keys).task)  # reading the row reports the position
    assert len(table.rows) == 1


def test_tables_beside_the_files_of_a_split_are_said_to_be_unread(tmp_path):
    (tmp_path / "train").mkdir()
    csv(tmp_path / "train" / "a.csv", ROWS)
    for name in ("b.xls", "_c.csv", "~$a.xlsx", "notes.txt", ".d.csv"):
        (tmp_path / "train" / name).write_text("x")
    files = split_files.find_split_files(tmp_path, "train")
    assert [file.name for file in files] == ["a.csv"]
    assert split_files.describe_unread(tmp_path, "train", files) == "not read: train/_c.csv, train/b.xls"
