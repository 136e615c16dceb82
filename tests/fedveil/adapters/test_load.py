"""Prompts and proxies loaded from their own files give the same model; bad files are refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPModel, CLIPProcessor

from fedveil import rng, tasks
from fedveil.adapters import load
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.config import parse
from fedveil.errors import StateError
from fedveil.models import bundled, library_logging
from fedveil.models.clip import class_features
from tests.fedveil.adapters.test_export import attached, filled, gpt2, logits

NAMES = ["circle", "red square", "star"]


def clip():
    with library_logging.quiet_libraries():
        folder = bundled.bundled_folder("clip-prompt")
        return CLIPModel.from_pretrained(folder, dtype=torch.float32).eval(), CLIPProcessor.from_pretrained(folder)


@pytest.mark.parametrize("form", ["one", "sum", "factored", "transport"])
def test_a_prompt_gives_the_tasks_own_texts(form, tmp_path):
    config = parse({"task.name": "clip-prompt", "task.class-names": ", ".join(NAMES)})
    task = tasks.load_task(config, PromptAdapter(5, form=form, std=0.3), "cpu")
    weights = task.initial(rng.initial_stream(1, "weights"))
    task.save(weights, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter.json", "adapter.safetensors"]
    model, processor = clip()
    features = class_features(tmp_path, model, processor.tokenizer, NAMES)
    with torch.no_grad():
        wanted = task.texts(weights)
        other = task.texts({name: 0 * w for name, w in weights.items()})
    torch.testing.assert_close(features, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted, other, atol=1e-3)
    assert json.loads((tmp_path / "adapter.json").read_text())["base"] == "fedveil/tiny-clip-prompt"


def proxy(folder) -> torch.Tensor:
    """Writes one; its logits."""
    model, adapter = gpt2(), PrefixAdapter(5, cells=2)
    at, trained = attached(model, adapter)
    adapter.save(folder, at, filled(trained))
    return logits(model)


def test_a_proxy_comes_back_with_its_prefix(tmp_path):
    wanted, model = proxy(tmp_path), gpt2()
    adapter, trained = load.load_adapter(tmp_path, model)
    assert adapter == PrefixAdapter(5, cells=2)
    assert "prefix" in trained
    torch.testing.assert_close(logits(model), wanted, rtol=1e-5, atol=1e-5)


def test_a_prefix_is_no_prompt(tmp_path):
    proxy(tmp_path)
    with pytest.raises(StateError, match='kind "prompt", found "prefix"'):
        class_features(tmp_path, gpt2(), None, NAMES)


@pytest.mark.parametrize(
    "text,word",
    [
        ("{", "expected a base and the fields"),
        ("[" * 10_000, "expected a base and the fields"),
        (json.dumps({"base": "x", "adapter": {"kind": "prompt", "length": 0}}), "at least 1"),
        (json.dumps({"base": "x", "adapter": {"kind": "prefix", "evil": 1}}), "expected a base and the fields"),
        (json.dumps({"base": "x", "adapter": {"kind": "prefix", "length": 10**12}}), "positions"),
        (json.dumps({"base": "x" * 70_000, "adapter": {"kind": "prefix"}}), "at most 65536 bytes"),
    ],
)
def test_a_bad_config_is_refused_before_the_model_is_touched(text, word, tmp_path):
    proxy(tmp_path)
    (tmp_path / "adapter.json").write_text(text)
    model = gpt2()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(StateError, match=word):
        load.load_adapter(tmp_path, model)
    assert [name for name, _ in model.named_parameters()] == names


def test_bad_tensors_are_refused(tmp_path):
    proxy(tmp_path)
    file = tmp_path / "adapter.safetensors"
    for content in (b"", b"\x80\x04pickle" * 100, b"\xff" * 8 + bytes(5000)):
        file.write_bytes(content)
        with pytest.raises(StateError, match="adapter.safetensors"):
            load.load_adapter(tmp_path, gpt2())
    save_file({"prefix": torch.zeros(3, 2), "\x1b[2J": torch.zeros(100)}, file)
    with pytest.raises(StateError, match=r"names and shapes") as refused:
        load.load_adapter(tmp_path, gpt2())
    assert "\x1b" not in str(refused.value)
    with file.open("ab") as more:
        more.truncate(1 << 28)
    with pytest.raises(StateError, match="at most .* bytes"):
        load.load_adapter(tmp_path, gpt2())


def test_what_peft_loads_is_said_so(tmp_path):
    with pytest.raises(StateError, match=r"final/"):
        load.load_adapter(tmp_path, gpt2())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(StateError, match="load this one with PEFT"):
        load.load_adapter(tmp_path, gpt2())
