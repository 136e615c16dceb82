"""Mixtures of experts: which layers get a pair, messages, and PEFT loading each adapter with the same logits."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fedveil.adapters import expert_layers, export, low_rank_pairs
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.residual_lora import ResidualLoraAdapter
from fedveil.errors import ConfigError, StateError
from tests.fedveil.adapters.bases import gpt2
from tests.fedveil.adapters.test_export import attached, filled, logits

# PEFT's own words about transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "intermediate_size": 32, "num_local_experts": 4, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
LAYERS = {
    "mixtral": ATTENTION,
    "qwen2_moe": [*ATTENTION, "down_proj", "gate_proj", "shared_expert_gate", "up_proj"],
    "qwen3_moe": ATTENTION,
    "deepseek_v3": ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"],
    "gpt_oss": ATTENTION,
}
ADAPTERS = {
    "lora": LoraAdapter(rank=2, alpha=3.0),
    "plus-one": HadamardLoraAdapter(rank=2),
    "residual": ResidualLoraAdapter(rank=2),
}


def mixture(family: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | FAMILIES[family])).eval()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.1)
    return model


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_adapter_of_a_mixture_with_the_same_logits(tmp_path, family, kind, caplog):
    with caplog.at_level(logging.WARNING, "fedveil.models"):
        model, trained = attached(mixture(family), ADAPTERS[kind])
    assert sorted({name.rpartition(".")[0].rpartition(".")[2] for name in trained}) == sorted(LAYERS[family])
    weights = filled(trained)
    if kind == "lora":
        experts = sum(p.numel() for p in mixture(family).parameters() if p.ndim == 3)
        assert "weights" in caplog.text
        counted = int(caplog.text.partition("adapter.targets: ")[2].partition(" ")[0].replace(",", ""))
        assert counted == experts + (3 * 32 * (48 + 16) if family == "deepseek_v3" else 0)
    ADAPTERS[kind].save(tmp_path, model, weights)
    wanted = logits(model.model)
    loaded = PeftModel.from_pretrained(mixture(family), str(tmp_path))
    torch.testing.assert_close(logits(loaded), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(mixture(family)), wanted, atol=1e-3)


def test_targets_of_some_layers_stay_those_layers(tmp_path):
    """PEFT would make all layers of a regular expression over one."""
    adapter = LoraAdapter(rank=2, targets=r".*layers\.1\.self_attn\.q_proj")
    model, trained = attached(mixture("mixtral"), adapter)
    assert set(trained) == {f"model.layers.1.self_attn.q_proj.lora_{side}" for side in "AB"}
    adapter.save(tmp_path, model, filled(trained))
    wanted = logits(model.model)
    loaded = PeftModel.from_pretrained(mixture("mixtral"), str(tmp_path))
    torch.testing.assert_close(logits(loaded), wanted, rtol=1e-5, atol=1e-6)


def test_targets_that_peft_reads_as_experts_are_refused():
    for targets in (low_rank_pairs.name_pattern(["q_a_proj", "down_proj"]), r".*\.(gate|up|down)_proj"):
        for adapter in (LoraAdapter(rank=2, targets=targets), ResidualLoraAdapter(rank=2, targets=targets)):
            with pytest.raises(
                ConfigError, match=r"as an expert name in this base, .*; choose from kv_a_proj_with_mqa"
            ):
                adapter.attach(mixture("deepseek_v3"))


def test_a_base_without_experts_says_nothing(caplog):
    with caplog.at_level(logging.WARNING, "fedveil.models"):
        LoraAdapter(rank=2).attach(gpt2())
    assert not caplog.text


def test_files_that_peft_cannot_load_fail_the_run_s_end(tmp_path, monkeypatch):
    model, trained = attached(mixture("mixtral"), LoraAdapter(rank=2))
    weights = filled(trained)
    LoraAdapter(rank=2).save(tmp_path, model, weights)
    config = (tmp_path / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config.replace('"q_proj"', '"experts"'))
    with pytest.raises(StateError, match=r"PEFT cannot load this adapter: ValueError: Target module"):
        export.require_loadable(tmp_path, model)
    (tmp_path / "adapter_config.json").write_text(config)
    export.require_loadable(tmp_path, model)
    tensors = {name: w for name, w in weights.items() if "layers.1.self_attn.q_proj" not in name}
    stored = {f"base_model.model.{name}.weight": w for name, w in tensors.items()}
    stored["base_model.model.other.lora_A.weight"] = torch.ones(2)
    export.adapter_tensors(tmp_path / export.PEFT_WEIGHTS, stored)
    with pytest.raises(StateError, match="2 missing and 1 unknown tensors"):
        export.require_loadable(tmp_path, model)


def test_the_tokens_of_a_vision_transformer_are_no_experts(caplog):
    model = nn.Linear(4, 4)
    model.cls_token, model.position_embeddings = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 5, 4))
    with caplog.at_level(logging.WARNING, "fedveil.models"):
        expert_layers.log_unpaired(model, [""])
        assert not caplog.text
        model.experts = nn.Parameter(torch.zeros(2, 4, 4))
        expert_layers.log_unpaired(model, [""])
    assert "32 of the base's 76 weights" in caplog.text
