"""States on disk: one safetensors file with the scalars as JSON in its metadata, written whole or not at all.

A checksum over names, dtypes, shapes and bytes of the tensors and over the scalars stands before the scalars. Any
program that reads safetensors can read the file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedveil.contract.codec import raw
from fedveil.contract.method import State
from fedveil.contract.spec import Weights
from fedveil.errors import StateError
from fedveil.records.files import write_atomic


def save_state(state: State, path: Path, keep: Path | None = None) -> None:
    """Writes the state as one file; the old one goes to `keep`, if that is given. Raises OSError."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
    scalars = json.dumps(dict(state.scalars))
    # One entry, for safetensors writes several in any order, and equal states shall be equal files.
    write_atomic(path, save(tensors, {"scalars": f"{_checksum(tensors, scalars)} {scalars}"}), keep)


def load_state(path: Path) -> State:
    """The state that `save_state` wrote. Raises StateError for a missing or damaged file."""
    try:
        with safe_open(path, framework="pt") as file:
            checksum, _, scalars = (file.metadata() or {})["scalars"].partition(" ")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if _checksum(tensors, scalars) != checksum:
                raise ValueError("its checksum is not that of its content")
            return State(tensors, json.loads(scalars))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise StateError(
            f"{path}: expected a state file as this version writes it, found none that can be read ({error}); it was "
            "damaged, or is of an older version"
        ) from None


def digest(weights: Weights) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the weights. Equal digests mean bit-identical weights."""
    h = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(raw(tensor))
    return h.hexdigest()


def _checksum(tensors: Weights, scalars: str) -> str:
    h = xxhash.xxh3_128(scalars.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(raw(tensor))
    return h.hexdigest()
