"""Loading a Hugging Face base model from a folder or the hub, and attaching an adapter to it."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.adapters import Adapter, Lora
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, TaskError
from fedveil.method import Weights
from fedveil.rng import Stream
from fedveil.tasks import tiny

_NOISY = (
    "bitsandbytes",
    "huggingface_hub",
    "peft",
    "transformers.modeling_utils",
    "transformers.distributed",
    "transformers.utils.loading_report",
)
_NEXT = 'give "tiny", a folder made with save_pretrained, or a hub id that this machine can reach or has cached'


@dataclass(frozen=True)
class Base:
    """A base model with its adapter.

    Attributes:
        model: in eval mode (4-bit layers apart, which drop nothing), so nothing is dropped out; only `trained` asks for gradients.
        tokenizer: has an end token.
        trained: the adapter's parameters by their canonical names, fp32, in the model's order.
        context: longest sequence of tokens; None where the model sets no limit.
    """

    model: Any
    tokenizer: Any
    trained: Mapping[str, nn.Parameter]
    context: int | None


def find(name: str) -> tuple[str, bool]:
    """Where `task.model` lies: (folder or hub id, whether it is a folder). The hub is not asked here.

    Raises:
        TaskError: "tiny" is not installed, or a path has no folder with a model.
    """
    if name == "tiny":
        return str(tiny.folder()), True
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TaskError(
                f'task.model: expected a model folder with config.json, found none in "{name}" '
                f"(it has {_some(sorted(p.name for p in folder.iterdir()))}); {_NEXT}"
            )
        return str(folder), True
    if not name or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or folder.exists():
        raise TaskError(f'task.model: expected a folder with a model, found none at "{name}"; {_NEXT}')
    return name, False


def pick_device(device: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "cuda:1" means. Raises ConfigError where it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    there = kind == "cpu" or (kind == "cuda" and int(index or 0) < torch.cuda.device_count())
    if not there:
        raise ConfigError(
            f'device: expected "auto", "cpu" or one of {torch.cuda.device_count()} CUDA devices, found "{device}"; '
            f'use "auto" to take what the machine has'
        )
    return torch.device(device)


def load_causal(config: RunConfig, adapter: Adapter, device: torch.device) -> Base:
    """The causal language model of `config.task.model` with `adapter` attached, on `device`.

    A base that is only read is kept as bf16 under `train.precision = bf16`, or quantised; what is trained is fp32.

    Raises:
        TaskError: the base or its tokenizer cannot be loaded whole.
        ConfigError: the adapter fits no layer of it, or it is not made for task.max-tokens.
    """
    where, is_local = find(config.task.model)
    with quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=is_local)
            model, info = AutoModelForCausalLM.from_pretrained(
                where, local_files_only=is_local, output_loading_info=True, **_precision(config, adapter, device)
            )
        except Exception as error:  # the library raises OSError, ValueError, KeyError, SafetensorError, ...
            raise TaskError(
                f'task.model: expected a causal language model with its tokenizer, found that "{config.task.model}" '
                f"does not load ({_first_line(error)}); {_NEXT}"
            ) from None
        _check_whole(config.task.model, tokenizer, info)
        trained = attach(model, adapter)
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and config.task.max_tokens > context:
        raise ConfigError(
            f"task.max-tokens: expected at most {context}, the context of {config.task.model}, "
            f"found {config.task.max_tokens}; lower it"
        )
    model.generation_config = type(model.generation_config)()  # a hub model may bring sampling defaults
    if config.train.quantized_base == "none":
        model = model.to(device)
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            # In eval mode bitsandbytes repacks the base on some CPUs: lossy, and only for widths that are multiples of 64.
            module.training = True
    return Base(model, tokenizer, trained, context)


def _precision(config: RunConfig, adapter: Adapter, device: torch.device) -> dict[str, Any]:
    is_frozen = isinstance(adapter, Lora)
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


def _check_whole(name: str, tokenizer: Any, info: Mapping[str, Any]) -> None:
    """The library would fill absent tensors with random values, and only say so."""
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise TaskError(
            f'task.model: expected all weights of the model, found that "{name}" lacks {_some(absent)} or has them '
            f"in another shape; {_NEXT}"
        )
    if tokenizer.eos_token_id is None:
        raise TaskError(
            f'task.model: expected a tokenizer with an end token, found none in "{name}"; set its eos_token'
        )


def attach(model: Any, adapter: Adapter) -> dict[str, nn.Parameter]:
    """Attaches `adapter` to `model` in place; its parameters by canonical name, fp32, the only ones that train.

    Raises:
        ConfigError: `adapter.targets` matches no linear layer.
    """
    if not isinstance(adapter, Lora):
        return dict(model.named_parameters())  # a tied parameter comes once
    with quiet(), torch.random.fork_rng(devices=[]):  # PEFT draws initial values that nobody uses
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        lora = LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.scale * adapter.rank,  # PEFT divides by the rank; any number does
            target_modules=adapter.targets,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),
            lora_dropout=0.0,
            bias="none",
        )
        try:
            model = inject_adapter_in_model(lora, model)
        except ValueError as error:
            raise ConfigError(
                f'adapter.targets: expected "all-linear" or a regular expression over the names of linear layers, '
                f'found "{adapter.targets}" ({_first_line(error)})'
            ) from None
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            trained[name.removesuffix(".default.weight")] = parameter
    return trained


def draw_lora(shapes: Mapping[str, tuple[int, ...]], rng: Stream) -> dict[str, Tensor]:
    """Initial factors under the names of `shapes`, in their order: A uniform within 1/sqrt(d_in), B zero.

    The draws go by sorted name, so they do not depend on the order of the mapping.
    """
    generator = rng.torch_generator()
    drawn = {name: torch.zeros(shapes[name]) for name in sorted(shapes)}
    for name, tensor in drawn.items():
        if name.endswith(".lora_A"):
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    return {name: drawn[name] for name in shapes}


def put(weights: Weights, trained: Mapping[str, nn.Parameter]) -> None:
    """Copies `weights` into the model's parameters.

    Raises:
        TaskError: a tensor is missing, unknown or of another shape; then nothing was copied.
    """
    for name in trained:
        if name not in weights:
            raise TaskError(f"weights: expected {name}, found no such tensor; send every tensor of the spec")
    for name, weight in weights.items():
        if name not in trained:
            raise TaskError(f"weights: expected the tensors of the spec, found {name}; use one adapter on both sides")
        if weight.shape != trained[name].shape:
            raise TaskError(
                f"weights: expected {name} of shape {tuple(trained[name].shape)}, found {tuple(weight.shape)}; "
                f"use one base and one adapter on both sides"
            )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(weights[name])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the libraries' progress bars, advice and import-time warnings off the terminal; errors still raise."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        from transformers.utils import logging as hf

        had_bars = hf.is_progress_bar_enabled()
        hf.disable_progress_bar()
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            if had_bars:
                hf.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _some(names: list[str]) -> str:
    """The first few of `names` for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
