"""Layers in mixtures of experts that get no low-rank pair.

transformers stores the experts of a block as one parameter with three axes, not as linear layers. PEFT has adapters for
such parameters, but their factors are blocks for all experts: the product B A is not a weight change, so the methods
here cannot sum, stack or merge them. For some families (Mixtral, Qwen3-MoE, DeepSeek-V3), PEFT also treats the names of
ordinary layers, such as the shared expert's `gate_proj`, as expert names, in any adapter_config.json.

| part | pair |
|---|---|
| attention, and other linear layers | yes |
| experts and router | no; the log gives their share of the base's weights |
| a linear layer whose name PEFT treats as an expert name | no; refused if adapter.targets names it |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["converts_targets", "find_expert_layers", "log_unpaired"]

log = logging.getLogger("fedveil.models")


def converts_targets(model: Any) -> bool:
    """Return whether PEFT treats the name of any of the model's layers as an expert name."""
    return bool(_converted(model, "all-linear") != "all-linear")


def find_expert_layers(model: Any, names: Iterable[str]) -> set[str]:
    """Return the linear layers in `names` that PEFT treats as experts."""
    listed = list(names)
    if not converts_targets(model):
        return set()
    leaves = {name.rpartition(".")[2] for name in listed}
    moved = {leaf for leaf in leaves if leaf not in _converted(model, [leaf])}
    return {name for name in listed if name.rpartition(".")[2] in moved}


def _converted(model: Any, targets: str | list[str]) -> Any:
    """Return an adapter's target modules as PEFT converts them for this model."""
    from peft import LoraConfig

    if not hasattr(getattr(model, "config", None), "model_type"):
        return targets
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # this version of PEFT does not convert names
        return targets
    config = LoraConfig(target_modules=targets)
    try:
        conversion.convert_peft_config_for_transformers(
            config, model=model, conversions=conversion.get_model_conversion_mapping(model)
        )
    except ValueError:  # one of several layers that PEFT merges into one
        return []
    return config.target_modules


def log_unpaired(model: Any, paired: Iterable[str]) -> None:
    """Log the share of a model's weights in experts and in layers that PEFT treats as experts, if there are any.

    Args:
        paired: the names of the layers that have a pair.
    """
    named = dict(model.named_parameters())
    convolutions = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    experts = {name for name, p in named.items() if p.ndim == 3 and min(p.shape) > 1 and name not in convolutions}
    if not experts:
        return
    own = {name for name in named if ".lora_" not in name and ".private_" not in name}
    linear = (name for name, m in model.named_modules() if isinstance(m, nn.Linear))
    left_out = {f"{name}.weight" for name in find_expert_layers(model, linear)} - {f"{n}.weight" for n in paired}
    count = sum(named[name].numel() for name in experts | (left_out & own))
    total = sum(named[name].numel() for name in own)
    log.warning(
        "adapter.targets: %s of the base's %s weights (%.0f %%) are in experts, which get no pair: only attention and "
        "other linear layers are trained", f"{count:,}", f"{total:,}", 100 * count / total,
    )  # fmt: skip
