"""`fedveil doctor --set task.model=FOLDER`: the plan, and whether it fits, before anything is loaded."""

from __future__ import annotations

import json

import psutil
import pytest

from fedveil.console.doctor import memory_plan
from fedveil.console.main import main
from fedveil.models import loading
from tests.fedveil.models.planning.test_meta_model import B8, B70, SHARED

FOUR_BITS = [
    "train.quantized-base=4bit",
    "train.precision=bf16",
    "train.gradient-checkpointing=true",
    "train.batch-size=1",
]


def folder(path, content):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **SHARED, **content}))
    return path


def doctor(*settings, options=()):
    return main(["doctor", *options, *(word for text in settings for word in ("--set", text))])


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_: pytest.fail("a base was loaded"))
    monkeypatch.setattr(memory_plan.training_flops, "measure_flops", lambda bf16: 2e12)


@pytest.mark.long
def test_an_8_b_base_of_four_bits_fits_a_gpu_of_24_gb_and_a_70_b_base_does_not(tmp_path, capsys):
    eight, seventy = folder(tmp_path / "8b", B8), folder(tmp_path / "70b", B70)
    options = ["--gpu-gb", "24", "--tflops", "100", "--rows", "2000"]
    assert doctor(f"task.model={eight}", *FOUR_BITS, options=options) == 0
    stdout = capsys.readouterr().out
    assert "ok    memory                 fits: needs" in stdout
    assert "8,030,261,248 parameters" in stdout
    assert "base, NF4, the rest bf16               5.703 GB" in stdout
    assert "training, 2,000 examples per round" in stdout
    assert "at 100 TFLOP/s (as given): an estimate" in stdout
    assert "  fedrand (this run)    down 83,886,080; up 39,845,888 (A) or 44,040,192 (B)\n" in stdout
    assert "  fedavg                down 83,886,080; up 83,886,080\n" in stdout
    assert doctor(f"task.model={seventy}", *FOUR_BITS, options=options[:2]) == 1
    stdout = capsys.readouterr().out
    assert "fail  memory                 does not fit: needs" in stdout
    assert "use a smaller base" in stdout
    assert "to get seconds, set --tflops" in stdout


@pytest.mark.long
def test_a_70_b_base_in_bf16_fits_four_gpus_of_80_gb_if_it_is_divided(tmp_path, capsys):
    settings = [
        f"task.model={folder(tmp_path / '70b', B70)}",
        "train.precision=bf16",
        "train.gradient-checkpointing=true",
    ]
    options = ["--gpu-gb", "80", "--gpus", "4", "--tflops", "100"]
    assert doctor(*settings, options=options) == 1
    assert "on each, has 4 GPUs of 80 GB each" in capsys.readouterr().out
    assert doctor(*settings, options=[*options, "--shard-base"]) == 0
    stdout = capsys.readouterr().out
    assert "of rank 0 of 4 processes" in stdout
    assert "base, bf16, one of 4 shards" in stdout
    assert "unsharded base of each process, while loading 141." in stdout
    assert "at 100 TFLOP/s on each GPU (as given)" in stdout
    assert doctor(*settings, "train.quantized-base=4bit", options=[*options, "--shard-base"]) == 1
    assert 'train.quantized-base: shard-base = true requires "none"' in capsys.readouterr().out


def test_a_base_is_divided_among_several(capsys):
    assert doctor("task.model=tiny", options=["--shard-base"]) == 1
    assert "--shard-base: expected --gpus above 1" in capsys.readouterr().out


