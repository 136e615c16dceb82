"""States on disk: one safetensors file with the scalars as JSON in its metadata, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedveil.contract.codec import raw
from fedveil.contract.method import State
from fedveil.contract.spec import Weights
from fedveil.errors import StateError
from fedveil.records.files import write_atomic


def save_state(state: State, path: Path) -> None:
    """Writes the state as one file."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
    write_atomic(path, save(tensors, {"scalars": json.dumps(dict(state.scalars))}))


def load_state(path: Path) -> State:
    """The state that `save_state` wrote. Raises StateError for a missing or damaged file."""
    try:
        with safe_open(path, framework="pt") as file:
            scalars = json.loads((file.metadata() or {})["scalars"])
            return State({name: file.get_tensor(name) for name in file.keys()}, scalars)  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StateError(f"{path}: expected a state file, found none that can be read ({error})") from None


def digest(weights: Weights) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the weights. Equal digests mean bit-identical weights."""
    h = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(raw(tensor))
    return h.hexdigest()
