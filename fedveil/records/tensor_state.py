"""States on disk: one safetensors file with the scalars as JSON in its metadata, written atomically.

A checksum over the tensors' names, dtypes, shapes and bytes and over the scalars precedes the scalars. Any
program that reads safetensors can read the file. It is written from the tensors' own memory, part by part; reading
briefly needs twice its size in memory. With a key, the file is encrypted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load

from fedveil.contract.codec import Buffer, raw_bytes
from fedveil.contract.method import FederatedState
from fedveil.contract.param_spec import Weights
from fedveil.encrypted_files import FileSeal
from fedveil.errors import StateError
from fedveil.records.atomic_files import write_atomic

_MOMENT = "server.optimizer/"  # prefix of moment names; no model parameter has a slash in its name
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_state(
    state: FederatedState, path: Path, seal: FileSeal = FileSeal(), role: str = "", keep: Path | None = None
) -> None:
    """Write the state as one file, bound to `role` if encrypted; rename the old file to `keep`, if given.

    Raises:
        KeyError: an unsupported dtype.
        OSError: the file cannot be written.
    """
    write_atomic(path, seal.closed(_parts(state), role), keep)


def load_state(path: Path, seal: FileSeal = FileSeal(), role: str = "") -> FederatedState:
    """Return the state that `save_state` wrote. Raises StateError for a missing, damaged or swapped file."""
    try:
        data = seal.read(path, role)
        tensors = load(data)  # checks the header
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        checksum, _, scalars = header["__metadata__"]["scalars"].partition(" ")
        if _checksum(tensors, scalars) != checksum:
            raise ValueError("its checksum does not match its content")
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_MOMENT)}
        moments = {name.removeprefix(_MOMENT): tensors[name] for name in tensors.keys() - own.keys()}
        return FederatedState(own, json.loads(scalars), moments)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, RecursionError) as error:
        raise StateError(
            f"{path}: cannot read a state file in this version's format ({error}); the file was damaged, or an older "
            "version wrote it"
        ) from None


def _parts(state: FederatedState) -> Iterator[Buffer]:
    """Return the bytes of a safetensors file, without the library's writer, which holds three copies of the state."""
    scalars = json.dumps(dict(state.scalars))
    named = {**state.tensors, **{_MOMENT + name: tensor for name, tensor in state.moments.items()}}
    # One entry, because equal states must give equal files.
    header: dict[str, Any] = {"__metadata__": {"scalars": f"{_checksum(named, scalars)} {scalars}"}}
    # The widest entries first, as in the library, so that every tensor begins at a multiple of its entry width.
    tensors = dict(sorted(named.items(), key=lambda each: (-each[1].element_size(), each[0])))
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield raw_bytes(tensor)


def state_digest(weights: Weights) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of the weights: equal digests mean identical bits."""
    h = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(raw_bytes(tensor))
    return h.hexdigest()


def _checksum(tensors: Weights, scalars: str) -> str:
    h = xxhash.xxh3_128(scalars.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        h.update(raw_bytes(tensor))
    return h.hexdigest()
