"""Messages between rank 0 and another rank: JSON and tensors, over a socket pair that only these two share."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final

from safetensors.torch import load, save
from torch import Tensor

from fedveil.data.batches import ExampleBatch, LabelledBatch, TokenBatch

_LENGTHS = struct.Struct("<QQ")
_KINDS: Mapping[str, Any] = {kind.__name__: kind for kind in (TokenBatch, LabelledBatch)}
_BELOW = "."  # separates the name of a field from the names of the tensors in it


@dataclass(frozen=True)
class RankMessage:
    """One message: a request or result, with named tensors."""

    head: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@final
class RankChannel:
    """One end of the socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the file descriptor, for select."""
        return self._end.fileno()

    def say(self, said: RankMessage) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        head = json.dumps(dict(said.head)).encode()
        body = save({name: t.detach().cpu().contiguous() for name, t in said.tensors.items()}) if said.tensors else b""
        self._end.sendall(_LENGTHS.pack(len(head), len(body)) + head)
        self._end.sendall(body)

    def hear(self) -> RankMessage | None:
        """Return the next message, with its tensors on the CPU; None if the other end is gone."""
        lengths = self._read(_LENGTHS.size)
        if lengths is None:
            return None
        of_head, of_body = _LENGTHS.unpack(lengths)
        head, body = self._read(of_head), self._read(of_body)
        if head is None or body is None:
            return None
        return RankMessage(json.loads(head), load(bytes(body)) if body else {})

    def close(self) -> None:
        """Close this end; from now on, the other end receives None."""
        self._end.close()

    def _read(self, count: int) -> bytearray | None:
        buffer = bytearray(count)
        left = memoryview(buffer)
        while left:
            try:
                got = self._end.recv_into(left)
            except ConnectionError:
                return None
            if not got:
                return None
            left = left[got:]
        return buffer


def batch_message(batch: ExampleBatch, head: Mapping[str, Any]) -> RankMessage:
    """Convert a batch to a message; `message_batch` returns an equal one."""
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {"batch": type(batch).__name__}
    for name, value in ((f.name, getattr(batch, f.name)) for f in fields(batch)):  # type: ignore[arg-type]
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            tensors |= {f"{name}{_BELOW}{key}": tensor for key, tensor in value.items()}
        else:
            about[name] = value
    return RankMessage({**head, **about}, tensors)


def message_batch(said: RankMessage) -> ExampleBatch:
    """Rebuild the batch from a message that `batch_message` created, on the CPU."""
    kind = _KINDS[said.head["batch"]]
    names = {f.name for f in fields(kind)}
    field_values: dict[str, Any] = {name: value for name, value in said.head.items() if name in names}
    for name, tensor in said.tensors.items():
        whole, _, part = name.partition(_BELOW)
        if part:
            field_values.setdefault(whole, {})[part] = tensor
        else:
            field_values[whole] = tensor
    batch: ExampleBatch = kind(**field_values)
    return batch
