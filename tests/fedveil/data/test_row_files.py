"""Text files of rows in each format, encoding and compression give the same rows, or one error that names the file."""

from __future__ import annotations

import gzip
import json
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedveil import config as run_config
from fedveil.console.doctor import data_checks
from fedveil.data import images, row_files, tables, units
from fedveil.data.row_files import RowFile
from fedveil.data.split_files import describe_unread, split_files
from fedveil.errors import TaskError

ROWS = [
    {"mr": "Schmerz, H\u00fcfte; \"links\"\nseit 2024-01-02", "ref": "007"},
    {"mr": "t\u00e4glich", "ref": "1.0"},
    {"mr": "nie|nie", "ref": "9007199254740993000"},
]  # fmt: skip


def as_csv(separator: str = ",") -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',;"\n|\t') else text

    return "".join(separator.join(map(quoted, row)) + "\r\n" for row in [ROWS[0], *(r.values() for r in ROWS)])


def as_lines() -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


WRITTEN = {
    "train.csv": as_csv().encode(),
    "Train.CSV": as_csv(";").encode(),
    "train.tsv": as_csv("\t").encode(),
    "train.csv.gz": gzip.compress(as_csv("|").encode()),
    "train.tsv.gz": gzip.compress(as_csv("\t").encode("utf-8-sig")),
    "train.json": json.dumps(ROWS, indent=2).encode(),
    "train.JSON": json.dumps({"version": 1, "names": ["a"], "data": ROWS}, indent=1).encode("utf-16"),
    "train.json.gz": gzip.compress(json.dumps({"data": ROWS}).encode()),
    "train.ndjson": as_lines().encode("utf-8-sig"),
    "train.jsonl.gz": gzip.compress(as_lines().encode("cp1252")),
    "train.JSONL": json.dumps(ROWS).encode(),
    "train.jsonl": json.dumps(ROWS, indent=1).encode(),
    "train.utf-16-le.csv": as_csv().encode("utf-16-le"),
    "train.mac-roman.csv": as_csv().encode("mac-roman"),
    "train.cp1252.jsonl": as_lines().encode("cp1252"),
}
HOW = {
    "train.csv": "read as UTF-8, columns separated by a comma",
    "Train.CSV": "read as UTF-8, columns separated by a semicolon",
    "train.csv.gz": 'read as UTF-8, columns separated by "|"',
    "train.tsv.gz": "read as UTF-8, columns separated by a tab",
    "train.JSON": "read as utf-16",
    "train.jsonl.gz": "read as cp1252",
    "train.mac-roman.csv": "read as mac-roman, columns separated by a comma",
}


@pytest.mark.parametrize("name", list(WRITTEN))
def test_each_format_gives_the_rows_as_they_are_written(tmp_path, name, caplog):
    (tmp_path / name).write_bytes(WRITTEN[name])
    table = tables.read_split(tmp_path, "train", ("mr", "ref"), None, ("mr", "ref"))
    assert table.rows.to_list() == ROWS
    assert str(table.origin(1)) == f"row 2 of {tmp_path / name}"
    assert units.read_ids(tmp_path / name, "ref") == [row["ref"] for row in ROWS]
    (check,) = data_checks.check_run_data(run_config.parse({"task.data": str(tmp_path)}).task, [])
    how = HOW.get(name, "")
    assert check.verdict == "ok"
    assert check.text.startswith(f"3 examples in {tmp_path / name}, with mr, ref{f'; {how}' if how else ''}")
    assert how in caplog.text


@pytest.mark.parametrize("text", ["1", "1.0", "007", "1e5", "true", "9007199254740993", "NaN", "null", " x ", ""])
def test_a_value_of_csv_is_its_text(tmp_path, text):
    (tmp_path / "train.csv").write_text(f"mr,ref\na,{text}\n2024-01-02,2.5\n")
    assert tables.read_table(tmp_path / "train.csv", ())["ref"][:] == [text, "2.5"]


