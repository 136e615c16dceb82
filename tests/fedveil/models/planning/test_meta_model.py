"""Shapes of bases compared with calculations by hand, published counts, and instantiated models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.hadamard import HadamardLoraAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.federation.exchange import MessageExchange
from fedveil.models import bundled, loading
from fedveil.models.planning import meta_model
from fedveil.models.planning.model_config import ModelConfig, read_model_config
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedpara import FedPara
from fedveil.strategies.fedper import FedPer
from fedveil.strategies.fedrand import FedRand

SHARED = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
B8 = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
B70 = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
EIGHT, SEVENTY = ModelConfig("llama", SHARED | B8, 2), ModelConfig("llama", SHARED | B70, 2)
# (settings, width, layers, width of 8 heads of keys, MLP, published parameters)
BIG = [(EIGHT, 4096, 32, 1024, 14336, 8_030_261_248), (SEVENTY, 8192, 80, 1024, 28672, 70_553_706_496)]


@pytest.mark.parametrize(("settings", "width", "layers", "keys", "mlp", "published"), BIG)
def test_parameters_are_those_of_the_arithmetic_and_of_the_publication(settings, width, layers, keys, mlp, published):
    shape = meta_model.build_meta_model(settings)
    assert shape.parts == {
        "embeddings": 128256 * width,
        "attention": layers * (2 * width * width + 2 * width * keys),
        "MLP": layers * 3 * width * mlp,
        "norms": (2 * layers + 1) * width,
        "head": 128256 * width,
    }
    assert shape.parameters == published
    assert shape.multiplied == published - shape.parts["embeddings"] - shape.parts["norms"]


@pytest.mark.parametrize(("settings", "width", "layers", "keys", "mlp", "published"), BIG)
def test_bytes_of_a_base_of_four_bits(settings, width, layers, keys, mlp, published):
    """Half a byte an entry, a byte for 64, four bytes for 16,384, and three tables a layer; the rest is bf16."""
    shapes = [width * width, width * keys, width * keys, width * width, *[width * mlp] * 3]
    small = layers * sum(shapes)
    scales = small // 64 + 4 * small // (64 * 256) + 7 * layers * (64 + 1024 + 4)
    rest = 2 * (2 * 128256 * width + (2 * layers + 1) * width)
    shape = meta_model.build_meta_model(settings)
    assert shape.nbytes("4bit", 2) == small // 2 + scales + rest + shape.buffers
    assert shape.buffers < 1000
    outputs = layers * (2 * width + 2 * keys + 2 * mlp + width)
    assert shape.nbytes("8bit", 2) == small + 4 * outputs + rest + shape.buffers
    assert shape.nbytes("none", 2) == 2 * published + shape.buffers


@pytest.mark.long
@pytest.mark.parametrize("rank", [8, 16])
@pytest.mark.parametrize(("settings", "width", "layers", "keys", "mlp", "published"), BIG)
def test_adapters_and_what_they_put_on_the_wire(settings, width, layers, keys, mlp, published, rank):
    """A is rank x d_in, B is d_out x rank. FedRand sends one of the two up, FedPer two layers."""
    ins = [width] * 6 + [mlp]
    outs = [width, keys, keys, width, mlp, mlp, width]
    a, b = (4 * layers * rank * sum(sizes) for sizes in (ins, outs))
    lora = LoraAdapter(rank=rank)
    spec = meta_model.param_specs(settings, lora)
    assert sum(4 * torch.Size(t.shape).numel() for t in spec.values()) == a + b
    methods = {"fedavg": FedAvg(lora), "fedper": FedPer(2, lora), "fedrand": FedRand(adapter=lora)}
    sent = {name: MessageExchange(method, name, spec) for name, method in methods.items()}
    down, up = ({name: of.sizes(way) for name, of in sent.items()} for way in ("down", "up"))
    assert down["fedavg"] == up["fedavg"] == {"": a + b}
    assert set(down["fedrand"].values()) == {a + b}
    assert up["fedrand"] == {"A": a, "B": b}
    assert down["fedper"] == up["fedper"] == {"all": a + b, "top": (a + b) * 2 // layers}
    if rank == 8:
        hadamard = HadamardLoraAdapter(rank=rank)
        para = MessageExchange(FedPara(adapter=hadamard), "fedpara", meta_model.param_specs(settings, hadamard))
        assert (para.largest("down"), para.largest("up")) == (a + b, a + b)  # the private pair stays
        assert sum(torch.Size(t.shape).numel() for t in para.spec.values()) * 4 == 2 * (a + b)
        whole = MessageExchange(
            FedAvg(AllWeightsAdapter()), "fedavg", meta_model.param_specs(settings, AllWeightsAdapter())
        )
        assert whole.largest("up") == 4 * published


def made(folder, kind, **values):
    """A model with random weights, on disk, with the tiny base's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, bos_token_id=0, eos_token_id=0, **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled.bundled_folder("text-generation") / name, folder)
    return folder


LLAMA = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 320, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}
KINDS = [("llama", LLAMA), ("llama", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True})]
KINDS += [("mistral", LLAMA), ("qwen2", LLAMA), ("qwen3", LLAMA | {"head_dim": 64}), ("gpt2", GPT2)]


@pytest.mark.parametrize(("kind", "values"), KINDS)
def test_the_shapes_are_those_of_a_model_on_disk(tmp_path, kind, values):
    from transformers import AutoModelForCausalLM

    folder = made(tmp_path, kind, **values)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shape = meta_model.build_meta_model(read_model_config(folder))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert ("head" in shape.parts) == (model.get_output_embeddings().weight is not model.get_input_embeddings().weight)
    assert {"attention", "MLP", "norms", "embeddings"} <= set(shape.parts)
    assert "auto_map" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("bits", ["none", "4bit", "8bit"])
@pytest.mark.parametrize(("kind", "values"), [KINDS[0], KINDS[1], KINDS[-1]])
def test_bytes_are_those_of_a_base_as_it_is_loaded(tmp_path, kind, values, bits):
    folder = made(tmp_path, kind, **values)
    config = parse({"task.model": str(folder), "train.quantized-base": bits, "task.max-tokens": 32})
    model = loading.load_causal(config, LoraAdapter(), torch.device("cpu"), None).model
    total = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        parts = [] if "lora_" in name else [parameter]
        if (state := getattr(parameter, "quant_state", None)) is not None:
            parts += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        if (scales := getattr(parameter, "SCB", None)) is not None:
            parts.append(scales)
        total += sum(part.numel() * part.itemsize for part in parts)
    assert meta_model.build_meta_model(read_model_config(folder)).nbytes(bits, 4) == total
