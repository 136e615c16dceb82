"""`fedveil generate`, `evaluate` and `merge` on runs made without a federation, and on folders that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from fedveil import rng, strategies, tasks
from fedveil.cards import collect as cards
from fedveil.config import parse
from fedveil.console.main import main
from fedveil.contract.method import FederatedState, ServerTrained
from fedveil.models import bundled, library_logging
from fedveil.records.tensor_state import load_state, save_state
from tests.conftest import ROOT
from tests.fedveil.cards.made import card

DATA = ROOT / "data" / "e2e"
SEEING = {"task.name": "vision-language", "task.max-tokens": 64, "evaluate.max-new-tokens": 5}


def made(folder: Path, std: float = 0.05, **changes) -> Path:
    """A run folder with weights that differ from the base's."""
    config = parse({"evaluate.max-new-tokens": 8, **changes})
    method = strategies.create_method(config.method.name, config.method.params)
    adapter = method.server_adapter if isinstance(method, ServerTrained) else method.adapter
    weights = tasks.load_task(config, adapter, "cpu").initial(rng.initial_stream(0, "weights"))
    generator = torch.Generator().manual_seed(5)
    moved = {n: w + std * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_state(FederatedState(moved), folder / "final" / "server.safetensors")
    (folder / "config.json").write_text(json.dumps({"config": config.flat()}))
    return folder


def picture(file: Path) -> Path:
    pixels = np.random.default_rng(3).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def said(capsys, *arguments: object) -> str:
    assert main([str(a) for a in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.rstrip("\n")


def refused(capsys, *arguments: object) -> str:
    assert main([str(a) for a in arguments]) == 2
    return capsys.readouterr().err


def merged(folder: Path):
    with library_logging.quiet_libraries():
        return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("fields", ["adapter = {rank = 4}", 'adapter = {kind = "all"}'])
def test_a_merged_folder_writes_in_transformers_what_generate_writes(fields, tmp_path, capsys):
    prompt = "name[Alimentum], area[city centre], familyFriendly[no]"
    run = made(tmp_path / "run", **{"method.name": "fedavg", "method.params": fields})
    first, second = said(capsys, "generate", run, "--prompt", prompt, "--prompt", "name[Aromi]").splitlines()
    assert first.startswith(f"{prompt}: ")
    assert second.startswith("name[Aromi]: ")
    assert said(capsys, "generate", run, "--prompt", prompt) == first.removeprefix(f"{prompt}: ")
    assert said(capsys, "merge", run, tmp_path / "whole").splitlines()[0] == str(tmp_path / "whole")
    model, tokenizer = merged(tmp_path / "whole")
    given = tokenizer(f"{prompt}\n", return_tensors="pt")
    with library_logging.quiet_libraries():
        out = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given.input_ids.shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True).strip()
    assert text == first.removeprefix(f"{prompt}: ")
    changed = said(capsys, "generate", run, "--prompt", prompt, "--max-new-tokens", 2)
    assert len(changed) < len(text)
    assert text.startswith(changed)
    assert "OUT: expected a new or empty folder" in refused(capsys, "merge", run, tmp_path / "whole")


@pytest.mark.long
def test_the_card_goes_with_a_merged_model_without_the_signatures_of_other_files(tmp_path, capsys):
    run = made(tmp_path / "run", **{"method.name": "fedavg", "method.params": "adapter = {rank = 2}"})
    assert said(capsys, "merge", run, tmp_path / "bare").splitlines() == [
        str(tmp_path / "bare"),
        f"there is no privacy card, because the run has none; fedveil card make {run} writes one",
    ]
    (run / "final" / "adapter_config.json").write_text("{}")
    cards.write_card(run / "final", card(tmp_path))
    (run / "final" / "privacy.dsse.json").write_text("{}")
    assert said(capsys, "merge", run, tmp_path / "whole") == str(tmp_path / "whole")
    for name in ("privacy.json", "PRIVACY.md"):
        assert (tmp_path / "whole" / name).read_bytes() == (run / "final" / name).read_bytes()
    page = (tmp_path / "whole" / "README.md").read_text()
    assert "Loaded with transformers: `from_pretrained(folder)`" in page
    assert "library_name: transformers" in page
    assert not (tmp_path / "whole" / "privacy.dsse.json").exists()
    (run / "final" / "privacy.json").write_text("{}")
    assert "not a privacy card of version 1" in refused(capsys, "merge", run, tmp_path / "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.long
def test_pictures_are_captioned_and_asked_about(tmp_path, capsys):
    run, file = made(tmp_path / "run", 0.4, **SEEING), picture(tmp_path / "a.png")
    answers = {"Describe this image concisely.": said(capsys, "generate", run, "--image", file)}
    for words in ("What shape is it?", "name[Aromi] 1 2 3"):
        answers[words] = said(capsys, "generate", run, "--image", file, "--prompt", words)
    assert len(set(answers.values())) > 1
    said(capsys, "merge", run, tmp_path / "whole")
    with library_logging.quiet_libraries():
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole").eval()
        processor = AutoProcessor.from_pretrained(tmp_path / "whole")
        for words, text in answers.items():
            content = [{"type": "image"}, {"type": "text", "text": words}]
            asked = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            given = processor(images=[Image.open(file)], text=[asked], return_tensors="pt")
            out = model.generate(**given, max_new_tokens=5, do_sample=False)[0, given.input_ids.shape[1] :]
            assert processor.tokenizer.decode(out, skip_special_tokens=True).strip() == text
    assert "--image: expected at least one" in refused(capsys, "generate", run, "--prompt", "What?")
    (tmp_path / "b.png").write_bytes(b"no image")
    assert "b.png" in refused(capsys, "generate", run, "--image", tmp_path / "b.png")


@pytest.mark.long
def test_evaluate_gives_the_scores_of_the_runs_own_evaluation(tmp_path, capsys):
    run = made(tmp_path / "run", **{"method.params": "adapter = {rank = 4}"})
    scores = json.loads(said(capsys, "evaluate", run, "--data", DATA, "--eval-examples", 3, "--json"))
    config = parse(json.loads((run / "config.json").read_text())["config"] | {"evaluate.eval-examples": 3})
    task = tasks.load_task(config, strategies.create_method("fedrand", config.method.params).adapter, "cpu")
    weights = load_state(run / "final" / "server.safetensors").tensors
    assert scores == task.evaluate(weights, task.examples(DATA, "test"), generate=True)
    short = said(capsys, "evaluate", run, "--data", DATA, "--eval-examples", 3, "--loss-only", "--split", "test")
    assert f"{scores['loss']:.4f}" in short
    assert "bleu" not in short
    assert f"run on {DATA}, test: at most 3 of " in short


def test_evaluate_scores_all_rows_whatever_the_run_itself_scored(tmp_path, capsys):
    run = made(tmp_path / "run", **{"method.params": "adapter = {rank = 4}", "evaluate.eval-examples": 2})
    rows = (DATA / "test.jsonl").read_text().splitlines()[:12]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    stdout = said(capsys, "evaluate", run, "--data", tmp_path / "rows.jsonl", "--loss-only")
    assert f"run on {tmp_path}/rows.jsonl, test: 12 examples\n" in stdout
    config = parse(json.loads((run / "config.json").read_text())["config"] | {"evaluate.eval-examples": 12})
    task = tasks.load_task(config, strategies.create_method("fedrand", config.method.params).adapter, "cpu")
    weights = load_state(run / "final" / "server.safetensors").tensors
    loss = task.evaluate(weights, task.examples(tmp_path / "rows.jsonl", "test"), generate=False)["loss"]
    assert f"{loss:.4f}" in stdout


def test_a_prefix_writes_and_cannot_be_merged(tmp_path, capsys):
    fields = "distil_steps = 0\nadapter = {cells = 2, length = 4}"
    run = made(tmp_path / "run", **{"method.name": "fedsp", "method.params": fields, "task.max-tokens": 32})
    assert said(capsys, "generate", run, "--prompt", "name[Aromi]")
    assert "so it cannot be merged; load final" in refused(capsys, "merge", run, tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_run_that_writes_no_texts_is_refused(tmp_path, capsys):
    run = made(tmp_path / "run", **{"task.name": "image-classification", "method.params": "adapter = {rank = 2}"})
    assert "image-classification" in refused(capsys, "generate", run, "--prompt", "a")


def test_what_a_text_model_does_not_take_is_said(tmp_path, capsys):
    run, file = made(tmp_path / "run", **{"method.params": "adapter = {rank = 2}"}), picture(tmp_path / "a.png")
    assert "--prompt: this run's model reads only text" in refused(capsys, "generate", run, "--image", file)
    assert "found 0 prompts and 0 images" in refused(capsys, "generate", run)
    assert "max-new-tokens" in refused(capsys, "generate", run, "--prompt", "a", "--max-new-tokens", 0)


def test_another_base_is_named_on_the_command_line(tmp_path, capsys):
    run = made(tmp_path / "run", **{"method.params": "adapter = {rank = 2}"})
    content = json.loads((run / "config.json").read_text())
    content["config"]["task.model"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(content))
    assert "task.model" in refused(capsys, "generate", run, "--prompt", "a")
    assert said(capsys, "generate", run, "--prompt", "a", "--base", bundled.bundled_folder("text-generation"))


def test_a_folder_that_is_no_run_or_a_hostile_one_gets_an_error_in_words(tmp_path, capsys):
    run = made(tmp_path / "run", **{"method.params": "adapter = {rank = 2}"})
    asked = ("generate", run, "--prompt", "a")
    weights = run / "final" / "server.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"\x55")
    assert "server.safetensors: cannot read a state file" in refused(capsys, *asked)
    save_state(FederatedState({"h.0.attn.c_attn.lora_A": torch.zeros(3)}), weights)
    assert "weights: the tensor " in refused(capsys, *asked)
    weights.unlink()
    assert "a run writes when it ends" in refused(capsys, *asked)
    for text, word in (
        ('{"config": [1]}', "expected a run config"),
        ('{"config": {"method.name": "\\u001b[2J"}}', "method.name"),
        ('{"config": {"\\u001b[2J": 1}}', "unknown key"),
        (" " * (1 << 20) + "{}", "expected at most 1048576 bytes"),
        ("{", "expected JSON"),
    ):
        (run / "config.json").write_text(text)
        words = refused(capsys, *asked)
        assert word in words
        assert "\x1b" not in words
    (run / "config.json").unlink()
    assert "expected a run's status.json or config.json, found neither" in refused(capsys, *asked)
    (run / "status.json").write_text("{}")
    assert "expected the config.json of a run that has started" in refused(capsys, *asked)


def test_no_run_is_said_alike_by_every_command_and_before_torch_is_loaded(tmp_path):
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "status.json").write_text("{}")
    code = f"""
import sys
from fedveil.console.main import main
for folder in {[str(tmp_path / name) for name in ("gone", "runs")]}:
    for command, *more in (["generate"], ["evaluate", "--data", "x"], ["merge", "out"], ["report"], ["audit"]):
        assert main([command, folder, *more]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    begins = f"error: run folder {tmp_path}/"
    expected = ": expected a run's status.json or config.json, found "
    assert set(done.stderr.splitlines()) == {
        f"{begins}gone{expected}no such folder; fedveil status lists the runs in a folder",
        f"{begins}runs{expected}runs inside it; name one: {tmp_path}/runs/first, {tmp_path}/runs/second",
    }
