"""An adapter on a model: attached once, its weights put in as often as they change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedveil.adapters import hadamard_layers
from fedveil.adapters.all_weights import AllWeights
from fedveil.adapters.hadamard import HadamardLora
from fedveil.adapters.kinds import Adapter
from fedveil.adapters.prefix import Prefix
from fedveil.adapters.prompt import Prompt
from fedveil.contract.spec import Weights
from fedveil.errors import ConfigError, TaskError
from fedveil.models.library import first_line, quiet


def attach(model: Any, adapter: Adapter) -> dict[str, nn.Parameter]:
    """Attaches `adapter` to `model` in place; its parameters by canonical name, fp32, the only ones that train.

    Raises:
        ConfigError: `adapter.targets` matches no linear layer, a prompt, which no layer carries, or as `prefix.attach`.
    """
    if isinstance(adapter, AllWeights):
        return dict(model.named_parameters())  # a tied parameter comes once
    if isinstance(adapter, Prompt):
        raise ConfigError(
            'adapter.kind: expected "lora", "hadamard-lora" or "all", found "prompt"; a prompt goes with a CLIP'
        )
    if isinstance(adapter, Prefix):
        from fedveil.adapters import prefix_layers  # which needs models, which need this

        return prefix_layers.attach(model, adapter)
    if isinstance(adapter, HadamardLora):
        with quiet():
            return hadamard_layers.attach(model, adapter)
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
                f'found "{adapter.targets}" ({first_line(error)})'
            ) from None
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            trained[name.removesuffix(".default.weight")] = parameter
    return trained


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
