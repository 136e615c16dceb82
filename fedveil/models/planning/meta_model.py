"""The shapes of a base, from transformers' own model on the meta device, without values.

So no architecture has to be defined again here. A 70B base takes a second and a few megabytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fedveil.contract.adapter import Adapter
from fedveil.contract.param_spec import ParamSpec, Spec
from fedveil.errors import TaskError
from fedveil.models import param_locations
from fedveil.models.library_logging import first_line, quiet_libraries
from fedveil.models.planning.model_config import ModelConfig

_BLOCK, _NESTED = 64, 256  # weights with one scale, and scales with one scale of their own (NF4, bitsandbytes)
_TABLES = 4 * 16 + 4 * 256 + 4  # bytes per layer: NF4's 16 values, the 256 values of its scales, and their mean


@dataclass(frozen=True)
class QuantizedLayer:
    """A linear layer that a quantized base stores in fewer bits.

    Attributes:
        entries: entries of its weight.
        outputs: rows of its weight.
    """

    entries: int
    outputs: int

    def nbytes(self, bits: str) -> int:
        """Return the bytes of its weight: "4bit" as NF4 with nested scales, "8bit" with one scale per row.

        4 bits (Dettmers et al. 2023, QLoRA): half a byte per entry, a byte per 64 entries, 4 bytes per 256 of those,
        and the tables.
        """
        if bits == "8bit":
            return self.entries + 4 * self.outputs
        scales = -(-self.entries // _BLOCK)
        return -(-self.entries // 2) + scales + 4 * -(-scales // _NESTED) + _TABLES


@dataclass(frozen=True)
class MetaModel:
    """The shapes of a base.

    Attributes:
        parts: parameters by part: embeddings, attention, MLP, norms, head (none if tied to the embedding).
        small: the layers that a quantized base stores in fewer bits.
        multiplied: number of weights that a token is multiplied with: linear layers, and the head, tied or not.
        buffers: bytes of everything except parameters.
    """

    parts: Mapping[str, int]
    small: tuple[QuantizedLayer, ...]
    multiplied: int
    buffers: int

    @property
    def parameters(self) -> int:
        """Return the number of all parameters; tied ones count once."""
        return sum(self.parts.values())

    def nbytes(self, bits: str, itemsize: int) -> int:
        """Return the bytes of a base in "none", "4bit" or "8bit"; unquantized weights take `itemsize` bytes each."""
        if bits == "none":
            return self.parameters * itemsize + self.buffers
        rest = self.parameters - sum(layer.entries for layer in self.small)
        return rest * itemsize + sum(layer.nbytes(bits) for layer in self.small) + self.buffers


def meta_model(settings: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model on the meta device, in eval mode. Raises TaskError if transformers cannot build it."""
    with quiet_libraries():
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            with torch.device("meta"):
                config = AutoConfig.for_model(settings.kind, **settings.values, bos_token_id=None, eos_token_id=None)
                return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        except Exception as error:  # the library raises ValueError, TypeError, StrictDataclassError, ...
            raise TaskError(
                f"task.model: config.json: no {settings.kind} model can be built from its settings "
                f"({first_line(error)}); correct it"
            ) from None


@lru_cache(maxsize=4)
def _of(kind: str, values: tuple[tuple[str, Any], ...]) -> MetaModel:
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    model = meta_model(ModelConfig(kind, dict(values)))
    excluded_keys, head, small, multiplied = get_keys_to_not_convert(model), model.get_output_embeddings(), [], 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        entries, is_conv = module.weight.numel(), isinstance(module, Conv1D)
        multiplied += entries
        if should_convert_module(name, excluded_keys):
            small.append(QuantizedLayer(entries, int(module.weight.shape[1 if is_conv else 0])))
    embedding = model.get_input_embeddings().weight
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        is_head = head is not None and parameter is head.weight and parameter is not embedding
        parts["head" if is_head else _part(name)] += parameter.numel()
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    return MetaModel(dict(parts), tuple(small), multiplied, buffers)


def build_meta_model(settings: ModelConfig) -> MetaModel:
    """Return the shapes of a base with these settings. Raises TaskError like `meta_model`."""
    return _of(settings.kind, tuple(sorted(settings.values.items())))


@lru_cache(maxsize=16)
def _spec(kind: str, values: tuple[tuple[str, Any], ...], adapter: Adapter) -> Spec:
    model = meta_model(ModelConfig(kind, dict(values)))
    with quiet_libraries():
        trained = adapter.attach(model)
    at = param_locations.param_locations(model, trained)
    return {
        name: ParamSpec(tuple(p.shape), torch.float32, at.get(name), fixed=not p.requires_grad)
        for name, p in trained.items()
    }


def param_specs(settings: ModelConfig, adapter: Adapter) -> Spec:
    """Return the specs of what an adapter trains in the base, as a task would. Raises ConfigError if none fit."""
    return _spec(settings.kind, tuple(sorted(settings.values.items())), adapter)


def _part(name: str) -> str:
    words = name.split(".")
    for part, marks in {"norms": ("norm", "ln_"), "attention": ("attn",), "MLP": ("mlp",)}.items():
        if any(mark in word for word in words[-2:] if part == "norms" for mark in marks):
            return part
        if part != "norms" and any(mark in word for word in words for mark in marks):
            return part
    return "embeddings"
