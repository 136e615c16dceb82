"""Exported adapters load with PEFT and transformers from files alone, and give the same logits."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2LMHeadModel

from fedveil.adapters import export
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.adapters.prompt import PromptAdapter
from fedveil.adapters.residual_lora import ResidualLoraAdapter
from fedveil.contract.adapter import AttachedModel
from fedveil.errors import ConfigError
from fedveil.models import bundled, library_logging
from tests.fedveil.adapters.bases import BASES, gpt2, llava

# PEFT's own words about transformers.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

PAIRS = {
    "lora": LoraAdapter(rank=3, alpha=4.5),
    "rslora with dropout": LoraAdapter(rank=4, alpha=7.0, rslora=True, dropout=0.3),
    "some layers": LoraAdapter(rank=2, targets=r".*\.1\..*(c_fc|c_proj|q_proj|down_proj)"),
    "plus-one": HadamardLoraAdapter(rank=3, alpha=2.0),
    "product": HadamardLoraAdapter(rank=2, form="product"),
    "residual": ResidualLoraAdapter(rank=2, alpha=3.0),
}


@pytest.fixture(params=sorted(BASES))
def base(request) -> str:
    return request.param


def root(model: nn.Module) -> nn.Module:
    """Where the tasks attach: to the language model of one that sees."""
    return getattr(model.base_model, "language_model", model)


def attached(model: nn.Module, adapter, name: str = "tiny") -> tuple[AttachedModel, dict[str, nn.Parameter]]:
    with library_logging.quiet_libraries():
        trained = adapter.attach(root(model).requires_grad_(True))
        model.eval()
    known = {id(p): n for n, p in model.named_parameters()}
    return AttachedModel(model, {n: known[id(p)] for n, p in trained.items()}, name), trained


def filled(trained) -> dict[str, torch.Tensor]:
    """Puts weights in that have no zero factor, so that a factor left out shows."""
    generator = torch.Generator().manual_seed(577215)
    weights = {n: 0.2 * torch.randn(p.shape, generator=generator) for n, p in trained.items()}
    for name, parameter in trained.items():
        parameter.data.copy_(weights[name])
    return weights


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """Of texts, and of a text about an image where the model sees."""
    ids = torch.arange(20, 20 + 2 * 9).reshape(2, 9)
    given = {}
    if (token := getattr(model.config, "image_token_id", None)) is not None:
        config = model.config.vision_config
        generator = torch.Generator().manual_seed(2)
        given["pixel_values"] = torch.randn(2, 3, config.image_size, config.image_size, generator=generator)
        parts = len(model.get_image_features(pixel_values=given["pixel_values"]).pooler_output[0])
        ids = torch.cat([torch.full((2, parts), token), ids], 1)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits


def same(found: torch.Tensor, wanted: torch.Tensor, plain: torch.Tensor, fine: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=fine, atol=fine)
    assert not torch.allclose(wanted, plain, atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("kind", PAIRS)
def test_peft_loads_pairs_with_the_same_logits(base, kind, tmp_path):
    model, plain = BASES[base](), logits(BASES[base]())
    at, trained = attached(model, PAIRS[kind])
    PAIRS[kind].save(tmp_path, at, filled(trained))
    with library_logging.quiet_libraries():
        theirs = PeftModel.from_pretrained(BASES[base](), tmp_path)
        fine = 1e-3 if kind == "residual" else 1e-5  # it is written as other factors
        same(logits(theirs), logits(model), plain, fine)
    lora_a_names = [n for n, _ in theirs.named_parameters() if "lora_A" in n]
    assert len(lora_a_names) == len([n for n in trained if n.endswith("lora_A")])  # no other layer has a pair there


@pytest.mark.long
@pytest.mark.parametrize("kind", PAIRS)
def test_merged_weights_give_the_same_logits(base, kind):
    model = BASES[base]()
    plain = logits(model)
    _, trained = attached(model, PAIRS[kind])
    weights, merged = filled(trained), BASES[base]()
    PAIRS[kind].merge(attached(merged, AllWeightsAdapter())[0], weights)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits(merged), plain, atol=1e-2)


@pytest.mark.long
def test_the_config_says_what_peft_needs_and_no_more(tmp_path):
    adapter = PAIRS["rslora with dropout"]
    at, trained = attached(gpt2(), adapter, "bases/gpt2")
    adapter.save(tmp_path, at, filled(trained))
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    keys = ("r", "lora_alpha", "use_rslora", "lora_dropout", "peft_type", "task_type")
    assert {key: adapter_config[key] for key in keys} == {
        "r": 4, "lora_alpha": 7, "use_rslora": True, "lora_dropout": 0.0, "peft_type": "LORA", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    assert (adapter_config["base_model_name_or_path"], adapter_config["inference_mode"]) == ("bases/gpt2", True)
    assert adapter_config["fan_in_fan_out"] is True  # of GPT-2's Conv1D
    assert sorted(adapter_config["target_modules"]) == ["c_attn", "c_fc", "c_proj"]
    assert str(tmp_path) not in json.dumps(adapter_config)
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    adapter.save(tmp_path, replace(at, end_tokens=(5,)), filled(trained))
    assert sorted(file.name for file in tmp_path.iterdir()) == [*files, "generation_config.json"]
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 5


def test_targets_are_whole_names_where_a_last_part_would_name_other_layers():
    model = llava()
    language = [n for n, _ in model.named_modules() if "language_model" in n and n.endswith("q_proj")]
    vision = [n for n, _ in model.named_modules() if "vision_tower" in n and n.endswith("q_proj")]
    assert vision
    assert export.target_modules(model, language) == sorted(language)
    assert export.target_modules(model, language + vision) == ["q_proj"]


@pytest.mark.parametrize("form", ["plus-one", "product"])
def test_a_neutral_private_pair_leaves_the_rank_as_it_is(form):
    """FedPara's server model: the private product is zero, or one everywhere."""
    adapter = HadamardLoraAdapter(rank=3, alpha=2.0, form=form)
    generator = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(t.shape, generator=generator) for n, t in adapter.example_spec().items()}
    for name, weight in weights.items():
        if ".private_" in name:
            weight.zero_()
            if form == "product":
                weight[(0,) if name.endswith("A") else (slice(None), 0)] = 1.0
    fields, factors = adapter.as_lora(weights)
    assert (fields.rank, fields.scale) == (3, pytest.approx(adapter.scale))
    assert factors.keys() == {n for n in weights if ".lora_" in n}
    assert all(torch.equal(factor, weights[name]) for name, factor in factors.items())


