"""The pictures of the presets: which of them the federated data contain."""

from __future__ import annotations

import hashlib

import pyarrow.parquet
import pytest

from fedveil.errors import ConfigError
from fedveil.testing import pretraining
from fedveil_bench.common import data, pictures
from fedveil_bench.dp_fpl import federated_prompts


def test_a_picture_is_public_by_the_hash_of_its_path_and_by_its_data():
    """Of "" the SHA-256 is e3b0...b855, 9 modulo 10: the last digit of the whole number, not of what is written."""
    assert int("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 16) % 10 == 9
    assert [pretraining.is_public("", name) for name in ("cifar10", "caltech101", "my-own")] == [True, True, False]
    paths = [f"{i}.jpg" for i in range(300)]
    digits = {path: int.from_bytes(hashlib.sha256(path.encode()).digest()) % 10 for path in paths}
    seen = {name: {path for path in paths if pretraining.is_public(path, name)} for name in pretraining.PUBLIC_DIGITS}
    assert seen == {
        "caltech101": {path for path in paths if digits[path] >= 8},
        "cifar10": {path for path in paths if digits[path] >= 5},
    }


@pytest.mark.parametrize(("name", "public"), [("caltech101", 497), ("cifar10", 5061)])
def test_what_the_tiny_clip_was_made_of_no_site_has(name, public):
    """By the functions of its script and of the presets, on the paths of the slices."""
    try:
        folder = data.find_data_folder(name)
    except ConfigError:
        pytest.skip("the benchmark's data are not here")
    rows = pyarrow.parquet.read_table(folder / "train.parquet", columns=["source_path"]).to_pylist()
    seen = [row for row in rows if pretraining.is_public(row["source_path"], name)]
    federated = [row for row in rows if federated_prompts.is_federated(name, "train", row)]
    assert (len(seen), len(federated)) == (public, len(rows) - public)
    assert all(row not in federated for row in seen)
    assert all(federated_prompts.is_federated(name, "test", row) for row in rows)


def test_a_folder_of_the_user_keeps_every_row():
    """Its rows need no path."""
    assert federated_prompts.is_federated("my-own", "train", {"label": 1})


def test_public_pictures_are_nobody_s():
    try:
        rows = pictures.load_examples("caltech-caption", "train")
    except ConfigError:
        pytest.skip("the benchmark's data are not here")
    assert len(rows) == 1957  # the base was trained on 497 of 2454
    first = pictures.load_examples("caltech-choice", "test")[0]
    assert first["choices"][first["answer"]] == first["label"]
