"""A prefix before every layer of a causal language model, and the layer-sharing proxy that uses the same prefix.

    prefix[l, 0], prefix[l, 1] = the keys and values, heads x length x head width, in layer l's cache
    proxy: layer l is cell l mod c, so c layers stand for all layers, and the prefix fits both models

The prefix is placed in transformers' cache; the tokens and their positions come after it. Keys are stored as in the
cache: after rotation, if the model has rotary embeddings. Layers that share a cell share its parameters, but each keeps
its own index.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedveil.adapters import export
from fedveil.config import TrainConfig
from fedveil.contract.adapter import Adapter, AttachedModel, Mount
from fedveil.contract.param_spec import ParamSpec, Spec, Weights
from fedveil.errors import ConfigError
from fedveil.rng import RandomStream

__all__ = ["PrefixAdapter"]

NAME = "prefix"  # the tensor that every prefix has
_STD = 0.02


@final
@dataclass(frozen=True)
class PrefixAdapter(Adapter):
    """Trained keys and values before every layer of a causal language model, or of its proxy (Li, Liang 2021).

    Attributes:
        length: number of prefix tokens.
        cells: 0 uses the model's own layers, frozen. A positive number builds a proxy from that many of its first
            layers, repeated to the model's depth. All tensors of the proxy (cells, embeddings, norms, head) are then
            trained and exchanged along with the prefix.
    """

    mount: ClassVar[Mount] = "cache"
    length: int = 40
    cells: int = 0
    kind: Literal["prefix"] = "prefix"

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("cells", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"adapter.{name}: expected an integer of at least {least}, found {getattr(self, name)}"
                )

    @property
    @override
    def trains_base(self) -> bool:
        return self.cells > 0

    @property
    @override
    def positions(self) -> int:
        return self.length

    @override
    def check(self, train: TrainConfig) -> None:
        if train.packing:
            raise ConfigError(
                'train.packing: an adapter of kind "prefix" needs a separate row for each example; set it to false'
            )
        if train.gradient_checkpointing or train.compile:  # recomputed layers ignore the cache, which holds the prefix
            raise ConfigError(
                'train.gradient-checkpointing, train.compile: an adapter of kind "prefix" does not support them; '
                "set them to false"
            )

    @override
    def example_spec(self) -> Spec:
        proxy = {"wte.weight": ParamSpec((11, 6)), "h.0.mlp.weight": ParamSpec((6, 6))} if self.cells else {}
        return {NAME: ParamSpec((2, 2, 1, self.length, 6)), **proxy}

    @override
    @torch.no_grad()
    def read(self, model: Any, rng: RandomStream) -> dict[str, Tensor]:
        """Return the keys and values of `length` random tokens, which look like text to the model.

        Normally distributed keys and values would raise the loss by one nat.
        """
        vocabulary = model.config.get_text_config().vocab_size
        drawn = [rng.choice(vocabulary, 1)[0] for _ in range(self.length)]
        ids = torch.tensor([drawn], device=next(model.parameters()).device)
        output = model.forward(input_ids=ids, use_cache=True)  # bypasses the hook that inserts a prefix
        cache = getattr(output, _cache_argument(model))
        layer_prefixes = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        return {NAME: torch.stack(layer_prefixes).float().cpu()}

    @override
    def draw(self, shapes: Mapping[str, tuple[int, ...]], rng: RandomStream, base: Weights) -> dict[str, Tensor]:
        """Return the tensors of `base`; if it has no prefix, draw one from N(0, 0.02^2)."""
        tensors = dict(base)
        if NAME not in tensors:
            tensors[NAME] = _STD * torch.randn(shapes[NAME], generator=rng.torch_generator())
        return {name: tensors[name].clone() for name in shapes}

    @override
    def attach(self, model: Any) -> dict[str, nn.Parameter]:
        """Attach the prefix and, if `cells` is positive, make the layers share their parameters.

        Raises:
            ConfigError: the model does not take a cache, has no list of layers, or has fewer layers than `cells`.
        """
        _cache_argument(model)
        if self.cells:
            _share(model, self.cells)
        model.requires_grad_(self.cells > 0)
        where = next(model.parameters()).device
        model.register_parameter(NAME, nn.Parameter(torch.zeros(prefix_shape(model, self.length), device=where)))
        model.register_forward_pre_hook(_before, with_kwargs=True)
        return {name: p for name, p in model.named_parameters() if p.requires_grad}  # a shared parameter appears once

    @override
    def save(self, folder: Path, attached: AttachedModel, weights: Weights) -> None:
        """Write PEFT's prefix-tuning format, or FedVeil's own for a proxy: PEFT has no format for shared layers."""
        if self.cells:
            export.write_native(folder, self, weights, attached.base)
            return
        from peft import PrefixTuningConfig

        layers, _, heads, length, width = weights[NAME].shape
        PrefixTuningConfig(
            num_virtual_tokens=length,
            num_layers=layers,
            num_attention_heads=heads,  # key/value heads
            token_dim=heads * width,
            num_transformer_submodules=1,
            **export.adapter_metadata(attached),
        ).save_pretrained(str(folder))
        rows = weights[NAME].permute(3, 0, 1, 2, 4).reshape(length, -1)  # one row per token: layer, key or value, head
        export.adapter_tensors(folder / export.PEFT_WEIGHTS, {"prompt_embeddings": rows})
        export.write_generation(folder, attached)


def prefix_shape(model: Any, length: int) -> tuple[int, ...]:
    """Return (layers, 2, key/value heads, length, head width)."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, heads, length, width


