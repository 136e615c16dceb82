"""Locate a language model's tensors: which belong to attention and MLP layers, and which axis is a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedveil.contract.param_spec import ParamLocation


def param_locations(model: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, ParamLocation]:
    """Return the location of each tensor in `trained` that belongs to one of the model's embeddings or linear layers.

    Linear layers are nn.Linear (weight out x in) and GPT-2's Conv1D (in x out), except the output head. A linear layer
    closes its attention or MLP block if it is its parent's last direct linear child and its output is as wide as the
    embedding. Layers that share parameters have one location, that of the first name.
    """
    from transformers.pytorch_utils import Conv1D

    linear = (nn.Linear, Conv1D)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    locations: dict[int, ParamLocation] = {}
    if isinstance(embedding, nn.Embedding):
        locations[id(embedding.weight)] = ParamLocation("embedding", names[embedding], 1)
        if head is not None and head.weight is not embedding.weight:
            locations[id(head.weight)] = ParamLocation("embedding", names[embedding], 1)
    width = getattr(embedding, "embedding_dim", None)
    for parent in model.modules():
        layers = [child for child in parent.children() if isinstance(child, linear) and child is not head]
        for layer in layers:
            is_conv = isinstance(layer, Conv1D)
            features = layer.weight.shape[1 if is_conv else 0]
            closes = layer is layers[-1] and features == width
            locations.setdefault(id(layer.weight), ParamLocation("linear", names[layer], int(is_conv), closes))
            if layer.bias is not None:
                locations.setdefault(id(layer.bias), ParamLocation("linear", names[layer], 0, closes))
    return {name: locations[id(p)] for name, p in trained.items() if id(p) in locations}
