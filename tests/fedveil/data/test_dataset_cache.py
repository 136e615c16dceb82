"""Prepared rows on disk are used only if they are complete and have the right key."""

from __future__ import annotations

import json
import os
import stat
import time

import numpy as np
import pytest

from fedveil.config import parse
from fedveil.contract.task import DatasetShard
from fedveil.data import dataset_cache
from fedveil.data.dataset_cache import DatasetCache
from fedveil.errors import StateError, TaskError

KINDS = {"ids": "<i4", "numbers": "<i8"}
KEY = {"rows": "a", "seed": None}
PARTS = [
    {"ids": np.arange(5, dtype=np.int32), "numbers": np.array([1, 2])},
    {"ids": np.arange(7, dtype=np.int32), "numbers": np.array([3])},
]


@pytest.fixture
def shelf(tmp_path):
    return DatasetCache(tmp_path / "state" / "shelf", KINDS)


def folders(tmp_path):
    return sorted((tmp_path / "state" / "shelf").iterdir())


def test_what_was_put_is_found_again_mapped_and_for_its_owner_alone(tmp_path, shelf):
    assert shelf.find(KEY) is None
    for arrays in (shelf.put(KEY, PARTS), shelf.find(KEY)):
        assert arrays["ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
        assert arrays["numbers"].tolist() == [1, 2, 3]
        assert all(isinstance(array, np.memmap) and not array.flags.writeable for array in arrays.values())
    (folder,) = folders(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, *folder.iterdir())}
    assert modes == {"shelf": 0o700, folder.name: 0o700, "about.json": 0o600, "ids.bin": 0o600, "numbers.bin": 0o600}


@pytest.mark.parametrize("other", [{**KEY, "rows": "b"}, {**KEY, "seed": 0}, {**KEY, "more": 1}, {"rows": "a"}])
def test_another_key_finds_nothing(shelf, other):
    shelf.put(KEY, PARTS)
    assert shelf.find(other) is None
    assert shelf.find(KEY) is not None


def harm_byte(folder):
    data = bytearray((folder / "ids.bin").read_bytes())
    data[6] ^= 1
    (folder / "ids.bin").write_bytes(data)


def harm_key(folder):
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps(about | {"key": {**KEY, "rows": "b"}}))


HARMS = {
    "a byte": harm_byte,
    "cut off": lambda f: os.truncate(f / "ids.bin", 44),
    "grown": lambda f: (f / "ids.bin").open("ab").write(bytes(4)),
    "an array is gone": lambda f: (f / "numbers.bin").unlink(),
    "no about": lambda f: (f / "about.json").unlink(),
    "half of about": lambda f: os.truncate(f / "about.json", 40),
    "about is no object": lambda f: (f / "about.json").write_text("[]"),
    "another key in it": harm_key,
    "arrays swapped": lambda f: (f / "ids.bin").rename(f / "x") and (f / "numbers.bin").rename(f / "ids.bin"),
    "accessible to other users": lambda f: (f / "ids.bin").chmod(0o644),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_set_that_is_not_as_it_was_written_is_never_used(tmp_path, shelf, harm):
    shelf.put(KEY, PARTS)
    (folder,) = folders(tmp_path)
    HARMS[harm](folder)
    assert shelf.find(KEY) is None
    assert folders(tmp_path) == []  # so that it is created again
    shelf.put(KEY, PARTS)
    assert shelf.find(KEY)["numbers"].tolist() == [1, 2, 3]


def test_what_fails_on_the_way_leaves_nothing(tmp_path, shelf):
    def parts():
        yield PARTS[0]
        assert [path.name.endswith(".part") for path in folders(tmp_path)] == [True]  # under way
        raise TaskError("row 3")

    with pytest.raises(TaskError, match="row 3"):
        shelf.put(KEY, parts())
    assert folders(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "shelf").write_text("a file")
    with pytest.raises(StateError, match="cannot write prepared examples"):
        DatasetCache(tmp_path / "shelf", KINDS).put(KEY, PARTS)


def test_two_that_write_one_set_both_have_it(shelf):
    def parts():
        shelf.put(KEY, PARTS)  # the other one is faster
        yield from PARTS

    assert shelf.put(KEY, parts())["numbers"].tolist() == [1, 2, 3]
    assert shelf.find(KEY)["numbers"].tolist() == [1, 2, 3]


def test_old_sets_and_old_leftovers_go_and_stay_mapped(tmp_path, shelf):
    first = shelf.put({"n": 0}, PARTS)
    old, new = (tmp_path / "state" / "shelf" / f".{name}.part" for name in ("old", "new"))
    for part, age in ((old, 7200), (new, 60)):
        part.mkdir()
        os.utime(part, (time.time() - age,) * 2)
    for n in range(1, dataset_cache.KEPT + 1):
        for folder in folders(tmp_path):  # as if one were written per hour
            if not folder.name.startswith("."):
                os.utime(folder, (folder.stat().st_mtime - 3600,) * 2)
        shelf.put({"n": n}, PARTS)
    assert [n for n in range(dataset_cache.KEPT + 1) if shelf.find({"n": n})] == list(range(1, dataset_cache.KEPT + 1))
    assert first["ids"].tolist()[-1] == 6
    assert (old.exists(), new.exists()) == (False, True)


def test_the_key_has_a_seed_only_where_it_chooses_among_the_rows():
    def key(share=None, **changes):
        return dataset_cache.cache_key(
            parse({name.replace("__", "."): value for name, value in changes.items()}), "train", share
        )

    assert key(run__seed=1) == key(run__seed=2)
    for share, changes in ((DatasetShard(0, 2), {}), (None, {"task__examples-per-site": 5})):
        assert key(share, run__seed=1, **changes) != key(share, run__seed=2, **changes)
    assert key(DatasetShard(0, 2)) != key(DatasetShard(1, 2))
    assert key(**{"task__max-tokens": 40}) != key()
