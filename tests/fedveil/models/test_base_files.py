"""Faults of a base are each refused with one sentence, before any round."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BitsAndBytesConfig,
    XLNetConfig,
    XLNetLMHeadModel,
)

from fedveil import tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.contract.task import Example
from fedveil.errors import TaskError
from fedveil.models import base_files, bundled
from tests.fedveil.tasks import small_classifiers

BERT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.fixture
def base(tmp_path):
    folder = bundled.bundled_folder("text-generation")
    assert folder is not None
    return shutil.copytree(folder, tmp_path / "base")


def load(folder, adapter=LoraAdapter(rank=2)):
    keys = {"task.model": str(folder), "task.source-column": "source", "task.target-column": "target"}
    return tasks.load_task(parse(keys), adapter, "cpu")


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_base_without_a_fault_is_loaded(base):
    assert load(base).base.trained


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter.json"])
@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_is_no_base(base, file, with_config):
    (base / file).write_text("{}")
    if not with_config:
        (base / "config.json").unlink()
    with pytest.raises(TaskError, match=r"contains an adapter .*; merge it into its base first"):
        load(base)


def test_a_config_that_says_4_bit_over_plain_weights_is_refused(base):
    change_config(base, quantization_config=BNB)
    with pytest.raises(TaskError, match="has quantized weights, but they are not quantized; remove quantization"):
        load(base)
    with pytest.raises(TaskError, match=r"because all of them are trained, found quantized ones \(bitsandbytes in"):
        load(base, AllWeightsAdapter())
    change_config(base, quantization_config={"quant_method": "gptq"})
    load(base)
    with pytest.raises(TaskError, match=r"found quantized ones \(gptq in config.json\)"):
        load(base, AllWeightsAdapter())


def test_a_stale_vocab_size_is_named(base):
    own = json.loads((base / "config.json").read_text())["vocab_size"]
    change_config(base, vocab_size=own + 7)
    with pytest.raises(
        TaskError, match=f"has {own:,} rows, but vocab_size in its config.json is {own + 7:,}; correct vocab_size"
    ):
        load(base)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_refused(base, value):
    tensors = load_file(base / "model.safetensors")
    name = sorted(name for name, tensor in tensors.items() if tensor.ndim == 2)[3]
    tensors[name][1, 2] = value
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TaskError, match=r"contains NaN or infinity"):
        load(base).base  # noqa: B018


def add_token(base, **special):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(base)
    return json.loads((base / "config.json").read_text())["vocab_size"]


def test_a_token_without_a_row_of_the_embedding_is_refused_before_a_step(base):
    rows = add_token(base)
    task = load(base)
    texts = [{"source": "name", "target": "Aromi"}, {"source": "name", "target": "a <one more> b"}]
    assert len(task.encode(Example.from_columns(texts[:1]))) == 1  # as with Gemma 3 1B, whose texts have no image
    with pytest.raises(TaskError, match=f"gives token {rows:,}, but the embedding has only {rows:,} rows"):
        task.encode(Example.from_columns(texts))


def test_a_padding_token_without_a_row_of_the_embedding_is_refused_where_it_is_used(base, tmp_path):
    """Generation pads with the end token, so a Llama 2 whose padding was added without a row is trained."""
    add_token(base, pad_token="<padding>")
    assert load(base).base.tokenizer.pad_token == "<padding>"
    folder = tmp_path / "classifier"
    small_classifiers.save_base(folder, "bert")
    add_token(folder, pad_token="<padding>")
    with pytest.raises(TaskError, match="Padding_idx must be within num_embeddings"):
        small_classifiers.make_task(task__model=str(folder)).base  # noqa: B018


def test_a_classifier_of_texts_refuses_a_token_without_a_row_of_the_embedding(tmp_path):
    small_classifiers.save_base(tmp_path, "bert")
    rows = add_token(tmp_path)
    task = small_classifiers.make_task(task__model=str(tmp_path))
    with pytest.raises(TaskError, match=f"gives token {rows:,}, but the embedding has only {rows:,} rows"):
        task.encode(Example.from_columns([{"note": "no <one more>", "ward": "lung"}]))


@pytest.mark.long
def test_a_base_in_4_bit_takes_low_rank_pairs_and_no_training_of_all_weights(base):
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    plain.save_pretrained(base)
    assert load(base).base.model.is_quantized
    with pytest.raises(TaskError, match=r"because all of them are trained, found quantized ones \(bitsandbytes in"):
        load(base, AllWeightsAdapter())
    with pytest.raises(TaskError, match=r"because all of them are trained, found quantized ones \(its files\)"):
        base_files.check_loaded_base("a/hub-id", load(base).base.model, trains_base=True)


ENCODERS = {
    "bert": lambda size: BertForMaskedLM(BertConfig(vocab_size=size, max_position_embeddings=256, **BERT)),
    "xlnet": lambda size: XLNetLMHeadModel(XLNetConfig(vocab_size=size, d_model=8, n_layer=1, n_head=2, d_inner=8)),
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_no_causal_model(base, kind):
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    ENCODERS[kind](size).save_pretrained(base)
    (base / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(TaskError, match=rf'is an encoder \("{kind}"\), .*; use a decoder such as Llama, or the task'):
        load(base).base  # noqa: B018


def test_bert_as_a_decoder_is_a_causal_model(base):
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    BertLMHeadModel(BertConfig(vocab_size=size, max_position_embeddings=256, is_decoder=True, **BERT)).save_pretrained(
        base
    )
    assert load(base).base.trained
