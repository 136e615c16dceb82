"""Check for defects in a base model's folder and weights. Each defect is reported in one sentence.

| defect | without this check |
|---|---|
| the folder contains an adapter | transformers looks for the base that it names, or finds no model |
| config.json says 4-bit or 8-bit, but the weights are plain | mismatched shapes, or weights that are quantized again |
| the weights are 4-bit or 8-bit, and all of them are to be trained | packed numbers would be trained as weights |
| vocab_size in config.json differs from the embedding | an error that lists tensors of the wrong shape |
| a text has a token for which the embedding has no row | an IndexError in a round |
| a weight is NaN or infinite | a NaN loss |
| an encoder is used as a causal language model | it learns to copy its target |
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fedveil.errors import TaskError
from fedveil.sanitize import sanitize

__all__ = [
    "check_base_files",
    "check_causal",
    "check_loaded_base",
    "check_tokens",
    "embedding_rows",
    "refuse_adapter",
]

_MOST_BYTES = 1 << 20  # size limit for config.json
_MOST_HEADER = 1 << 26  # size limit for the header of a safetensors file
_MOST_FILES = 1000
_ADAPTERS = ("adapter_config.json", "adapter.json")
_QUANTIZED = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".SCB", ".weight_format")
_MORE_ROWS = {"mllama": 8, "mllama_text_model": 8}  # number of rows that transformers adds to vocab_size
_ENCODERS = ("bert-generation", "xlnet")  # encoders that transformers lists only as causal models
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def check_base_files(name: str, folder: Path, trains_base: bool) -> None:
    """Check a base's folder. Files that cannot be read here cause an error when the base is loaded.

    Args:
        name: task.model, for errors.
        trains_base: whether all weights of the base are trained.

    Raises:
        TaskError: all weights are to be trained but are quantized, the weights are plain although config.json says
            otherwise, or vocab_size does not match the embedding.
    """
    config = _config(folder)
    shapes = dict(_shapes(folder))
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        kind = sanitize(quantization.get("quant_method", "bitsandbytes"), 40)
        if trains_base:
            raise _quantized_error(name, f"{kind} in config.json")
        is_plain = shapes and not any(tensor.endswith(_QUANTIZED) for tensor in shapes)
        if kind == "bitsandbytes" and is_plain:
            raise TaskError(
                f'task.model: by its config.json, "{name}" has quantized weights, but they are not quantized; '
                'remove quantization_config from config.json, and set train.quantized-base = "4bit" to load them '
                "quantized"
            )
    part = config.get("text_config")
    text = part if isinstance(part, dict) else config
    said = text.get("vocab_size")
    if type(said) is int:
        said += _MORE_ROWS.get(str(text.get("model_type")), 0)
    rows = {shape[0] for tensor, shape in shapes.items() if tensor.endswith(_EMBEDDINGS) and len(shape) == 2}
    if type(said) is int and len(rows) == 1 and said not in rows:
        raise TaskError(
            f'task.model: the embedding of "{name}" has {rows.pop():,} rows, but vocab_size in its config.json is '
            f"{said:,}; correct vocab_size"
        )


def refuse_adapter(name: str, folder: Path) -> None:
    """Raise TaskError if the folder contains an adapter."""
    if file := next((file for file in _ADAPTERS if (folder / file).is_file()), ""):
        raise _adapter_error(name, file)


def check_loaded_base(name: str, model: Any, tokenizer: Any = None, trains_base: bool = False) -> None:
    """Check a base whose weights are loaded.

    Args:
        name: task.model, for errors.
        tokenizer: its tokenizer, if it reads texts.
        trains_base: whether all weights of the base are trained.

    Raises:
        TaskError: an adapter from the Hub, quantized weights that are to be trained, a special token that every text
            needs but for which the embedding has no row, or a weight that is NaN or infinite.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise _adapter_error(name, "adapter_config.json")
    if trains_base and getattr(model, "is_quantized", False):
        raise _quantized_error(name, "its files")
    if tokenizer is not None and (rows := embedding_rows(model)):
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        check_tokens(name, [token for token in ids if token is not None], rows)
    _check_finite(name, model)


def embedding_rows(model: Any) -> int:
    """Return the number of rows in a model's token embedding; 0 if it is not known."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # a model with two towers, such as CLIP
        return 0
    return 0 if weight is None else int(weight.shape[0])


def check_tokens(name: str, tokens: Iterable[int], rows: int) -> None:
    """Raise TaskError for a token for which the embedding has no row.

    A tokenizer may define such tokens as long as no text contains them: Gemma 3 1B, for example, has one for images.
    """
    if (highest := max(tokens, default=0)) >= rows:
        raise TaskError(
            f'task.model: the tokenizer of "{name}" gives token {highest:,}, but the embedding has only {rows:,} '
            "rows; use the base's own tokenizer, or resize the embedding and save both"
        )


@torch.no_grad()
def _check_finite(name: str, model: Any) -> None:
    """Raise TaskError if a weight is NaN or infinite; one-byte weights are quantized and are not checked."""
    for at, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.itemsize == 1 or not parameter.numel():
            continue
        if not all(math.isfinite(float(edge)) for edge in parameter.aminmax()):
            raise TaskError(
                f'task.model: the weight {sanitize(at, 200)} in "{name}" contains NaN or infinity; copy or convert '
                "the base again"
            )


def check_causal(name: str, model: Any) -> None:
    """Raise TaskError for an encoder, such as BERT, that transformers would load as a causal language model.

    Its tokens attend to the tokens after them, so it would learn to copy its target.
    """
    from transformers.models.auto import modeling_auto as auto

    config = model.config
    kind = config.model_type
    reads_all = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in _ENCODERS
    if reads_all and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
        raise TaskError(
            f'task.model: "{name}" is an encoder ("{kind}"), which does not predict each token from those before '
            'it; use a decoder such as Llama, or the task "text-classification"'
        )


def _adapter_error(name: str, file: str) -> TaskError:
    return TaskError(
        f'task.model: "{name}" contains an adapter ({file}), not a base model; merge it into its base first '
        "(`fedveil merge`, or PEFT's merge_and_unload) and use the merged model's folder"
    )


def _quantized_error(name: str, source: str) -> TaskError:
    return TaskError(
        f'task.model: expected plain weights in "{name}", because all of them are trained, found quantized ones '
        f"({source}); train low-rank pairs (LoRA), or use the original, unquantized base"
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        with (folder / "config.json").open("rb") as file:
            content = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors in a folder's safetensors files, from the file headers."""
    for path in sorted(folder.glob("*.safetensors"))[:_MOST_FILES]:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= _MOST_HEADER else {}
            yield from [(name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
        except (OSError, ValueError, struct.error, RecursionError, KeyError, TypeError, AttributeError):
            return
