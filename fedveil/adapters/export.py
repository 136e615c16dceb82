"""Write folders that other programs can load: adapters in PEFT's format, whole models in transformers' format.

| adapter | files | loaded by |
|---|---|---|
| `LoraAdapter`, `HadamardLoraAdapter`, `ResidualLoraAdapter` | adapter_config.json, adapter_model.safetensors | PEFT:
  `from_pretrained` |
| `PrefixAdapter` without cells | the same files | PEFT: `from_pretrained` |
| `AllWeightsAdapter` | config.json, model.safetensors, tokenizer or processor | transformers: `from_pretrained` |
| `AllWeightsAdapter`, for a model that transformers does not know | model.safetensors | safetensors: `load_model` |
| `PromptAdapter`, `PrefixAdapter` with cells | adapter.json, adapter.safetensors |
  `fedveil.adapters.load.load_adapter(folder, model)` |

No file is a pickle. Files in PEFT's format have the same names as those from its own `save_pretrained`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedveil.contract.adapter import Adapter, AttachedModel
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

CONFIG, WEIGHTS = "adapter.json", "adapter.safetensors"  # FedVeil's own format
PEFT_WEIGHTS = "adapter_model.safetensors"
_TASK_TYPES = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}  # PEFT's, by class


def adapter_tensors(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as transformers and PEFT do: in safetensors, with "pt" as the metadata format."""
    from safetensors.torch import save_file

    plain = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(plain, file, metadata={"format": "pt"})


def write_native(folder: Path, adapter: Adapter, weights: Mapping[str, Tensor], base: str) -> None:
    """Write an adapter in FedVeil's own format, for kinds that PEFT lacks: its fields, and its tensors by name."""
    content = {"base": base, "adapter": dataclasses.asdict(adapter)}  # type: ignore[call-overload]
    (folder / CONFIG).write_text(json.dumps(content, indent=1))
    adapter_tensors(folder / WEIGHTS, weights)


def adapter_metadata(attached: AttachedModel) -> dict[str, Any]:
    """Return the model entries that every PEFT config contains."""
    model = attached.model
    if hasattr(model, "can_generate") and model.can_generate():  # a user's own model may be any torch.nn.Module
        return {"base_model_name_or_path": attached.base, "task_type": "CAUSAL_LM", "inference_mode": True}
    for ending, task_type in _TASK_TYPES.items():
        # With these types PEFT expects a head that is saved in full, but an own model may have pairs in its head
        # instead.
        if attached.heads and type(model).__name__.endswith(ending):
            return {"base_model_name_or_path": attached.base, "task_type": task_type, "inference_mode": True}
    kind = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return {"base_model_name_or_path": attached.base, "auto_mapping": kind, "inference_mode": True}


def target_modules(model: Any, chosen: Collection[str]) -> list[str]:
    """Return PEFT `target_modules` that match exactly these modules, in PEFT's usual short form if possible.

    The short form is the last part of each name; full names are needed if another module's name ends in the same part.
    """
    last = {name.rpartition(".")[2] for name in chosen}
    within = tuple(f"{name}." for name in chosen)
    for name, _ in model.named_modules():
        if name not in chosen and name.rpartition(".")[2] in last and not name.startswith(within):
            return sorted(chosen)
    return sorted(last)


def require_loadable(folder: Path, attached: AttachedModel) -> None:
    """Check that PEFT can load an adapter's files onto the model's architecture; users' own models are exempt.

    Raises:
        StateError: PEFT cannot load the files, or not all of their tensors.
    """
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    model = attached.model
    if not isinstance(model, PreTrainedModel):
        return
    try:
        with torch.device("meta"):
            plain = type(model)(copy.deepcopy(model.config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns about transformers, and about tensors that are checked below
            loaded = PeftModel.from_pretrained(plain, str(folder), torch_device="cpu", low_cpu_mem_usage=True)
            result = loaded.load_adapter(str(folder), "default", torch_device="cpu", low_cpu_mem_usage=True)
        absent, others = len(result.missing_keys), len(result.unexpected_keys)
        problem = f"{absent} missing and {others} unknown tensors" if absent or others else ""
    except Exception as error:  # the library raises ValueError, RuntimeError, KeyError, ...
        problem = f"{type(error).__name__}: {sanitize(error, 300)}"
    if problem:
        raise StateError(
            f"{folder}: PEFT cannot load this adapter: {problem}. The weights are still in the run's checkpoint. "
            "Choose other layers in adapter.targets for the next run"
        )


def write_generation(folder: Path, attached: AttachedModel) -> None:
    """Write generation_config.json with all end tokens; write nothing for a model that does not generate text."""
    if attached.end_tokens:
        _generation_config(attached).save_pretrained(folder)


def write_network(folder: Path, network: nn.Module) -> None:
    """Write all tensors of the state_dict to model.safetensors; tied tensors appear once."""
    from safetensors.torch import save_model

    save_model(network, str(folder / "model.safetensors"), metadata={"format": "pt"})


def write_merged(folder: Path, attached: AttachedModel) -> None:
    """Write the model with its tokenizer or processor, using transformers' `save_pretrained`.

    If transformers does not know the model, write only its tensors, as `write_network` does.
    """
    model, processor = attached.model, attached.processor
    if not hasattr(model, "save_pretrained"):
        write_network(folder, model)
        return
    original_config = model.generation_config if model.can_generate() else None
    if original_config is not None:
        model.generation_config = _generation_config(attached)
    try:
        model.save_pretrained(folder)
    finally:
        if original_config is not None:
            model.generation_config = original_config
    if processor is not None:
        processor.save_pretrained(folder)


def _generation_config(attached: AttachedModel) -> Any:
    """Return the model's generation config with the end tokens used in training.

    A task removes the base's own generation config, which may turn sampling on.
    """
    from transformers import GenerationConfig

    config, ends = GenerationConfig.from_model_config(attached.model.config), list(attached.end_tokens)
    config._from_model_config = False  # otherwise transformers would replace the end tokens when loading the model
    if ends:
        config.eos_token_id = ends if len(ends) > 1 else ends[0]
    return config
