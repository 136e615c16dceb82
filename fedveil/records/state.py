"""States on disk: one safetensors file with the scalars as JSON in its metadata, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedveil.contract.codec import raw
from fedveil.contract.method import State
from fedveil.contract.spec import Weights
from fedveil.errors import StateError
from fedveil.records.files import write_atomic

# The names of the safetensors format.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_state(state: State, path: Path) -> None:
    """Writes the state as one file, tensor by tensor: no second copy of it is in memory."""
    write_atomic(path, _safetensors(state.tensors, {"scalars": json.dumps(dict(state.scalars))}))


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file: length of the header (uint64, little endian), header, tensors' bytes.

    The header is JSON, filled up with spaces to a multiple of 8 bytes. Tensors come in the library's own order: the
    widest dtype first, then by name, so that each is aligned.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].itemsize
        about = {"dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name] = {**about, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from (raw(tensors[name]) for name in names)


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
