"""Base models of any size with random weights, for benchmarks in which only the size matters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from fedveil import places


def random_gpt2(folder: Path, shape: Mapping[str, int]) -> Path:
    """A GPT-2 of that shape with random weights, half precision on disk, and the tiny base's tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from fedveil.models.library import quiet

    torch.manual_seed(0)
    config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    with quiet():
        GPT2LMHeadModel(config).half().save_pretrained(folder)
    bundled = places.folder("assets/tiny-text-generation")
    shutil.copy(bundled / "tokenizer.json", folder)
    shutil.copy(bundled / "tokenizer_config.json", folder)
    return folder
