"""fedveil bench --dry-run knows and checks the inputs of every preset, and runs nothing."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedveil.console.main import main
from fedveil.errors import ConfigError
from fedveil_bench import command, requirements, runner
from fedveil_bench.common import data, pictures
from fedveil_bench.common.data import DataRequirement
from fedveil_bench.runner import BenchOptions
from tests.conftest import ROOT

FORMS = [(name, form) for name in runner.list_presets() for form in runner.check_forms(name)]
BUNDLED = {"e2e"}


def named(settings):
    """Every name of a folder in the settings, at any depth. What core/faults calls data are kinds of rows."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from named(value) if key != "cases" else ()
        elif key == "parts":
            for part in value:
                yield from named(part)
        elif key in ("data", "test", "shifted", "task.model") and isinstance(value, str):
            yield value
        elif key == "data":
            yield from value


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_what_a_preset_names_is_needed_and_it_is_said_where_it_comes_from(name, form):
    preset = runner.read_preset(name, form)
    needed = {need.name for need in requirements.preset_needs(preset)}
    assert needed == {pictures.find_source(found, "train")[0] for found in named(preset["settings"])} - {"tiny"}
    assert needed <= set(requirements.SOURCES) | BUNDLED


def test_the_page_lists_every_preset_with_the_folders_of_its_full_form():
    lines = [line for line in (ROOT / "benchmarks" / "README.md").read_text().splitlines() if line.startswith("| `")]
    cells = [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")] for line in lines]
    listed = {name: set(folders) for presets, _, folders in cells for name in presets}
    assert sum(len(presets) for presets, *_ in cells) == len(listed)
    assert listed == {
        n: {need.name for need in requirements.preset_needs(runner.read_preset(n, "full"))} - BUNDLED
        for n in runner.list_presets()
    }


@pytest.mark.parametrize(
    ("name", "form", "folder", "splits"),
    [
        ("fedqsn/table1", "full", "dart", ("test", "dev")),
        ("fedqsn/table1", "small", "viggo", ("train", "validation", "test")),
        ("fedqsn/distributed", "small", "viggo", ("train", "test")),
        ("lora/dart", "full", "dart", ("test", "dev")),
        ("fedrand/table1", "full", "coco2017-caption", ("train", "test")),
        ("fedrand/table1", "small", "caltech101", ("train", "test")),
        ("fedrand/table4", "small", "cifar10", ("test",)),
        ("random_binary/accuracy", "full", "cifar10", ("train", "test")),
        ("random_binary/april", "full", "cifar10", ("test",)),
        ("secure/attacks", "full", "e2e", ("train",)),
        ("core/rows", "full", "e2e_nlg", ("train",)),
        ("dp_fpl/mia", "full", "clip-vit-base-patch16", ()),
    ],
)
def test_of_a_folder_the_files_that_are_read_are_needed(name, form, folder, splits):
    found = {need.name: need for need in requirements.preset_needs(runner.read_preset(name, form))}
    assert found[folder].splits == splits
    by_line = name.startswith("fedqsn") or name in ("core/rows", "lora/dart")
    assert found[folder].suffixes == ((".jsonl",) if by_line else data.ROWS)


class Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "form"), [each for each in FORMS if requirements.preset_needs(runner.read_preset(*each))]
)
def test_what_a_runner_opens_first_is_what_it_needs(name, form, monkeypatch):
    """A runner is started for real, and stopped where it asks for a folder."""

    def folder(asked):
        raise Asked(asked)

    monkeypatch.setattr(data, "find_data_folder", folder)
    preset = runner.read_preset(name, form)
    module = runner.load_runner(preset)
    settings, options = {**preset["settings"], **most(preset)}, BenchOptions(form=form, device="cpu")
    by_seed = hasattr(module, "of_seed")
    start = (
        partial(module.of_seed, settings, 0, options) if by_seed else partial(module.run_benchmark, settings, options)
    )
    with pytest.raises(Asked) as asked:
        start()
    assert str(asked.value) in {need.name for need in requirements.preset_needs(preset)}


def most(preset):
    """What secure.attacks adds for its seeds, and fedrand.on_texts where there is one learning rate."""
    settings = preset["settings"]
    if preset["runner"] == "fedrand.on_texts" and "learning_rates" not in settings:
        return {"chosen": dict.fromkeys(settings["methods"], settings["config"]["train.learning-rate"])}
    return {"pictures": {**settings["pictures"], "most_seeds": 1}} if "pictures" in settings else {}


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_preset_is_looked_at_and_nothing_runs(name, form, monkeypatch, tmp_path):
    """With an empty folder of data all that is not bundled is missing, by name and with the way to it."""
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    preset = runner.read_preset(name, form)
    monkeypatch.setattr(runner.load_runner(preset), "run_benchmark", None)
    found = requirements.check_ready(name, BenchOptions(form=form, device="cpu"), ROOT / "benchmarks" / "results")
    for need in requirements.preset_needs(preset):
        said = [text for text in found.missing if text.startswith(f"data {need.name}: expected")]
        assert [requirements.SOURCES[need.name] in text for text in said] == ([] if need.name in BUNDLED else [True])
    assert "device: cpu" in found.there
    assert found.time.startswith("time: ")


