"""The tiny base: where it is found, its training data, and the reproducibility of its script."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from fedveil import tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.errors import TaskError
from fedveil.models import bundled
from tools.tiny import text_generation as script

TEXT, NAME = "text-generation", "tiny-text-generation"
ROOT = Path(__file__).parents[3]


def fake(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in bundled.FILES:
        (folder / name).write_text("{}")
    return folder


def test_the_bundled_base_is_whole_and_small():
    files = list(bundled.bundled_folder(TEXT).iterdir())
    assert {f.name for f in files} >= {*bundled.FILES, "README.md"}
    assert sum(f.stat().st_size for f in files) < 4_000_000


def test_the_environment_goes_first(tmp_path, monkeypatch):
    monkeypatch.setenv(bundled.ASSETS_VARIABLE, str(tmp_path))
    assert bundled.bundled_folder(TEXT) != tmp_path / NAME  # empty: the next place is taken
    fake(tmp_path / NAME)
    assert bundled.bundled_folder(TEXT) == tmp_path / NAME


def test_an_app_copy_without_weights_finds_the_installed_one(tmp_path, monkeypatch):
    """In a running app this module is the bundle's: json may be beside it, the weights are not."""
    app = tmp_path / "app" / "fedveil"
    partial = fake(app / "assets" / NAME)
    (partial / "model.safetensors").unlink()
    monkeypatch.setattr("fedveil.__path__", [str(app)])
    monkeypatch.delenv(bundled.ASSETS_VARIABLE, raising=False)
    site = tmp_path / "site-packages"
    monkeypatch.setattr("sys.path", [str(tmp_path / "app"), str(site)])
    installed = fake(site / "fedveil" / "assets" / NAME)
    monkeypatch.setattr(bundled, "_installed_roots", lambda: iter(()))
    assert bundled.bundled_folder(TEXT) == installed


def test_an_editable_install_is_followed_to_its_checkout(tmp_path, monkeypatch):
    checkout = tmp_path / "check out"
    installed = fake(checkout / "fedveil" / "assets" / NAME)

    class Distribution:
        def locate_file(self, path: str) -> Path:
            return tmp_path / "site-packages" / path

        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}})

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Distribution())
    monkeypatch.setattr("fedveil.__path__", [str(tmp_path / "app" / "fedveil")])
    monkeypatch.delenv(bundled.ASSETS_VARIABLE, raising=False)
    monkeypatch.setattr("sys.path", [])
    assert bundled.bundled_folder(TEXT) == installed


def test_nowhere_is_none_and_a_task_that_needs_one_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "_assets", lambda: iter([tmp_path]))
    assert bundled.bundled_folder(TEXT) is None
    task = tasks.load_task(parse({}), LoraAdapter(), "cpu")
    with pytest.raises(
        TaskError, match=r'tiny base of "text-generation" is not installed; install fedveil .*FEDVEIL_ASSETS'
    ):
        task.spec  # noqa: B018


def test_the_demo_data_shares_nothing_with_what_the_base_saw():
    """The rule by hand: sha256("") = e3b0...b855, and 0x...b855 mod 10 comes from the whole number."""
    assert script.is_public("") is (
        int("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 16) % 10 in (8, 9)
    )
    for split in ("train", "test"):
        rows = script.read_rows(ROOT / "data" / "e2e" / f"{split}.jsonl")
        assert len(rows) > 1000
        assert not any(script.is_public(row["mr"]) for row in rows)
    size = sum(f.stat().st_size for f in (ROOT / "data" / "e2e").iterdir())
    assert size < 700_000


def test_no_paragraph_holds_a_meaning_representation_with_its_sentence():
    rows = [{"mr": f"name[N{i // 3}], area[A]", "ref": f"N{i // 3} text {i}."} for i in range(12)]
    texts = script.paragraphs(rows, random.Random(1))
    assert not any("[" in text and "." in text for text in texts)
    lines = sorted(line for text in texts for line in text.split("\n") if "[" not in line)
    assert lines == sorted(row["ref"] for row in rows)


@pytest.mark.long
def test_the_script_repeats_itself(tmp_path):
    rows = script.read_rows(ROOT / "data" / "e2e" / "train.jsonl")
    # The bundled rows are all private; a changed mr is public with probability 0.2.
    public = [
        row | {"mr": mr} for row in rows[:300] for n in range(20) if script.is_public(mr := f"{row['mr']}, n[{n}]")
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in public))
    losses = [script.make(tmp_path, tmp_path / name, seed=5, steps=3) for name in ("one", "two")]
    assert losses[0] == losses[1]
    for name in bundled.FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    shutil.rmtree(tmp_path / "one")