def _cache_argument(model: Any) -> str:
    """Return the name of the model's cache argument: `cache` from transformers 5.24 on, and `past_key_values` before.

    A `forward` that takes arbitrary keyword arguments accepts a cache under the wrong name, and then ignores it and its
    prefix.
    """
    names = inspect.signature(type(model).forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ConfigError(
        f"task.model: the forward of {type(model).__name__} does not take a cache (cache or past_key_values), "
        "which would hold the prefix; use another model, or a method without a prefix"
    )


def _share(model: Any, cells: int) -> None:
    """Replace layer l with a copy of layer l mod `cells` that has the same parameters and the index l."""
    depth = model.config.get_text_config().num_hidden_layers
    layers = next((m for m in model.base_model.children() if isinstance(m, nn.ModuleList) and len(m) == depth), None)
    if layers is None or cells > depth:
        depth_text = f"{depth} layers" if layers is not None else f"no layers in {type(model).__name__}"
        raise ConfigError(f"adapter.cells: {cells} is more than the model supports ({depth_text}); lower it")
    for at in range(cells, depth):
        cell = layers[at % cells]
        layers[at] = copy.deepcopy(cell, {id(t): t for t in (*cell.parameters(), *cell.buffers())})
        for module in layers[at].modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = at


def _before(model: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the prefix into an empty cache, prepend ones to the mask, and shift the positions of the tokens."""
    from transformers import DynamicCache

    name = _cache_argument(model)
    cache, mask, prefix = given.get(name), given.get("attention_mask"), getattr(model, NAME)
    ids = args[0] if args else given["input_ids"]
    length = prefix.shape[3]
    cache = DynamicCache(config=model.config) if cache is None else cache
    if mask is None:  # generation omits a mask of all ones, even if the cache has earlier tokens
        mask = torch.ones_like(ids[:, :1]).expand(-1, max(0, cache.get_seq_length() - length) + ids.shape[1])
    positions = given.get("position_ids")
    if positions is None:  # positions of the tokens in this call, without the padding before them
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    if cache.get_seq_length() == 0:
        for at, (keys, values) in enumerate(prefix.to(model.base_model.dtype)):
            cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), at)
    mask = torch.cat([mask.new_ones(len(ids), length), mask], 1)
    return args, {**given, name: cache, "attention_mask": mask, "position_ids": positions + length}