def test_processes_of_a_machine_without_gpus_would_share_its_memory(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert doctor("task.model=tiny", options=["--gpus", "2"]) == 1
    stdout = capsys.readouterr().out
    assert "--gpus: expected at most 0 (this machine's GPUs), or --gpu-gb with it, found 2" in stdout


@pytest.mark.long
def test_what_would_fit_is_named_and_fits(tmp_path, capsys):
    eight = folder(tmp_path / "8b", B8)
    assert doctor(f"task.model={eight}", options=["--gpu-gb", "12"]) == 1
    verdict = next(line for line in capsys.readouterr().out.splitlines() if " memory " in line)
    words = verdict.partition("; with ")[2].rpartition(", it needs ")[0]
    changed = [text.replace(" = ", "=") for text in words.split(", ")]
    assert "train.quantized-base=4bit" in changed
    assert doctor(f"task.model={eight}", *changed, options=["--gpu-gb", "12"]) == 0
    assert doctor(f"task.model={eight}", *changed[1:], options=["--gpu-gb", "12"]) == 1  # none of them is too much


@pytest.mark.long
def test_this_machine_is_planned_for_by_its_own_memory(monkeypatch, capsys):
    assert doctor("task.model=tiny") == 0
    stdout = capsys.readouterr().out
    assert "free in this machine's main memory" in stdout
    assert "Python and libraries" in stdout
    assert "measured on a matrix product" in stdout
    assert "secure.enabled" not in stdout
    assert doctor("task.model=tiny", "secure.enabled=true") == 0
    assert "unmasked; with secure.enabled an upload holds integers" in capsys.readouterr().out
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 500_000_000}))
    assert doctor("task.model=tiny") == 1
    assert "has 0.5 GB free in this machine's main memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["task.model=meta/llama"], "planning downloads nothing"),
        (["task.model=tiny", "task.name=image-classification"], 'only "text-generation" can be planned'),
        (["task.model=tiny", "train.quantized-base=4bit", "method.name=fedqsn"], "train.quantized-base: "),
        (
            ["task.model=tiny", "method.name=fedsp"],
            'memory planning supports only "lora", "hadamard-lora" and "all", found "prefix"',
        ),
        (["task.model=/nowhere"], "there is no folder with a model"),
    ],
)
def test_what_cannot_be_planned_is_said_and_fails(settings, words, capsys):
    assert doctor(*settings) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if " memory " in line)
    assert line.startswith("fail")
    assert words in line


def test_a_hostile_config_fails_in_one_line(tmp_path, capsys):
    assert doctor(f"task.model={folder(tmp_path / 'x', {**B8, 'num_hidden_layers': 10**9})}") == 1
    assert "num_hidden_layers: expected a whole number from 1 to 512, found 1000000000" in capsys.readouterr().out


def test_a_base_that_is_not_made_for_so_long_rows_fails(capsys):
    assert doctor("task.model=tiny", "task.max-tokens=193") == 1
    assert "task.max-tokens: expected at most 192, the context of tiny" in capsys.readouterr().out


@pytest.mark.long
def test_the_rows_of_the_data_are_planned_for_where_they_are_known(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"mr": "a", "ref": "b"}\n' * 45)
    data = f"task.data={tmp_path}"
    assert doctor("task.model=tiny", data) == 0
    assert (
        "training, 45 examples per round (all of the data; if sites share it, each has fewer): "
        in capsys.readouterr().out
    )
    assert doctor("task.model=tiny", data, "task.examples-per-site=20") == 0
    assert "training, 20 examples per round (" in capsys.readouterr().out
    assert doctor("task.model=tiny", data, options=["--rows", "30"]) == 0
    assert "training, 30 examples per round: " in capsys.readouterr().out
    assert doctor("task.model=tiny") == 0
    assert "training, 1,000 examples per round (a guess: set --rows): " in capsys.readouterr().out


def test_options_out_of_range_and_a_doctor_without_a_base(capsys):
    assert doctor("task.model=tiny", options=["--gpus", "0"]) == 1
    assert "--gpus: expected a number above 0" in capsys.readouterr().out
    doctor()
    assert " memory " not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--gpu-gb", "--gpus", "--tflops", "--rows"])
def test_what_is_planned_for_is_nothing_without_a_base(option, capsys):
    assert doctor(options=[option, "4"]) == 2
    assert "expected --set task.model=FOLDER with them" in capsys.readouterr().err
