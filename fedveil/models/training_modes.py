"""Modes of training steps: recomputed activations, a compiled model, and adapter dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fedveil.config import RunConfig
from fedveil.errors import ConfigError


def check_compile(config: RunConfig) -> None:
    """Check that train.compile is compatible with the rest of the run config.

    The compiler times several versions of a kernel and keeps the fastest. Two processes may then sum in different
    orders, so train.compile is refused with run.deterministic.

    Raises:
        ConfigError: train.compile is combined with a quantized base, whose kernels cannot be compiled, with recomputed
            layers, or with run.deterministic.
    """
    if not config.train.compile:
        return
    if config.train.quantized_base != "none":
        raise ConfigError(
            f'train.compile: torch cannot compile train.quantized-base = "{config.train.quantized_base}"; set '
            "train.compile = false, or keep the base unquantized"
        )
    if config.train.gradient_checkpointing:  # torch 2.13 fails on checkpointed layers with an internal error
        raise ConfigError(
            "train.compile: torch cannot compile layers that are recomputed (train.gradient-checkpointing = "
            "true); set one of the two to false"
        )
    if config.run.deterministic:
        raise ConfigError(
            "train.compile: a compiled model is not bit-for-bit reproducible, as run.deterministic = true "
            "requires; set one of the two to false"
        )


def compile_model(model: Any, device: torch.device) -> Any:
    """Compile `model` for batches of any shape; its layers are compiled on first use.

    Raises:
        ConfigError: this machine cannot compile for `device`.
    """
    try:  # only an attempt shows whether the compiler, headers and Triton are installed and work together
        torch.compile(torch.square)(torch.ones(3, device=device))
    except Exception as error:  # torch passes on whatever the failing part of its compiler raises
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"train.compile: torch.compile does not work here for {device.type} ({reason}); install a C++ compiler, "
            "and for CUDA also Triton, or set train.compile = false"
        ) from None
    return torch.compile(model, dynamic=True)


@contextlib.contextmanager
def enable_dropout(model: Any, device: torch.device, generator: torch.Generator) -> Iterator[None]:
    """Enable dropout in PEFT's adapters, drawn from `generator`; restore the previous state afterwards."""
    dropouts = [module for name, module in model.named_modules() if ".lora_dropout." in name]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(generator.initial_seed())
        try:
            for module in dropouts:
                module.training = True
            yield
        finally:
            for module in dropouts:
                module.training = False


@contextlib.contextmanager
def recompute_activations(model: Any, name: str, is_random: bool = False) -> Iterator[None]:
    """Make each layer of `model` keep only its input and recompute the rest in the backward pass.

    The library does so only in training mode, so the layers get that flag, while their submodules stay in eval mode; a
    layer's own dropout is set to 0 meanwhile. The flags are reset afterwards, because a layer in training mode ignores
    the cache during generation. With `is_random`, the second pass repeats the first one's dropout.

    Raises:
        ConfigError: the model `name` has no layers that can be recomputed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(
            f'train.gradient-checkpointing: the layers of "{name}" ({type(model).__name__}) cannot be recomputed; '
            "set train.gradient-checkpointing = false"
        )
    # If nothing in a layer is random, the generators' state does not have to be stored for the second pass.
    how = {"use_reentrant": False, "preserve_rng_state": is_random}
    # Newer versions of the library use the name with "activation", and warn about the older one.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(how)
    before = [{key: value for key, value in vars(layer).items() if _drops(key, value)} for layer in layers]
    try:
        for layer, dropouts in zip(layers, before, strict=True):
            layer.training = True
            for key in dropouts:
                setattr(layer, key, 0.0)
        yield
    finally:
        model.disable_input_require_grads()  # torch.func does not support this hook for per-example gradients
        for layer, dropouts in zip(layers, before, strict=True):
            layer.training = False
            for key, value in dropouts.items():
                setattr(layer, key, value)


def _drops(key: str, value: object) -> bool:
    return "drop" in key and isinstance(value, float)
