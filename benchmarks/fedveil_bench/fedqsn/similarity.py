"""Similarity of proxies to the server's model: cosine similarities of attention and MLP matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.attacks.model_extraction import proxy as attack
from fedveil.attacks.model_extraction.proxy import ProxyModel
from fedveil.contract.method import Method
from fedveil.contract.param_spec import Weights
from fedveil.tasks.text_generation import TextGeneration
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric

_FORMS = ("whole", "visible", "mean")
_SITES = 9  # names the random draws over proxies


def compute_similarities(
    task: TextGeneration, method: Method, received: Sequence[ProxyModel], server: Weights, base: Weights
) -> dict[str, ResampledMetric]:
    """Return each kind of similarity of the proxies to the server's weights, and of their differences from the base.

    Values are means over `received`, which has one proxy for each client in the last round.
    """
    alike = _similarities(task, method, received, server, base)
    return {
        f"{form}{suffix}": resampling.resample_mean([getattr(s, form) for s in side], _SITES)
        for suffix, side in (("", alike[0::2]), (" of the difference to the base", alike[1::2]))
        for form in _FORMS
    }


def _similarities(
    task: TextGeneration, method: Method, received: Sequence[ProxyModel], server: Weights, base: Weights
) -> list[attack.ModelSimilarity]:
    """Return two similarities per client: to the server's weights, and of the differences from the base."""
    found = []
    scale = getattr(method, "scale", 1.0) if isinstance(method.adapter, AllWeightsAdapter) else 1.0
    true = collect_matrices(task, server)
    for at in received:
        proxy = ProxyModel(collect_matrices(task, at.weights), at.missing, scale)
        names = [n for n in true if n in base]
        found += [attack.proxy_similarity(proxy, true, names), attack.proxy_similarity(proxy, true, names, base)]
    return found


def collect_matrices(task: TextGeneration, weights: Weights) -> Weights:
    """Return the attention and MLP matrices by their names in the bare model; with LoRA, W_0 + scale B A."""
    if not isinstance(task.adapter, LoraAdapter):
        return {n: w for n, w in weights.items() if (p := task.spec[n].place) and p.part == "linear" and w.ndim == 2}
    found = {}
    for module in (n.removesuffix(".lora_A") for n in weights if n.endswith(".lora_A")):
        layer: Any = task.base.model.get_submodule(module).base_layer
        change = task.adapter.scale * weights[f"{module}.lora_B"] @ weights[f"{module}.lora_A"]
        is_conv = not isinstance(layer, torch.nn.Linear)
        found[f"{module}.weight"] = layer.weight.detach().cpu().float() + (change.T if is_conv else change)
    return found
