"""The matrices that are used to compare proxies."""

from __future__ import annotations

import torch

from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.tasks.text_generation import TextGeneration
from fedveil_bench.common.federations import task_of
from fedveil_bench.fedqsn.similarity import collect_matrices
from fedveil_bench.runner import BenchOptions


def test_merged_weights_are_what_the_model_computes_with():
    task = task_of(
        TextGeneration, parse({"method.name": "fedlpp"}), BenchOptions(device="cpu"), LoraAdapter(rank=2, alpha=6.0)
    )
    weights = {n: torch.randn(t.shape, generator=torch.Generator().manual_seed(2)) for n, t in task.spec.items()}
    task.put(weights)
    found = collect_matrices(task, weights)
    name = "transformer.h.1.mlp.c_fc"
    layer = task.base.model.get_submodule(name)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x), x @ found[f"{name}.weight"] + layer.base_layer.bias, rtol=1e-3, atol=1e-3)
