"""Load a Hugging Face base model with its adapter, from a folder or the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedveil.config import RunConfig
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError, TaskError
from fedveil.models import base_files, bundled
from fedveil.models import param_locations as layers
from fedveil.models.library_logging import first_line, quiet_libraries
from fedveil.models.loaded_model import LoadedModel
from fedveil.sanitize import sanitize

__all__ = [
    "check_whole",
    "find_model",
    "load_causal",
    "load_model",
    "load_seeing",
    "load_without_weights",
    "pick_device",
]

NEXT = 'use "tiny", a folder written by save_pretrained, or a Hub ID that this machine can reach or has cached'
GENERATION = "generation_config.json"
SHORTEST = 8  # tokens; the minimum for task.max-tokens
_CONFIG_BYTES = 1 << 20


def find_model(name: str, tiny_folder: Path | None) -> tuple[str, bool]:
    """Return the location of `task.model`, a folder or a Hub ID, and whether it is a folder. The Hub is not queried.

    "tiny" stands for `tiny_folder`, the task's own base. Without that folder, "tiny" is returned unchanged: the task
    builds that model in code, or refuses it.

    Raises:
        TaskError: the path does not lead to a folder with a model.
    """
    if name == "tiny":
        return str(tiny_folder or name), True
    folder = Path(name).expanduser()
    if folder.is_dir():
        base_files.refuse_adapter(name, folder)
        if not (folder / "config.json").is_file():
            raise TaskError(
                f'task.model: there is no config.json in "{name}" (it has '
                f"{name_some(sorted(p.name for p in folder.iterdir()))}); {NEXT}"
            )
        return str(folder), True
    if not name or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or folder.exists():
        raise TaskError(f'task.model: there is no folder with a model at "{name}"; {NEXT}')
    return name, False


def check_context(config: RunConfig, adapter: Adapter, tiny_folder: Path | None) -> None:
    """Check, from its config.json alone, that a local base has room for task.max-tokens and a generated text.

    Raises:
        ConfigError: the base's context is too short.
        TaskError: like `find_model`.
    """
    where, is_folder = find_model(config.task.model, tiny_folder)
    if not is_folder or where == "tiny":
        return
    try:
        with (Path(where) / "config.json").open("rb") as file:
            content = json.loads(file.read(_CONFIG_BYTES))
        content = content.get("text_config") or content
        named = [content.get(key) for key in ("max_position_embeddings", "n_positions")]
    except (OSError, ValueError, RecursionError, AttributeError):  # loading the base reports the problem later
        return
    if numbers := [number for number in named if type(number) is int]:
        _fitting(max(numbers), config, adapter)


def pick_device(device: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:1". Raises ConfigError if it does not exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    there = kind == "cpu" or (kind == "cuda" and int(index or 0) < torch.cuda.device_count())
    if not there:
        raise ConfigError(
            f'device: expected "auto", "cpu" or one of {torch.cuda.device_count()} CUDA devices, found "{device}"; '
            'set it to "auto" to use a GPU if the machine has one'
        )
    return torch.device(device)


def load_causal(config: RunConfig, adapter: Adapter, device: torch.device, tiny_folder: Path | None) -> LoadedModel:
    """Load the causal language model `config.task.model` on `device`, with `adapter` attached.

    A frozen base is in bf16 if `train.precision = bf16`, and may be quantized; trained weights are fp32.

    Raises:
        TaskError: the base or its tokenizer cannot be loaded completely.
        ConfigError: the adapter fits no layer of the base, or the base does not support task.max-tokens.
    """
    with quiet_libraries():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kind = "a causal language model with its tokenizer"
        where = find_model(config.task.model, tiny_folder)
        model, tokenizer = load_model(config, adapter, device, where, AutoModelForCausalLM, AutoTokenizer, kind)
        base_files.check_causal(config.task.model, model)
        base_files.check_loaded_base(config.task.model, model, tokenizer, adapter.trains_base)
        ends = _end_tokens(config.task.model, where, tokenizer)
        trained = adapter.attach(model)
    base = LoadedModel(prepare_model(model, config, device), tokenizer, trained, _context(model, config, adapter))
    return replace(base, places=layers.param_locations(model, trained), end_tokens=ends)


def load_seeing(config: RunConfig, adapter: Adapter, device: torch.device, tiny_folder: Path | None) -> LoadedModel:
    """Load the image-text-to-text model `config.task.model`; its language model gets the adapter, the rest is frozen.

    Trained tensors are named relative to the language model. Precision is as in `load_causal`.

    Raises:
        TaskError: like `load_causal`; also a model of a different kind, or a processor without an image processor or
            chat template.
        ConfigError: like `load_causal`.
    """
    name = config.task.model
    with quiet_libraries():
        from transformers import AutoModelForImageTextToText, AutoProcessor

        kind = "an image-text-to-text model with its processor"
        where = find_model(name, tiny_folder)
        model, processor = load_model(config, adapter, device, where, AutoModelForImageTextToText, AutoProcessor, kind)
        if not hasattr(processor, "image_processor"):
            raise TaskError(f'task.model: "{name}" has no processor for images and text; {NEXT}')
        if not getattr(processor, "chat_template", None):
            raise TaskError(
                f'task.model: the processor of "{name}" has no chat template; add chat_template.jinja to its '
                "folder, or use an instruction-tuned model"
            )
        language = getattr(model.base_model, "language_model", None)
        if language is None:
            raise TaskError(
                f'task.model: {type(model).__name__} in "{name}" does not have a vision tower with a language '
                f"model; {NEXT}"
            )
        base_files.check_loaded_base(name, model, processor.tokenizer, adapter.trains_base)
        ends = _end_tokens(name, where, processor.tokenizer)
        model.requires_grad_(False)
        trained = adapter.attach(language.requires_grad_(True))
    context = _context(model, config, adapter)
    base = LoadedModel(prepare_model(model, config, device), processor.tokenizer, trained, context, processor)
    image_token = getattr(model.config, "image_token_id", None)
    return replace(base, image_token=image_token, places=layers.param_locations(language, trained), end_tokens=ends)


def load_without_weights(
    config: RunConfig, adapter: Adapter, tiny_folder: Path | None, model_of: Any, processor_of: Any
) -> LoadedModel:
    """Load only what the local base `config.task.model` needs to prepare texts: its processor, and no weights.

    Args:
        model_of, processor_of: transformers' own classes for the model and the processor or tokenizer.

    Raises TaskError or ConfigError like `load_causal`, for problems that can be detected without weights.
    """
    from transformers import AutoConfig

    name, found = config.task.model, find_model(config.task.model, tiny_folder)
    with quiet_libraries():
        try:
            processor = processor_of.from_pretrained(found[0], **library_arguments(is_local=True))
            with torch.device("meta"):
                model = model_of.from_config(AutoConfig.from_pretrained(found[0], **library_arguments(is_local=True)))
        except Exception as error:  # as in `load_model`
            raise TaskError(f'task.model: cannot read the base "{name}" ({first_line(error)}); {NEXT}') from None
        tokenizer = getattr(processor, "tokenizer", processor)
        ends = _end_tokens(name, found, tokenizer) if model.can_generate() else ()
    image_token = getattr(model.config, "image_token_id", None)
    context = _context(model, config, adapter)
    return LoadedModel(model, tokenizer, {}, context, processor, end_tokens=ends, image_token=image_token)


def library_arguments(is_local: bool) -> dict[str, bool]:
    """Return the arguments for loading a model or processor, which ensure that no code from its folder runs."""
    return {"local_files_only": is_local, "trust_remote_code": False}


def load_model(
    config: RunConfig,
    adapter: Adapter,
    device: torch.device,
    found: tuple[str, bool],
    model_of: Any,
    processor_of: Any,
    kind: str,
) -> tuple[Any, Any]:
    """Load a model and its processor (or tokenizer) from the result of `find_model`, using transformers' own classes.

    Raises:
        TaskError: they cannot be loaded completely; the message says that `kind` was expected.
    """
    name, (where, is_local) = config.task.model, found
    if where == "tiny":
        raise TaskError(f'task.model: the tiny base of "{config.task.name}" is not installed; {bundled.HOW_TO_GET_IT}')
    try:
        processor = processor_of.from_pretrained(where, **library_arguments(is_local))
        model, info = model_of.from_pretrained(
            where,
            **library_arguments(is_local),
            output_loading_info=True,
            **precision_arguments(config, adapter, device),
        )
    except Exception as error:  # the library raises OSError, ValueError, KeyError, SafetensorError, ...
        raise TaskError(f'task.model: cannot load "{name}" as {kind} ({first_line(error)}); {NEXT}') from None
    check_whole(name, info)
    if getattr(processor, "tokenizer", processor).eos_token_id is None:
        raise TaskError(f'task.model: the tokenizer of "{name}" has no end token; set its eos_token')
    return model, processor


def _end_tokens(name: str, found: tuple[str, bool], tokenizer: Any) -> tuple[int, ...]:
    """Return the tokenizer's end token, then the other end tokens in the base's generation_config.json.

    Without this file, transformers would use the end token in config.json, which is often just the class default and
    an ordinary token of the base.

    Raises:
        TaskError: the file is invalid, or its end tokens are not valid token IDs.
    """
    from transformers import GenerationConfig

    (where, is_local), own = found, int(tokenizer.eos_token_id)
    if is_local and not (Path(where) / GENERATION).is_file():
        return (own,)
    try:
        given = GenerationConfig.from_pretrained(where, local_files_only=is_local).eos_token_id
    except Exception as error:  # the library raises OSError, ValueError, TypeError, ...
        if isinstance(error, OSError) and not is_local:
            return (own,)  # most bases on the Hub have no such file
        raise TaskError(f'task.model: cannot read {GENERATION} of "{name}" ({first_line(error)}); {NEXT}') from None
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if wrong := [end for end in ends if type(end) is not int or not 0 <= end < len(tokenizer)]:
        raise TaskError(
            f'task.model: eos_token_id in {GENERATION} of "{name}" must be from 0 to {len(tokenizer) - 1}, found '
            f"{sanitize(wrong[0], 40)}; correct the file"
        )
    return (own, *sorted({*ends} - {own}))


def _context(model: Any, config: RunConfig, adapter: Adapter) -> int | None:
    """Return the model's maximum number of tokens. Raises ConfigError if it is below task.max-tokens."""
    context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if context is None else _fitting(context, config, adapter)