def test_a_device_and_packages_that_are_not_there_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "ray" else real(name, *of))
    found = requirements.check_ready("core/simulation", BenchOptions(form="quick", device="cuda"), tmp_path)
    assert [text.partition(": ")[0] for text in found.missing] == ["package ray", "device"]
    assert "lock/simulation.txt" in found.missing[0]
    assert found.there == []


def rows(at: Path, **files: bytes) -> None:
    at.mkdir(exist_ok=True)
    for name, content in files.items():
        (at / name.replace("_", ".")).write_bytes(content)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"train_jsonl": b'{"mr": 1}\n'}, "test.jsonl or test.parquet"),
        ({"train_jsonl": b'{"mr": 1}\n', "test_jsonl": b""}, "cannot|can be read"),
        ({"train_jsonl": b"[1]\n", "test_jsonl": b"{}\n"}, "train.jsonl, whose first line is not a row"),
        ({"train_parquet": b"PAR1....", "test_jsonl": b"{}\n"}, "train.parquet, which is not a complete parquet file"),
        ({"train_parquet": b"P", "test_jsonl": b"{}\n"}, "can be read"),
    ],
)
def test_rows_that_are_missing_or_broken_are_named(files, said, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    rows(tmp_path / "viggo", **files)
    with pytest.raises(ConfigError, match=said):
        data.describe_files(DataRequirement("viggo", ("train", "test")))


def test_rows_that_are_there_are_named_with_their_size(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    rows(tmp_path / "viggo", train_jsonl=b'{"mr": 1}\n', test_parquet=b"PAR1" + bytes(300_000) + b"PAR1")
    assert data.describe_files(DataRequirement("viggo", ("train", "test"))).endswith(
        "train.jsonl 0.0 MB, test.parquet 0.3 MB"
    )
    with pytest.raises(ConfigError, match=r"test\.jsonl in"):
        data.describe_files(DataRequirement("viggo", ("train", "test"), (".jsonl",)))


def test_a_base_has_a_config_and_all_files_of_its_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    base = tmp_path / "gpt2-medium"
    base.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        data.describe_files(DataRequirement("gpt2-medium"))
    (base / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="safetensors"):
        data.describe_files(DataRequirement("gpt2-medium"))
    (base / "model-1.safetensors").write_bytes(bytes(20_000_000))
    assert data.describe_files(DataRequirement("gpt2-medium")).endswith("gpt2, 0.02 GB of weights")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        data.describe_files(DataRequirement("gpt2-medium"))


RESULT = {
    "form": "quick", "commit": "abc", "environment": {"cpu": "a CPU ", "cores": 2, "gpu": None}, "verdicts": [],
    "rows": [{"name": "x", "seconds": 20.5}, {"name": "y"}], "differences": ["this run: 4 clients, 3 seeds"],
}  # fmt: skip
GPU = {"environment": {**RESULT["environment"], "gpu": "a GPU"}}


@pytest.mark.parametrize(
    ("changes", "options", "device", "said"),
    [
        ({"seconds": 90.0}, BenchOptions(form="quick"), "cpu", "took 90 s; about 60 s on such a machine with 2 seeds"),
        ({"seconds": 90.0}, BenchOptions(form="quick", seeds=1), "cpu", "about 30 s on such a machine with 1 seed"),
        ({"seconds": 90.0}, BenchOptions(), "cpu", "took 90 s; the full form was not measured"),
        ({"seconds": 90.0}, BenchOptions(form="quick"), "cuda", "took 90 s; on a GPU it was not measured"),
        ({"seconds": 90.0, **GPU}, BenchOptions(form="quick"), "cuda", "on a GPU, commit abc: took 90 s; about 60 s"),
        ({"seconds": 90.0, **GPU}, BenchOptions(form="quick"), "cpu", "on a CPU it was not measured"),
        (
            {"seconds": 90.0, "differences": []},
            BenchOptions(form="quick"),
            "cpu",
            "the seconds of 2 seeds are unknown",
        ),
        ({}, BenchOptions(form="quick"), "cpu", "with 3 seeds, on 2 cores of a CPU, commit abc: its rows took 20 s"),
        ({"rows": []}, BenchOptions(form="quick"), "cpu", "its result has no seconds"),
    ],
)
def test_the_time_is_the_last_run_s_and_says_what_was_not_measured(changes, options, device, said, tmp_path):
    (tmp_path / "a_b.json").write_text(json.dumps(RESULT | changes))
    assert said in requirements.recorded_time("a/b", {"seeds": 2}, options, tmp_path, device)
    assert "unknown, no result" in requirements.recorded_time("a/c", {}, options, tmp_path, device)


def test_a_result_of_make_gpu_counts_for_a_gpu_alone(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "a_b.json").write_text(json.dumps(RESULT | {"seconds": 90.0}))
    (tmp_path / "gpu" / "a_b.json").write_text(json.dumps(RESULT | GPU | {"seconds": 9.0}))
    assert "took 9 s" in requirements.recorded_time("a/b", {}, BenchOptions(form="quick"), tmp_path, "cuda")
    assert "took 90 s" in requirements.recorded_time("a/b", {}, BenchOptions(form="quick"), tmp_path, "cpu")
    (tmp_path / "a_b.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        requirements.recorded_time("a/b", {}, BenchOptions(form="quick"), tmp_path, "cpu")


def test_a_quick_result_of_its_own_folder_counts_for_a_quick_run_alone(tmp_path):
    (tmp_path / "quick").mkdir()
    (tmp_path / "a_b.json").write_text(json.dumps(RESULT | {"form": "small", "seconds": 90.0}))
    (tmp_path / "quick" / "a_b.json").write_text(json.dumps(RESULT | {"seconds": 9.0}))
    assert "took 9 s" in requirements.recorded_time("a/b", {}, BenchOptions(form="quick"), tmp_path, "cpu")
    assert "took 90 s" in requirements.recorded_time("a/b", {}, BenchOptions(form="small"), tmp_path, "cpu")


def test_a_result_of_before_there_were_forms_is_no_result(tmp_path):
    old = {key: value for key, value in RESULT.items() if key != "form"} | {"quick": True}
    (tmp_path / "a_b.json").write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=r"a_b\.json: expected a result with its \"form\""):
        requirements.recorded_time("a/b", {}, BenchOptions(), tmp_path, "cpu")


def test_the_command_ends_with_1_where_something_is_missing_and_with_2_where_there_is_no_such_preset(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    before = {file.name: file.stat().st_mtime_ns for file in (ROOT / "benchmarks" / "results").iterdir()}
    assert main(["bench", "fedqsn/distributed", "--dry-run", "--quick", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("fedveil bench fedqsn/distributed --quick --device cpu: NOT READY\n")
    assert "MISSING data viggo: expected a folder" in said
    rows(tmp_path / "viggo", train_jsonl=b"{}\n", test_jsonl=b"{}\n")
    assert main(["bench", "fedqsn/distributed", "--dry-run", "--quick", "--device", "cpu"]) == 0
    assert "quick --device cpu: ready\n" in capsys.readouterr().out
    assert main(["bench", "fedqsn/nothing", "--dry-run"]) == 2
    assert main(["bench", "--dry-run", "--small", "--device", "cpu"]) == 1
    listed = re.findall(r"^fedveil bench (\S+) --small", capsys.readouterr().out, re.MULTILINE)
    assert listed == [name for name in runner.list_presets() if "small" in runner.check_forms(name)]
    assert {file.name: file.stat().st_mtime_ns for file in (ROOT / "benchmarks" / "results").iterdir()} == before


def test_a_real_run_without_its_data_says_where_each_folder_comes_from_and_trains_nothing(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))
    name = "fedqsn/table1"
    monkeypatch.setattr(runner.load_runner(runner.read_preset(name, "full")), "run_benchmark", None)
    assert main(["bench", name, "--quick", "--out", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith(f"; check again with fedveil bench {name} --quick --dry-run, which runs nothing\n")
    lacking = {need.name for need in requirements.preset_needs(runner.read_preset(name, "quick"))} - BUNDLED
    assert lacking
    for folder in lacking:
        assert f"data {folder}: expected" in error
        assert requirements.SOURCES[folder] in error
    assert list(tmp_path.iterdir()) == []


def test_a_run_to_see_it_work_takes_no_measured_result_s_place(monkeypatch, tmp_path, capsys):
    """Of a preset without a small form the quick one is what is measured."""
    monkeypatch.setattr(command, "_results", lambda: tmp_path)
    monkeypatch.setattr(requirements, "require_ready", lambda name, options: None)
    monkeypatch.setattr(
        runner,
        "load_runner",
        lambda preset: SimpleNamespace(run_benchmark=lambda *_: runner.BenchOutcome([{"name": "x"}])),
    )
    (tmp_path / "dp_fpl_table3.json").write_text("measured")
    for name, form in (("dp_fpl/table3", "--quick"), ("dp_fpl/table2", "--small"), ("fedrand/quantised", "--quick")):
        assert main(["bench", name, form]) == 0
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.json")}
    assert written == {"dp_fpl_table3.json", "quick/dp_fpl_table3.json", "dp_fpl_table2.json", "fedrand_quantised.json"}
    assert (tmp_path / "dp_fpl_table3.json").read_text() == "measured"
    assert main(["bench", "dp_fpl/nothing", "--quick"]) == 2
    assert main(["bench", "fedrand/quantised", "--small"]) == 2
    assert "which has full and quick" in capsys.readouterr().err


def test_a_preset_whose_data_are_here_is_run(monkeypatch):
    monkeypatch.setattr(data, "describe_files", lambda need: f"{need.name}: here")
    requirements.require_ready("fedqsn/table1", BenchOptions(form="quick"))