def test_a_product_of_zeros_is_a_pair_of_zeros():
    adapter = HadamardLoraAdapter(rank=2, form="product")
    weights = {
        n: torch.ones(t.shape) if ".lora_" in n else torch.zeros(t.shape) for n, t in adapter.example_spec().items()
    }
    fields, factors = adapter.as_lora(weights)
    assert fields.rank == 2
    assert all(not factors[n].any() for n in factors if n.endswith("B"))


# PEFT 0.21 passes a prefix by the name that transformers 5.24 deprecates. FedVeil's own code uses the new name.
OLD_CACHE_NAME = pytest.mark.filterwarnings(
    r"ignore:(Both )?`past_key_values` (is deprecated|and `cache` are set):FutureWarning"
)


@OLD_CACHE_NAME
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_peft_loads_a_prefix_with_the_same_logits(kind, tmp_path):
    model, plain, adapter = BASES[kind](), logits(BASES[kind]()), PrefixAdapter(5)
    at, trained = attached(model, adapter)
    adapter.save(tmp_path, at, filled(trained))
    theirs = PeftModel.from_pretrained(BASES[kind](), tmp_path).eval()
    same(logits(theirs), logits(model), plain)


@OLD_CACHE_NAME
@pytest.mark.xfail(
    "cache" in inspect.signature(GPT2LMHeadModel.forward).parameters,
    reason="generate() of transformers 5.24 ignores the cache in which PEFT 0.21 passes a prefix",
    raises=AssertionError,
    strict=True,
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_peft_loads_a_prefix_with_the_same_texts(kind, tmp_path):
    model, adapter = BASES[kind](), PrefixAdapter(5)
    at, trained = attached(model, adapter)
    adapter.save(tmp_path, at, filled(trained))
    theirs = PeftModel.from_pretrained(BASES[kind](), tmp_path).eval()
    ids = torch.arange(1, 8)[None]
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with library_logging.quiet_libraries():
        assert torch.equal(theirs.generate(input_ids=ids, **how), model.generate(input_ids=ids, **how))


def test_transformers_loads_all_weights_and_the_tokenizer(tmp_path):
    tokenizer, model, plain = (
        AutoTokenizer.from_pretrained(bundled.bundled_folder("text-generation")),
        gpt2(),
        logits(gpt2()),
    )
    at, trained = attached(model, AllWeightsAdapter())
    filled(trained)
    model.generation_config = type(model.generation_config)(do_sample=True)
    ends = (tokenizer.eos_token_id, 7)
    AllWeightsAdapter().save(tmp_path, AttachedModel(at.model, at.names, at.base, tokenizer, ends), {})
    assert model.generation_config.do_sample
    with library_logging.quiet_libraries():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    same(logits(theirs), logits(model), plain)
    assert theirs.generation_config.eos_token_id == list(ends)
    assert not theirs.generation_config.do_sample
    text = "name[Alimentum]"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids
    assert not list(tmp_path.glob("*.bin"))


def test_only_the_tensors_of_a_model_that_transformers_does_not_know_are_written(tmp_path):
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    AllWeightsAdapter().save(tmp_path, AttachedModel(model, {}, "vital-signs"), {})
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")
def test_a_layer_whose_weight_another_one_has_too_cannot_be_merged():
    model = gpt2()
    adapter = LoraAdapter(rank=2, targets="lm_head")
    _, trained = attached(model, adapter)
    with pytest.raises(ConfigError, match="adapter.targets.*lm_head"):
        adapter.merge(attached(gpt2(), AllWeightsAdapter())[0], filled(trained))


@pytest.mark.parametrize("adapter", [PrefixAdapter(4), PromptAdapter(4)])
def test_what_stands_before_tokens_cannot_be_merged(adapter):
    with pytest.raises(ConfigError, match=f'adapter.kind.*"{adapter.kind}"'):
        adapter.merge(AttachedModel(None, {}, "tiny"), {})