def test_numbers_of_a_json_document_stay_as_they_are_written(tmp_path):
    (tmp_path / "train.json").write_text('[{"mr": 1, "ref": 2.50, "n": 1}, {"mr": true, "ref": 1e5, "n": 2}]')
    table = tables.read_table(tmp_path / "train.json", (), texts=("mr", "ref"))
    assert table.to_list() == [{"mr": "1", "ref": "2.50", "n": 1}, {"mr": "true", "ref": "1e5", "n": 2}]


def test_a_first_line_may_name_the_separator(tmp_path):
    text = "mr;n,ref;m\na;b,c;d\n"
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(TaskError, match=r'could be: a comma, a semicolon. Write a first line .* "sep=;"'):
        RowFile(tmp_path / "train.csv")
    (tmp_path / "train.csv").write_text("sep=;\n" + text)
    assert list(RowFile(tmp_path / "train.csv")) == [{"mr": "a", "n,ref": "b,c", "m": "d"}]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("train.csv", b"mr\na\n", r"the column separator of .* is not clear .*: none"),
        ("train.csv", b"mr,mr\na,b\n", "has a column name twice"),
        ("train.csv", b"mr,ref\na,b\nc\n", "expected 2 values in row 2 of .*, found 1"),
        ("train.csv", b'mr,ref\na,b\n"c,d\n', "cannot read row 2 of .* as CSV"),
        ("train.csv", b"mr,ref\n", "there are no rows in"),
        ("train.csv", b"", "there are no rows in"),
        (
            "train.csv",
            "mr,ref\na,\u010c\n".encode("cp1250"),
            r'found bytes in a different encoding; .* as in "train\.cp1252\.csv"',
        ),
        ("train.csv", "mr,ref\na,\u0434\u0430\u043d\u043e\n".encode("cp1251"), "found bytes in a different encoding"),
        ("train.csv", "mr,ref\na,\u00e4\n".encode("cp850"), "found bytes in a different encoding"),
        ("train.csv", "mr,ref\n".encode("utf-16-le"), "found UTF-16 without a byte order mark"),
        ("train.ascii.csv", b"mr,ref\n", 'expected a file of the split "train"'),
        ("train.utf-8.csv", b"mr,ref\na,\xff\n", "has bytes that are not utf-8"),
        ("train.json", b'[{"a": 1}, 2]', "expected an object in row 2 of .*, found an integer"),
        ("train.json", b'{"a": [{"b": 1}], "c": [{"b": 1}]}', "exactly one list of objects, but contains 2"),
        ("train.json", b'{"a": 1}', "exactly one list of objects, but contains 0"),
        ("train.json", b'[{"a": 1},\n {"a": }]', r'train.json" is not JSON \(Expecting value in line 2, column 8\)'),
        ("train.json", b"[" * 100_000, r"is not JSON \(unreadable\)"),
        ("train.jsonl", b'{"mr": ', "line 1 of .* is not JSON"),
        ("train.jsonl", b'{"mr": 1}\n{"mr":', "line 2 of .* is not JSON"),
        ("train.jsonl.gz", b'{"mr": 1}\n', "cannot decompress .* truncated, or not a gzip file"),
        (
            "train.jsonl.gz",
            gzip.compress(b'{"mr": 1}\n', mtime=0)[:-9],
            "cannot decompress .* truncated, or not a gzip file",
        ),
    ],
)
def test_each_fault_is_one_error_with_the_file(tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=error) as caught:
        tables.read_split(tmp_path, "train", ())
    assert str(tmp_path) in str(caught.value)


def test_the_first_line_of_csv_is_not_shown_as_it_may_be_a_row(tmp_path):
    (tmp_path / "train.csv").write_text("Quendolin,diabetes\na,b\n")
    for read in (
        lambda: tables.read_split(tmp_path, "train", ("mr",)),
        lambda: units.read_ids(tmp_path / "train.csv", "mr"),
    ):
        with pytest.raises(TaskError, match="2 other names in its first line") as caught:
            read()
        assert "Quendolin" not in str(caught.value)


def test_a_large_content_of_a_small_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "MAX_INFLATED", 1 << 16)
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"mr,ref\n" + b"a,b\n" * (1 << 16)))
    with pytest.raises(TaskError, match="more than 65,536 bytes when decompressed"):
        tables.read_split(tmp_path, "train", ())


