"""What rank 0 and another rank say to each other: JSON and tensors, by a pair of sockets that no other process has."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final

from safetensors.torch import load, save
from torch import Tensor

from fedveil.rows.batches import AnyBatch, LabelledBatch, TokenBatch

_LENGTHS = struct.Struct("<QQ")
_KINDS: Mapping[str, Any] = {kind.__name__: kind for kind in (TokenBatch, LabelledBatch)}
_BELOW = "."  # between the name of a field that holds tensors by name, and theirs


@dataclass(frozen=True)
class Said:
    """One message: what to do or what was found, and tensors by name."""

    head: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@final
class Channel:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """For select."""
        return self._end.fileno()

    def say(self, said: Said) -> None:
        """Raises OSError where the other end is gone."""
        head = json.dumps(dict(said.head)).encode()
        body = save({name: t.detach().cpu().contiguous() for name, t in said.tensors.items()}) if said.tensors else b""
        self._end.sendall(_LENGTHS.pack(len(head), len(body)) + head)
        self._end.sendall(body)

    def hear(self) -> Said | None:
        """The next message, its tensors on the CPU; None where the other end is gone."""
        lengths = self._read(_LENGTHS.size)
        if lengths is None:
            return None
        of_head, of_body = _LENGTHS.unpack(lengths)
        head, body = self._read(of_head), self._read(of_body)
        if head is None or body is None:
            return None
        return Said(json.loads(head), load(bytes(body)) if body else {})

    def close(self) -> None:
        """The other end hears None from now on."""
        self._end.close()

    def _read(self, count: int) -> bytearray | None:
        found = bytearray(count)
        left = memoryview(found)
        while left:
            try:
                got = self._end.recv_into(left)
            except ConnectionError:
                return None
            if not got:
                return None
            left = left[got:]
        return found


def of_batch(batch: AnyBatch, head: Mapping[str, Any]) -> Said:
    """A batch as a message; `batch_of` gives an equal one."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {"batch": type(batch).__name__}
    for name, value in ((f.name, getattr(batch, f.name)) for f in fields(batch)):  # type: ignore[arg-type]
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            tensors |= {f"{name}{_BELOW}{key}": tensor for key, tensor in value.items()}
        else:
            about[name] = value
    return Said({**head, **about}, tensors)


def batch_of(said: Said) -> AnyBatch:
    """The batch of a message of `of_batch`, on the CPU."""
    kind = _KINDS[said.head["batch"]]
    names = {f.name for f in fields(kind)}
    found: dict[str, Any] = {name: value for name, value in said.head.items() if name in names}
    for name, tensor in said.tensors.items():
        whole, _, part = name.partition(_BELOW)
        if part:
            found.setdefault(whole, {})[part] = tensor
        else:
            found[whole] = tensor
    batch: AnyBatch = kind(**found)
    return batch
