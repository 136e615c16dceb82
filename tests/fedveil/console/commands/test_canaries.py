"""`fedveil canaries`: what it writes, and what bad arguments get."""

from __future__ import annotations

import json
import re

import pytest
from datasets import Dataset

from fedveil.attacks.canaries.pairs import canary_coins
from fedveil.console.main import main

ROWS = [{"mr": f"meaning {i}", "ref": f"text {i} \u00fc"} for i in range(100)]


def test_the_site_gets_rows_and_the_auditor_the_coins(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = tmp_path / "out"
    assert main(["canaries", str(tmp_path), str(out), "--pairs", "40"]) == 0
    train = [json.loads(line) for line in (out / "data" / "train.jsonl").read_text().splitlines()]
    first, second = (
        [json.loads(line) for line in (out / "secret" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    coins = canary_coins(out)
    assert (len(train), len(first), len(second), len(coins)) == (60, 40, 40, 40)
    assert [row in train for row in first] == coins.tolist()
    assert [row in train for row in second] == (~coins).tolist()
    assert 0 < coins.sum() < 40
    assert not [row for row in first if row in ROWS]
    assert (out / "secret" / "coins.json").stat().st_mode & 0o077 == 0
    assert f"fedveil audit RUN --canaries SITE={out}" in capsys.readouterr().out.replace("\n", "")


def test_rows_of_parquet_stay_parquet(tmp_path):
    Dataset.from_list([{**row, "bytes": b"\xff"} for row in ROWS]).to_parquet(str(tmp_path / "train.parquet"))
    assert main(["canaries", str(tmp_path), str(tmp_path / "out"), "--pairs", "20"]) == 0
    assert len(Dataset.from_parquet(str(tmp_path / "out" / "data" / "train.parquet"), cache_dir=str(tmp_path))) == 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pairs", "60"], "--pairs: expected 20 to 20000, and at most half of the 100 examples, found 60"),
        (["--pairs", "0"], "--pairs: expected 20 to 20000, found 0"),
        (["--target-column", "x"], 'expected column "x" in'),
    ],
)
def test_bad_arguments_get_one_line_and_leave_nothing(tmp_path, capsys, arguments, said):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["canaries", str(tmp_path), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(re.escape(said), error)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["canaries", str(tmp_path), str(tmp_path)]) == 2
    assert "OUT: expected a new or empty folder" in capsys.readouterr().err