def test_long_lines_and_documents_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "MAX_LINE", 100)
    monkeypatch.setattr(row_files, "MAX_DOCUMENT", 100)
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a": "' + "b" * 100 + '"}\n')
    with pytest.raises(TaskError, match="line 2 of .* has more than 100 bytes"):
        tables.read_split(tmp_path, "train", ())
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.json").write_text(json.dumps([{"a": 1}] * 20, indent=1))
    with pytest.raises(TaskError, match="the JSON document .* has more than 100 bytes"):
        tables.read_split(tmp_path, "train", ())


def test_cp1252_and_decimals_are_read_as_they_lie(tmp_path):
    row = {"frage": "Woran haben Sie Schmerzen in der H\u00fcfte?", "antwort": "Ja, t\u00e4glich"}
    line = json.dumps(row, ensure_ascii=False) + "\n"
    (tmp_path / "train.jsonl").write_text(line * 3, "cp1252")
    assert tables.read_split(tmp_path, "train", ("frage", "antwort")).rows.to_list() == [row] * 3
    (folder := tmp_path / "decimals").mkdir()
    columns = {
        "note": ["a", "b"], "dose": pa.array([Decimal("1.50"), Decimal("2.25")], pa.decimal128(38, 2)),
        "day": [date(2024, 1, 2)] * 2,
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "train.parquet")
    keys = {"task.data": str(folder), "task.source-column": "note", "task.target-column": "dose"}
    (check,) = data_checks.check_run_data(run_config.parse(keys).task, [])
    assert check.text.startswith("2 examples")


def test_the_metadata_of_an_image_folder_are_its_rows(tmp_path):
    (data := tmp_path / "rows").mkdir()
    (data / "train").mkdir()
    lines = [json.dumps({"file_name": f"{i}.png", "label": label}) for i, label in enumerate("abab")]
    (data / "train" / "metadata.jsonl").write_text("\n".join(lines))
    for i in range(4):
        Image.new("RGB", (4, 4), (60 * i, 0, 0)).save(data / "train" / f"{i}.png")
    keys = {
        "task.name": "image-classification", "task.image-column": "file_name", "task.target-column": "label",
        "task.class-names": "a,b",
    }  # fmt: skip
    task = run_config.parse(keys | {"task.data": str(data), "task.num-classes": 2}).task
    table = images.image_table(data, "train", task)
    assert [table.rows[i] for i in range(4)] == [
        {"file_name": f"{i}.png", "label": label} for i, label in enumerate("abab")
    ]
    assert table.class_names == ()  # texts in rows declare no classes
    example = table.examples("train", None, run_config.parse(keys | {"task.num-classes": 2}))[3]
    assert images.image_bytes(example, "file_name") == (data / "train" / "3.png").read_bytes()
    (check,) = data_checks.check_run_data(task, [])
    assert (check.verdict, check.text) == (
        "ok", f"4 examples in {data / 'train' / 'metadata.jsonl'}, with file_name, label",
    )  # fmt: skip


def test_metadata_beside_a_file_of_the_split_are_two_files(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label\na.png,b\n")
    assert split_files(tmp_path, "train") == (tmp_path / "train" / "metadata.csv",)
    (tmp_path / "train.csv").write_text("image,label\na.png,b\n")
    with pytest.raises(TaskError, match=r": train\.csv and train/metadata\.csv; keep only one"):
        split_files(tmp_path, "train")


def test_any_split_is_found_by_its_name(tmp_path):
    for name in ("train.jsonl", "Dev.cp1252.csv", "validation.other.csv"):
        (tmp_path / name).write_text("{}")
    for split in ("validation", "dev"):
        assert [file.name for file in split_files(tmp_path, split)] == ["Dev.cp1252.csv"]
    assert describe_unread(tmp_path, "train") == "not read: Dev.cp1252.csv, validation.other.csv"
    assert describe_unread(tmp_path, "test") == "not read: validation.other.csv"
    with pytest.raises(TaskError, match='expected a file of the split "test"'):
        split_files(tmp_path, "test")
