"""A hostile or unsuitable config.json is refused with a sentence, and costs neither time nor memory."""

from __future__ import annotations

import json
import time

import pytest

from fedveil.errors import TaskError
from fedveil.models.planning import meta_model, model_config

GPT2 = {"model_type": "gpt2", "vocab_size": 100, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "intermediate_size": 40}


def written(folder, content):
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected JSON"),
        ("[" * 100_000, "found RecursionError"),
        (b"\xff\xfe{}", "expected JSON"),
        (f'{{"model_type": "gpt2", "n_layer": {"9" * 5000}}}', "expected JSON"),
        ("[1]", "expected an object, found list"),
        (" " * 10_000_000 + "{}", "expected at most 1,048,576 bytes, found 10,000,002"),
        ({**GPT2, "auto_map": {"AutoModel": "evil.Model"}}, "auto_map: expected no code of its own"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({}, "model_type: expected one of gpt2"),
        ({**GPT2, "model_type": "../gpt2\x1b[2J"}, r"found '../gpt2\x1b[2J'"),
        ({**GPT2, "model_type": ["gpt2"]}, "model_type: expected one of"),
        ({**GPT2, "n_layer": 10**9}, "n_layer: expected a whole number from 1 to 512, found 1000000000"),
        ({**GPT2, "n_layer": -1}, "found -1"),
        ({**GPT2, "n_layer": True}, "found True"),
        ({**GPT2, "n_layer": 2.0}, "found 2.0"),
        ({**GPT2, "n_embd": "16"}, "n_embd: expected a whole number from 1 to 65,536, found '16'"),
        ({key: value for key, value in GPT2.items() if key != "n_embd"}, "n_embd: expected a whole number"),
        ({**GPT2, "n_embd": 15}, "expected a multiple of its 2 heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of the 4 heads, found 3"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, found 'yes'"),
        ({**LLAMA, "dtype": "float4"}, "dtype: expected one of float32"),
    ],
)
def test_a_config_that_is_no_plain_description_is_refused_at_once(tmp_path, content, words):
    started = time.perf_counter()
    with pytest.raises(TaskError) as error:
        model_config.read_model_config(written(tmp_path, content))
    assert words in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400
    assert time.perf_counter() - started < 2


def test_no_config_and_a_folder_in_its_place(tmp_path):
    with pytest.raises(TaskError, match="there is no config.json in"):
        model_config.read_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(TaskError, match="there is no config.json in"):
        model_config.read_model_config(tmp_path)


def test_what_else_a_config_says_does_not_reach_the_library(tmp_path):
    config = model_config.read_model_config(
        written(tmp_path, {**LLAMA, "dtype": "bfloat16", "rope_scaling": 7, "_name_or_path": "/etc"})
    )
    assert set(config.values) == set(LLAMA) - {"model_type"}
    assert (config.layers, config.width, config.heads, config.context, config.stored) == (2, 16, 4, None, 2)


@pytest.mark.long
def test_the_largest_base_that_is_read_is_made_in_bounded_time(tmp_path):
    most = {"vocab_size": 1 << 22, "hidden_size": 1 << 16, "num_hidden_layers": 512, "intermediate_size": 1 << 20}
    started = time.perf_counter()
    shape = meta_model.build_meta_model(
        model_config.read_model_config(written(tmp_path, {**LLAMA, **most, "num_attention_heads": 1 << 10}))
    )
    assert shape.parameters > 10**14
    assert time.perf_counter() - started < 60
