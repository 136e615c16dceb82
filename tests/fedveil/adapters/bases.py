"""Small bases of three kinds, in fp32 and evaluation mode, with the same weights at each call."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from fedveil.models import bundled, library_logging


def gpt2() -> nn.Module:
    with library_logging.quiet_libraries():
        return AutoModelForCausalLM.from_pretrained(
            bundled.bundled_folder("text-generation"), dtype=torch.float32
        ).eval()


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(161803)
        return LlamaForCausalLM(config).eval()


def llava() -> nn.Module:
    with library_logging.quiet_libraries():
        folder = bundled.bundled_folder("vision-language")
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


BASES = {"gpt2": gpt2, "llama": llama, "llava": llava}
