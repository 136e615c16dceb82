"""Read a base's config.json safely: no code from its folder runs, and no number in it can exhaust the machine.

| model_type | architecture |
|---|---|
| gpt2 | learned positions; one matrix for query, key and value; a tied head |
| llama, mistral, qwen2, qwen3 | rotary positions, grouped-query attention, a gated MLP |

Other types are not supported, because this module does not know which of their settings determine the size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.errors import TaskError
from fedveil.sanitize import sanitize

_MOST_BYTES = 1 << 20  # size limit for config.json; actual files have a few kilobytes
_NEXT = "use the config.json of a base that FedVeil can load"
_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
_CODE = ("auto_map", "custom_pipelines")


@dataclass(frozen=True)
class _Number:
    """An integer in the file: its upper bound, and whether it may be missing."""

    most: int
    optional: bool = False


_VOCABULARY, _WIDTH, _LAYERS, _HEADS = _Number(1 << 22), _Number(1 << 16), _Number(512), _Number(1 << 10)
_GPT2 = {"vocab_size": _VOCABULARY, "n_positions": _Number(1 << 20), "n_embd": _WIDTH, "n_layer": _LAYERS}
_GPT2 |= {"n_head": _HEADS, "n_inner": _Number(1 << 20, optional=True)}
_LLAMA = {"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": _LAYERS}
_LLAMA |= {"num_attention_heads": _HEADS, "intermediate_size": _Number(1 << 20)}
_LLAMA |= {"num_key_value_heads": _Number(1 << 10, optional=True), "head_dim": _Number(1 << 12, optional=True)}
_LLAMA |= {"max_position_embeddings": _Number(1 << 24, optional=True)}
_NUMBERS: Mapping[str, Mapping[str, _Number]] = {
    "gpt2": _GPT2, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA
}  # fmt: skip
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")


@dataclass(frozen=True)
class ModelConfig:
    """The entries of a config.json that determine the size of a base.

    Attributes:
        kind: its model_type.
        values: config values by transformers' own names.
        stored: bytes per entry on disk, as stated in the file; 4 if it does not say.
    """

    kind: str
    values: Mapping[str, Any]
    stored: int = 4

    @property
    def layers(self) -> int:
        """Return the number of attention and MLP blocks."""
        return int(self.values[self._key("n_layer", "num_hidden_layers")])

    @property
    def width(self) -> int:
        """Return the width of the hidden state."""
        return int(self.values[self._key("n_embd", "hidden_size")])

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return int(self.values[self._key("n_head", "num_attention_heads")])

    @property
    def shares_keys(self) -> bool:
        """Return whether several query heads share one key head (grouped-query attention)."""
        return int(self.values.get("num_key_value_heads", self.heads)) != self.heads

    @property
    def context(self) -> int | None:
        """Return the base's number of token positions; None if the file does not say."""
        return self.values.get(self._key("n_positions", "max_position_embeddings"))

    def cut(self, layers: int) -> ModelConfig:
        """Return the same base with this many layers."""
        key = self._key("n_layer", "num_hidden_layers")
        return ModelConfig(self.kind, {**self.values, key: layers}, self.stored)

    def _key(self, gpt2: str, other: str) -> str:
        return gpt2 if self.kind == "gpt2" else other


def read_model_config(folder: Path) -> ModelConfig:
    """Read the settings of the base in `folder`, without opening its weights.

    Raises:
        TaskError: config.json is missing, too long, not a JSON object, needs its own code, is quantized, or has an
            unsupported type; or a setting is missing, has the wrong type or is out of range.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise TaskError(f"task.model: there is no config.json in {sanitize(folder)}; {_NEXT}")
    with file.open("rb") as opened:
        text = opened.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise _unfit("its size", f"at most {_MOST_BYTES:,} bytes", f"{file.stat().st_size:,}")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unfit("its text", "JSON", type(error).__name__) from None
    if not isinstance(content, dict):
        raise _unfit("its text", "an object", type(content).__name__)
    for key in _CODE:
        if key in content:
            raise _unfit(key, "no code of its own, which FedVeil never runs", sanitize(content[key], 80))
    if "quantization_config" in content:
        raise _unfit("quantization_config", "weights of 16 or 32 bits, which FedVeil quantizes itself", "one")
    return _checked(content)


def _checked(content: Mapping[str, Any]) -> ModelConfig:
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in _NUMBERS:
        raise _unfit(
            "model_type",
            f"one of {', '.join(_NUMBERS)}, the types that memory planning supports",
            sanitize(repr(kind), 80),
        )
    values: dict[str, Any] = {}
    for key, number in _NUMBERS[kind].items():
        value = content.get(key)
        if value is None and number.optional:
            continue
        if type(value) is not int or not 1 <= value <= number.most:
            raise _unfit(key, f"a whole number from 1 to {number.most:,}", sanitize(repr(value), 80))
        values[key] = value
    for key in _SWITCHES:
        if (value := content.get(key)) is not None:
            if type(value) is not bool:
                raise _unfit(key, "true or false", sanitize(repr(value), 80))
            values[key] = value
    stored = content.get("dtype", content.get("torch_dtype")) or "float32"
    if not isinstance(stored, str) or stored not in _DTYPES:
        raise _unfit("dtype", f"one of {', '.join(_DTYPES)}", sanitize(repr(stored), 80))
    model_config = ModelConfig(kind, values, _DTYPES[stored])
    of_keys = values.get("num_key_value_heads", model_config.heads)
    if "head_dim" not in values and model_config.width % model_config.heads:
        raise _unfit("width", f"a multiple of its {model_config.heads} heads", str(model_config.width))
    if model_config.heads % of_keys:
        raise _unfit("num_key_value_heads", f"a divisor of the {model_config.heads} heads", str(of_keys))
    return model_config


def _unfit(key: str, expected: str, found: str) -> TaskError:
    return TaskError(f"task.model: config.json: {key}: expected {expected}, found {found}; {_NEXT}")
