"""Load adapters for which PEFT has no format: prompts before class names, and proxy prefixes.

    adapter, trained = load_adapter(Path("runs/x/final"), model)

`model` is the base, loaded with transformers' `from_pretrained`. Loading attaches a prefix to the model; for a prompt,
`fedveil.models.clip.class_features` computes the class texts' features. Load all other adapters with PEFT.

The files are untrusted. Their size is limited by the model's, and pickles are never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from typing_extensions import TypedDict

from fedveil.adapters.adapter_types import AnyAdapter
from fedveil.adapters.export import CONFIG, WEIGHTS
from fedveil.contract.adapter import Adapter
from fedveil.errors import ConfigError, StateError
from fedveil.sanitize import sanitize

_CONFIG_BYTES = 1 << 16
_HEADER_BYTES = 1 << 22


class _Content(TypedDict):
    base: str
    adapter: AnyAdapter


def load_adapter(folder: Path, model: Any) -> tuple[Adapter, dict[str, nn.Parameter]]:
    """Attach the adapter in `folder` to `model`, in place; return the adapter and its tensors by name.

    Raises:
        StateError: the folder has no adapter, or its files are invalid or do not match the model's sizes.
        ConfigError: the model does not support the adapter.
    """
    adapter, file = _adapter(folder), folder / WEIGHTS
    size = file.stat().st_size if file.is_file() else 0
    if adapter.positions * 4 > size:
        raise _bad(file, f"tensors of {adapter.positions} positions", f"{size} bytes")
    trained = adapter.attach(model)
    wanted = sum(p.numel() for p in trained.values()) * 8 + _HEADER_BYTES
    if size > wanted:
        raise _bad(file, f"at most {wanted} bytes", f"{size}")
    _put(file, trained)
    return adapter, trained


def _adapter(folder: Path) -> Adapter:
    file = folder / CONFIG
    if not file.is_file():
        hint = "; load this one with PEFT" if (folder / "adapter_config.json").is_file() else ""
        raise StateError(f"{folder}: there is no adapter with {CONFIG} here{hint}; give the final/ folder of a run")
    with file.open("rb") as lines:
        data = lines.read(_CONFIG_BYTES + 1)
    if len(data) > _CONFIG_BYTES:
        raise _bad(file, f"at most {_CONFIG_BYTES} bytes", "more")
    try:
        return TypeAdapter(_Content).validate_json(data)["adapter"]
    except (ValidationError, ConfigError, RecursionError) as error:
        raise _bad(file, "a base and the fields of an adapter", sanitize(error, 200)) from None


@torch.no_grad()
def _put(file: Path, trained: dict[str, nn.Parameter]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _bad(file, "tensors", sanitize(error, 200)) from None
    shapes = {name: tuple(p.shape) for name, p in trained.items()}
    if {name: tuple(t.shape) for name, t in tensors.items()} != shapes:
        names = ", ".join(f"{sanitize(name, 80)} {tuple(t.shape)}" for name, t in list(tensors.items())[:3])
        raise _bad(file, f"{len(shapes)} tensors with the model's names and shapes", names or "none")
    for name, parameter in trained.items():
        parameter.copy_(tensors[name])


def _bad(file: Path, expected: str, found: str) -> StateError:
    return StateError(f"{file}: expected {expected}, found {found}; use the run's base, or copy the folder again")
