"""What a site keeps of prepared rows, counted and removed."""

from __future__ import annotations

import json
import os
import time

import numpy as np

from fedveil.client_app.state.data_sets import shelf_of
from fedveil.console.main import main
from fedveil.console.runs.dataset_cache import list_cached_datasets, remove_cached
from fedveil.data.dataset_cache import DatasetCache
from fedveil.records import audit_log


def test_sets_are_counted_and_removed_with_a_line_in_the_audit_log(tmp_path, capsys):
    assert list_cached_datasets(tmp_path) == []
    (tmp_path / "data").mkdir()
    folder = shelf_of(tmp_path, tmp_path / "data", "notes")
    mapped = DatasetCache(folder, {"ids": "<i4"}).put({"n": 1}, [{"ids": np.arange(1000, dtype=np.int32)}])
    (folder / ".left.part").write_bytes(bytes(10))
    os.utime(folder / ".left.part", (time.time() - 3 * 86_400,) * 2)
    left, whole = list_cached_datasets(tmp_path)
    assert (left.bytes, left.data_set, whole.data_set) == (10, "notes", "notes")
    assert 4000 < whole.bytes < 4500
    assert 2.9 < left.days < 3.1
    assert main(["site", "status", "--state-dir", str(tmp_path)]) == 1  # no worker
    assert f"prepared examples: {whole.bytes + 10:,} bytes in 2 data sets" in capsys.readouterr().out
    remove_cached(tmp_path, [left, whole])
    assert list_cached_datasets(tmp_path) == []
    assert mapped["ids"][-1] == 999
    lines = [json.loads(line) for line in (tmp_path / audit_log.NAME).read_text().splitlines()]
    assert [str(whole.bytes) in json.dumps(line) for line in lines] == [False, True]
