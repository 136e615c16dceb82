"""Write folders that other programs load: adapters in PEFT's format, whole models in the format of transformers.

| adapter | files | loaded by |
|---|---|---|
| `LoraAdapter`, `HadamardLoraAdapter`, `ResidualLoraAdapter` | adapter_config.json, adapter_model.safetensors | PEFT:
  `from_pretrained` |
| `PrefixAdapter` without cells | the same | the same |
| `AllWeightsAdapter` | config.json, model.safetensors, tokenizer or processor | transformers: `from_pretrained(folder)`
  |
| `PromptAdapter`, `PrefixAdapter` with cells | adapter.json, adapter.safetensors |
  `fedveil.adapters.load.load_adapter(folder, model)` |

No file is a pickle. PEFT's files have the same names as those written by its own `save_pretrained`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.contract.adapter import Adapter, AttachedModel
from fedveil.errors import StateError
from fedveil.sanitize import sanitize

CONFIG, WEIGHTS = "adapter.json", "adapter.safetensors"  # FedVeil's own format
PEFT_WEIGHTS = "adapter_model.safetensors"


def adapter_tensors(file: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors as transformers and PEFT do: safetensors with the metadata format "pt"."""
    from safetensors.torch import save_file

    plain = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(plain, file, metadata={"format": "pt"})


def write_native(folder: Path, adapter: Adapter, weights: Mapping[str, Tensor], base: str) -> None:
    """Write an adapter in FedVeil's format if PEFT has none: its fields, and its tensors under their own names."""
    content = {"base": base, "adapter": dataclasses.asdict(adapter)}  # type: ignore[call-overload]
    (folder / CONFIG).write_text(json.dumps(content, indent=1))
    adapter_tensors(folder / WEIGHTS, weights)


def adapter_metadata(attached: AttachedModel) -> dict[str, Any]:
    """Return the entries about the model that every PEFT config contains."""
    model = attached.model
    if hasattr(model, "can_generate") and model.can_generate():  # an own model may be any torch.nn.Module
        return {"base_model_name_or_path": attached.base, "task_type": "CAUSAL_LM", "inference_mode": True}
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"base_model_name_or_path": attached.base, "task_type": "SEQ_CLS", "inference_mode": True}
    kind = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return {"base_model_name_or_path": attached.base, "auto_mapping": kind, "inference_mode": True}


def target_modules(model: Any, chosen: Collection[str]) -> list[str]:
    """Return PEFT `target_modules` that match exactly these modules, as short as PEFT's users write them.

    These are the last parts of the names, or the full names if another module's name ends in one of those parts.
    """
    last = {name.rpartition(".")[2] for name in chosen}
    within = tuple(f"{name}." for name in chosen)
    for name, _ in model.named_modules():
        if name not in chosen and name.rpartition(".")[2] in last and not name.startswith(within):
            return sorted(chosen)
    return sorted(last)


def require_loadable(folder: Path, attached: AttachedModel) -> None:
    """Load an adapter's files as a user will, by PEFT, onto the same model without weights; own models pass.

    Raises:
        StateError: PEFT does not load them, or not all of their tensors.
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
            warnings.simplefilter("ignore")  # PEFT's about transformers, and about tensors, which the result has
            loaded = PeftModel.from_pretrained(plain, str(folder), torch_device="cpu", low_cpu_mem_usage=True)
            result = loaded.load_adapter(str(folder), "default", torch_device="cpu", low_cpu_mem_usage=True)
        absent, others = len(result.missing_keys), len(result.unexpected_keys)
        problem = f"{absent} tensors that it lacks and {others} that it does not know" if absent or others else ""
    except Exception as error:  # the library raises ValueError, RuntimeError, KeyError, ...
        problem = f"{type(error).__name__}: {sanitize(error, 300)}"
    if problem:
        raise StateError(
            f"{folder}: expected an adapter that PEFT loads, found {problem}; the run's checkpoint has its weights; "
            "choose other layers by adapter.targets for another run"
        )


def write_generation(folder: Path, attached: AttachedModel) -> None:
    """Write generation_config.json with all tokens that end a text; nothing for a model that generates no text."""
    if attached.end_tokens:
        _generation_config(attached).save_pretrained(folder)


def write_merged(folder: Path, attached: AttachedModel) -> None:
    """Write the model with its tokenizer or processor by transformers' `save_pretrained`."""
    model, processor = attached.model, attached.processor
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
    config._from_model_config = False  # else transformers replaces the end tokens when it loads the model
    if ends:
        config.eos_token_id = ends if len(ends) > 1 else ends[0]
    return config
