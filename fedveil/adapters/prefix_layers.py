"""A deep prefix before every layer of a causal language model, and the layer-sharing proxy that carries the same prefix.

    prefix[l, 0], prefix[l, 1] = keys and values, heads x length x head width, that layer l finds in its cache
    proxy: layer l is cell l mod c, so c layers stand for all of them and the prefix fits both models

The prefix lies in the cache of transformers (past_key_values): tokens come after it, their positions too. Keys are as the
cache keeps them, after the rotation of a model that rotates. Layers that share a cell share its parameters, not its index.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.adapters.prefix import Prefix
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.models.loading import Base
from fedveil.rng import Stream

NAME = "prefix"
_STD = 0.02


def attach(model: Any, adapter: Prefix) -> dict[str, nn.Parameter]:
    """Attaches prefix and, where `adapter.cells` says so, layer sharing in place; what trains, by name, fp32.

    Raises:
        ConfigError: the model has no list of layers, or fewer than `adapter.cells`.
    """
    if adapter.cells:
        _share(model, adapter.cells)
    model.requires_grad_(adapter.cells > 0)
    where = next(model.parameters()).device
    model.register_parameter(NAME, nn.Parameter(torch.zeros(shape(model, adapter.length), device=where)))
    model.register_forward_pre_hook(_before, with_kwargs=True)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}  # a shared parameter comes once


def fitted(base: Base, config: RunConfig, adapter: Prefix) -> Base:
    """The base with the context that the prefix leaves. Raises ConfigError where task.max-tokens no longer fits."""
    if base.context is None:
        return base
    left = base.context - adapter.length
    if config.task.max_tokens > left:
        raise ConfigError(
            f"task.max-tokens: expected at most {left}, what a prefix of {adapter.length} leaves of {config.task.model}'s "
            f"context, found {config.task.max_tokens}; lower it or adapter.length"
        )
    return replace(base, context=left)


def shape(model: Any, length: int) -> tuple[int, ...]:
    """(layers, 2, heads of keys and values, length, width of a head)."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, heads, length, width


def draw(of: tuple[int, ...], rng: Stream) -> Tensor:
    """Initial entries, N(0, 0.02^2)."""
    return _STD * torch.randn(of, generator=rng.torch_generator())


def _share(model: Any, cells: int) -> None:
    """Layer l becomes a copy of layer l mod `cells` with the same parameters and the index l."""
    depth = model.config.get_text_config().num_hidden_layers
    layers = next((m for m in model.base_model.children() if isinstance(m, nn.ModuleList) and len(m) == depth), None)
    if layers is None or cells > depth:
        found = f"{depth} of them" if layers is not None else f"none in {type(model).__name__}"
        raise ConfigError(f"adapter.cells: expected at most the model's layers, found {cells} and {found}; lower it")
    for at in range(cells, depth):
        cell = layers[at % cells]
        layers[at] = copy.deepcopy(cell, {id(t): t for t in (*cell.parameters(), *cell.buffers())})
        for module in layers[at].modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = at


def _before(model: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts the prefix into an empty cache, ones before the mask, and tokens behind it."""
    from transformers import DynamicCache

    cache, mask, prefix = given.get("past_key_values"), given.get("attention_mask"), getattr(model, NAME)
    ids = args[0] if args else given["input_ids"]
    length = prefix.shape[3]
    mask = torch.ones_like(ids) if mask is None else mask
    cache = DynamicCache(config=model.config) if cache is None else cache
    positions = given.get("position_ids")
    if positions is None:  # of the tokens that this call brings, padding before them apart
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if cache.get_seq_length() == 0:
        for at, (keys, values) in enumerate(prefix.to(model.base_model.dtype)):
            cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), at)
    mask = torch.cat([mask.new_ones(len(ids), length), mask], 1)
    return args, {**given, "past_key_values": cache, "attention_mask": mask, "position_ids": positions + length}
