"""Base models of any size with random weights, for benchmarks where only the size matters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedveil import resources

_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def random_gpt2(folder: Path, shape: Mapping[str, int]) -> Path:
    """Create a GPT-2 model of this shape with random half-precision weights and the tiny base's tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _saved(folder, GPT2LMHeadModel, GPT2Config(**shape, **_IDS))


def random_llama(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Create a Llama model in the same way, with weights drawn on torch's default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _saved(folder, LlamaForCausalLM, LlamaConfig(**shape, **_IDS))


def _saved(folder: Path, kind: Any, config: Any) -> Path:
    import torch

    from fedveil.testing.training import quiet_libraries

    torch.manual_seed(0)
    with quiet_libraries():
        kind(config).half().save_pretrained(folder)
    bundled = resources.base_folder("text-generation")
    shutil.copy(bundled / "tokenizer.json", folder)
    shutil.copy(bundled / "tokenizer_config.json", folder)
    return folder
