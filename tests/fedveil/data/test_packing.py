"""Packed rows have the same loss and gradient as separate rows, in fewer sequences."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from fedveil import config as run_config
from fedveil import strategies
from fedveil.adapters.lora import LoraAdapter
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.data import packing
from fedveil.data.batches import TokenExample
from fedveil.errors import ConfigError
from fedveil.models import bundled
from fedveil.rng import RandomStream
from fedveil.tasks import load_task
from fedveil.tasks.text_generation import TextGeneration
from fedveil.training import optimizers

KEY = bytes(range(32))
LENGTHS = [5, 30, 9, 17, 2, 24, 8, 11, 3, 40]


def saved(family: str, folder: Path) -> str:
    own = bundled.bundled_folder("text-generation")
    assert own is not None
    vocabulary = GPT2Config.from_pretrained(own).vocab_size
    sizes = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    heads = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(3)
    model = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, **sizes)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(intermediate_size=32, **heads, **sizes)),
        "opt": lambda: OPTForCausalLM(OPTConfig(ffn_dim=32, word_embed_proj_dim=16, **heads, **sizes)),
    }[family]()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)  # with initial weights, attention is nearly uniform, so other tokens hardly matter
    model.save_pretrained(folder)
    for file in own.glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def make(model: str, adapter=None, **keys: object) -> TextGeneration:
    flat = {"task.model": model, "task.max-tokens": 40, "train.batch-size": 10}
    task = load_task(
        run_config.parse(flat | {f"train.{k}": v for k, v in keys.items()}), adapter or LoraAdapter(rank=3), "cpu"
    )
    assert isinstance(task, TextGeneration)
    return task


@pytest.fixture
def rows() -> list[TokenExample]:
    generator = torch.Generator().manual_seed(12)
    tokens = [torch.randint(1, 200, (length,), generator=generator).tolist() for length in LENGTHS]
    return [TokenExample(ids, len(ids) // 3) for ids in tokens]


@pytest.mark.parametrize("family", packing.FAMILIES)
@pytest.mark.parametrize("keys", [{}, {"loss-mask": "all"}, {"gradient-checkpointing": True}])
def test_loss_and_gradient_are_those_of_rows_apart(tmp_path, rows, family, keys):
    model = saved(family, tmp_path / family)
    apart, packed = make(model, **keys), make(model, packing=True, **keys)
    generator = torch.Generator().manual_seed(4)
    start = {n: 0.3 * torch.randn(s.shape, generator=generator) for n, s in apart.spec.items()}
    expected = apart.trainer(rows, RandomStream(KEY)).gradient(start)
    result = packed.trainer(rows, RandomStream(KEY)).gradient(start)
    assert result.report["loss_received"] == pytest.approx(expected.report["loss_received"], rel=1e-5)
    assert result.report["tokens"] == expected.report["tokens"] == sum(LENGTHS)
    assert all(g.abs().max() > 1e-3 for g in expected.weights.values())
    for name, gradient in expected.weights.items():
        torch.testing.assert_close(result.weights[name], gradient, rtol=1e-4, atol=1e-5)
    batch = packed.training_batch(rows)
    assert batch.ids.shape == (4, 40)  # 149 tokens
    assert int(batch.mask.sum()) == 149


def test_scores_and_weights_are_as_unpacked(tmp_path, rows):
    model = saved("gpt2", tmp_path / "gpt2")
    first, second = make(model, **{"batch-size": 4}), make(model, packing=True, **{"batch-size": 4})
    start = first.initial(RandomStream(KEY))
    expected, result = (task.trainer(rows, RandomStream(KEY)).train(start) for task in (first, second))
    assert result.report["loss_received"] == expected.report["loss_received"]
    assert result.report["loss_trained"] == pytest.approx(expected.report["loss_trained"], rel=1e-5)
    apart = torch.cat([(result.weights[n] - w).flatten().abs() for n, w in expected.weights.items()])
    assert float(apart.quantile(0.99)) < 1e-5


def test_every_row_is_packed_once_and_no_sequence_is_too_long():
    sequences = packing.fit_sequences(LENGTHS, 40)
    assert sorted(row for sequence in sequences for row in sequence) == list(range(10))
    assert [sum(LENGTHS[row] for row in sequence) for sequence in sequences] == [40, 39, 40, 30]
    assert packing.fit_sequences([3], 3) == [[0]]


def test_a_row_whose_target_is_cut_away_counts_nothing():
    batch = packing.collate_packed([TokenExample([7, 8], 2), TokenExample([9], 0)], 0, 8)
    assert (batch.ids.tolist(), batch.terms, batch.tokens) == ([[7, 8, 9]], 0, 3)
    assert batch.inputs["position_ids"].tolist() == [[0, 1, 0]]


def test_what_cannot_be_packed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'train.packing: .* only in the families gpt2, llama, not in "opt"'):
        _ = make(saved("opt", tmp_path / "opt"), packing=True).spec
    with pytest.raises(ConfigError, match=r'train.packing: an adapter of kind "prefix" needs a separate row'):
        make("tiny", PrefixAdapter(3), packing=True)
    with pytest.raises(
        ConfigError, match=r'train.packing: the task "image-classification" supports only False, found True'
    ):
        load_task(run_config.parse({"task.name": "image-classification", "train.packing": True}), LoraAdapter(), "cpu")
    config = run_config.parse({"method.name": "fedavg", "dp.clip-norm": 1.0, "train.packing": True})
    with pytest.raises(ConfigError, match=r"train.packing: dp\.\* computes the gradient of every example"):
        optimizers.check_optimizer(strategies.create_method("fedavg"), config)
