"""Bases that torch.func cannot differentiate per row: `dp.*` is refused with one sentence before the first round."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fedveil import rng, tasks
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.errors import TaskError
from fedveil.models import bundled

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = SIZES | {"intermediate_size": 16, "num_key_value_heads": 2, "max_position_embeddings": 256}
MODELS = {
    "bloom": lambda size: BloomForCausalLM(BloomConfig(vocab_size=size, hidden_size=16, n_layer=1, n_head=2)),
    "mixtral": lambda size: MixtralForCausalLM(MixtralConfig(vocab_size=size, num_local_experts=2, **LLAMA)),
    "llama": lambda size: LlamaForCausalLM(LlamaConfig(vocab_size=size, **LLAMA)),
}


@pytest.fixture(params=MODELS)
def base(request, tmp_path):
    folder = bundled.bundled_folder("text-generation")
    assert folder is not None
    shutil.copytree(folder, tmp_path / "base")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    MODELS[request.param](size).save_pretrained(tmp_path / "base")
    return request.param, tmp_path / "base"


@pytest.mark.parametrize("name", ["text-generation", "text-classification", "token-classification", "preference"])
def test_a_base_without_gradients_of_single_rows_is_refused_as_the_run_begins(base, name):
    kind, folder = base
    keys = {"task.name": name, "task.model": str(folder), "task.max-tokens": 64, "task.source-column": "s"}
    keys |= {"task.target-column": "t", "task.class-names": "a,b" if name.endswith("classification") else ""}
    keys |= {"task.rejected-column": "r"} if name == "preference" else {}
    noisy = {"dp.clip-norm": 1.0, "dp.noise-multiplier": 1.0}
    start = rng.initial_stream(0, "weights")
    assert tasks.load_task(parse(keys), LoraAdapter(rank=2), "cpu").initial(start)
    task = tasks.load_task(parse(keys | noisy), LoraAdapter(rank=2), "cpu")
    if kind == "llama":
        assert task.initial(start)
        return
    with pytest.raises(
        TaskError, match="dp.* requires per-example gradients, but torch.func raises .* for (Bloom|Mixtral)For"
    ):
        task.initial(start)
