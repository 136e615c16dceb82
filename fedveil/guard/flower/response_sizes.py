"""Bound the size of each response that a SuperNode reads from its server.

Flower reads a response of up to 2 GiB over gRPC, and of any size over HTTP, where a compressed response can also become
1,000 times larger. No response of an honest server exceeds 16 MiB: a bundle has at most 10 MiB, an object one slice,
and a tree of 65,536 objects 5 MB.

| response | result |
|---|---|
| gRPC, larger | RESOURCE_EXHAUSTED; retries.py gives up on it, because another try would not make it smaller |
| gRPC, compressed, and larger after decompression | the same; gRPC decompresses at most `MAX_RESPONSE_BYTES` of it |
| HTTP, larger, with or without a stated length | WireError, after `MAX_RESPONSE_BYTES` at most |
| HTTP, compressed | WireError; the SuperNode asks for an uncompressed one |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx  # Flower's own client, of every release

from fedveil.errors import WireError

MAX_RESPONSE_BYTES = 16 << 20
_OPTION = "grpc.max_receive_message_length"


def limit_grpc_responses() -> None:
    """Make every gRPC channel in this process refuse larger responses, regardless of its options."""
    grpc = importlib.import_module("grpc")
    for name in ("secure_channel", "insecure_channel"):
        setattr(grpc, name, _with_limit(getattr(grpc, name)))


def _with_limit(make: Callable[..., Any]) -> Callable[..., Any]:
    def open_channel(*args: Any, options: Any = None, **kwargs: Any) -> Any:
        others = [option for option in options or () if option[0] != _OPTION]
        return make(*args, options=[*others, (_OPTION, MAX_RESPONSE_BYTES)], **kwargs)

    return open_channel


def limit_http_responses() -> None:
    """Make all of Flower's HTTP clients in this process refuse larger and compressed responses."""
    client = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    original = client.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._client.headers["accept-encoding"] = "identity"
        hooks = self._client.event_hooks
        self._client.event_hooks = {**hooks, "response": [*hooks["response"], _limit_response]}

    client.__init__ = initialize


def _limit_response(response: httpx.Response) -> None:
    """Replace the stream of a response whose body has not been read."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise WireError("answer: the server sent a compressed response, which is not accepted")
    response.stream = _LimitedStream(response.stream)


class _LimitedStream(httpx.SyncByteStream):
    """A response's body. Raises WireError after `MAX_RESPONSE_BYTES`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left = MAX_RESPONSE_BYTES
        for part in self._stream:
            left -= len(part)
            if left < 0:
                raise WireError(f"answer: it has more than {MAX_RESPONSE_BYTES} bytes")
            yield part

    def close(self) -> None:
        """Close the connection's stream."""
        self._stream.close()