def _fitting(context: int, config: RunConfig, adapter: Adapter) -> int:
    left = context - adapter.positions
    if (config.task.max_tokens or SHORTEST) > left:
        taken = f" minus {adapter.positions} positions for the {adapter.kind}" if adapter.positions else ""
        raise ConfigError(
            f"task.max-tokens: expected at most {left}, the context of {config.task.model}{taken}, found "
            f"{config.task.max_tokens or SHORTEST}; lower it{' or use a smaller adapter' if taken else ''}"
        )
    new = config.evaluate.max_new_tokens
    if config.task.evaluation and config.evaluate.generate != "never" and new >= left:
        raise ConfigError(f"evaluate.max-new-tokens: expected less than {left}, the context, found {new}; lower it")
    return left


def prepare_model(model: Any, config: RunConfig, device: torch.device) -> Any:
    """Move a model to its device, switch it to eval mode, and remove its own sampling defaults."""
    if model.can_generate():
        model.generation_config = type(model.generation_config)()
    model = (model.to(device) if config.train.quantized_base == "none" else model).eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            # In eval mode, bitsandbytes repacks the base on some CPUs; this is lossy and supports only widths that are
            # multiples of 64.
            module.training = True
    return model


def precision_arguments(config: RunConfig, adapter: Adapter, device: torch.device) -> dict[str, Any]:
    is_frozen = not adapter.trains_base
    dtype = torch.bfloat16 if is_frozen and config.train.precision == "bf16" else torch.float32
    if config.train.quantized_base == "none":
        return {"dtype": dtype}
    from transformers import BitsAndBytesConfig

    if config.train.quantized_base == "4bit":
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
        )
    else:
        quantisation = BitsAndBytesConfig(load_in_8bit=True)
    return {"dtype": dtype, "quantization_config": quantisation, "device_map": {"": str(device)}}


def check_whole(name: str, info: Mapping[str, Any]) -> None:
    """Raise TaskError for missing tensors, which the library would fill with random values after a mere warning."""
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise TaskError(
            f'task.model: "{name}" lacks the weights {name_some(absent)}, or they have a different shape; {NEXT}'
        )


def name_some(names: list[str]) -> str:
    """Return the first few of `names` for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
