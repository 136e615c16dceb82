"""Check Flower 1.39's gRPC calls before they are parsed: strangers cannot hold threads, and each site holds only a few.

A normal gRPC handler waits for the body in a pool thread before it runs, even if it only refuses the call. So this
interceptor runs before Flower's, and its handler starts as soon as the headers have arrived.

Formal guarantees, for a server patched by `patch_grpc_server`:
- a call waits for its body only after its key was found in the registry and its signature and time were verified;
- a key has at most 8 such open calls, each for at most 15 minutes until its body has arrived;
- a caller that finds no free thread waits for one: no caller gets RESOURCE_EXHAUSTED because of others' open calls.

| a call | answer |
|---|---|
| without a key, a time or a signature, or with a duplicate | UNAUTHENTICATED |
| with a key that is not in the registry | see site_registry.py; its signature is not checked |
| with a registered key and a wrong signature | UNAUTHENTICATED |
| with a registered key and a valid signature over a time too far from the server's | UNAVAILABLE, with the difference |
| the ninth with the same key | the key's oldest call ends with UNAVAILABLE |
| no body after 15 minutes, or the stream ends without a body | UNAVAILABLE |
| a body of more than 64 KiB (2 MiB for PushMessages, 8 MiB for PushObject) | PERMISSION_DENIED |
| a body that is not a request | INVALID_ARGUMENT |

UNAVAILABLE makes an honest SuperNode retry. gRPC normally ends a call with CANCELLED, which makes the SuperNode
leave its loop permanently. So a lower-level function that accepts a status code ends the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.supercore.date import now
from google.protobuf.message import DecodeError

from fedveil.guard import fleet_limits as limits
from fedveil.guard.flower import RefusalBehavior, keepalive
from fedveil.guard.open_calls import OpenCalls
from fedveil.guard.signed_time import ERRORS, ClockDifferenceError, check_signed_time

Refusal = Callable[[bytes, bool], tuple[RefusalBehavior, str] | None]

_FLEET = "/flwr.proto.Fleet/"
_HEADERS = (PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
_HEADERS_NEEDED = "fedveil: expected exactly one key, one time and one signature"
_MAX_BYTES = {"PushMessages": limits.MAX_ANNOUNCEMENT_CALL_BYTES, "PushObject": limits.MAX_OBJECT_CALL_BYTES}
_OPTIONS = {
    "grpc.max_receive_message_length": limits.MAX_OBJECT_CALL_BYTES,
    "grpc.max_concurrent_streams": limits.MAX_STREAMS_OF_A_CONNECTION,
    **dict((*keepalive.WINDOW_OPTIONS, *keepalive.ping_options(keepalive.DATA_TIMEOUT))),  # a site's line may be slow
}
_CODES = {
    RefusalBehavior.SAYS_WHY: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalBehavior.ENDS: grpc.StatusCode.UNAUTHENTICATED,
    RefusalBehavior.ASKS_AGAIN: grpc.StatusCode.UNAVAILABLE,
}


def patch_grpc_server(interceptor: FleetCallInterceptor) -> None:
    """Apply these limits to every gRPC server in this process, with `interceptor` before its own interceptors."""
    original = grpc.server

    def server(
        pool: Any, handlers: Any = None, interceptors: Any = None, options: Any = None,
        maximum_concurrent_rpcs: int | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        del maximum_concurrent_rpcs  # a call above this limit would get RESOURCE_EXHAUSTED, and its SuperNode would end
        own = [(name, value) for name, value in options or () if name not in _OPTIONS]
        return original(pool, handlers, [interceptor, *(interceptors or ())], [*own, *_OPTIONS.items()], None, **more)

    grpc.server = server


class FleetCallInterceptor(grpc.ServerInterceptor):
    """The limits on calls to the fleet port.

    Args:
        refusal: returns the refusal, given a key (PEM) and whether the call activates a SuperNode; None for a member.
        is_known: returns whether a key is in the registry, valid or not.
    """

    def __init__(self, refusal: Refusal, is_known: Callable[[bytes], bool], open_calls: OpenCalls) -> None:
        self._refusal, self._is_known, self._open_calls = refusal, is_known, open_calls

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return a call's handler. Do nothing else, because one thread runs this for all calls."""
        if not details.method.startswith(_FLEET):
            return continuation(details)
        return grpc.stream_unary_rpc_method_handler(partial(self._answer, continuation, details))

    def _answer(self, continuation: Callable[[Any], Any], details: Any, bodies: Iterator[bytes], context: Any) -> bytes:
        """Handle one call in a pool thread."""
        key = self._require_member(details, context)
        call = self._open_calls.enter(key, partial(_end_call, context))
        if not context.add_callback(partial(self._open_calls.leave, call)):
            self._open_calls.leave(call)  # the call has already ended
        try:
            body = next(bodies)
        except StopIteration:
            context.abort(grpc.StatusCode.UNAVAILABLE, "fedveil: a call without a body")
            raise  # mypy: abort always raises
        call.has_body = True
        name = details.method.removeprefix(_FLEET)
        if len(body) > _MAX_BYTES.get(name, limits.MAX_CALL_BYTES):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"fedveil: {len(body)} bytes is too much for {name}")
        handler = continuation(details)
        if handler is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "fedveil: no such call")
        try:
            request = handler.request_deserializer(body)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "fedveil: not a request")
        if name == "GetFab":  # a zip file whose members are stored: it takes a quarter of the bytes
            context.set_compression(grpc.Compression.Gzip)
        answer: bytes = handler.response_serializer(handler.unary_unary(request, context))
        return answer

    def _require_member(self, details: Any, context: Any) -> bytes:
        """Return the key that signed a call; end the call if its signature is invalid."""
        found = {name: [v for n, v in details.invocation_metadata if n == name] for name in _HEADERS}
        if any(len(values) != 1 for values in found.values()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{_HEADERS_NEEDED}; {limits.SHOWS_TIME}{now().isoformat()}")
        key, stamp, signature = (found[name][0] for name in _HEADERS)
        activates = details.method == f"{_FLEET}ActivateNode"
        try:
            refused = None if self._is_known(key) else self._refusal(key, activates)
            if refused is None:
                check_signed_time(key, stamp, signature)
                refused = self._refusal(key, activates)
        except ClockDifferenceError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"fedveil: {error}")
        except ERRORS:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "fedveil: this key did not sign this time")
        if refused is not None:
            context.abort(_CODES[refused[0]], refused[1])
        return bytes(key)


def _end_call(context: Any) -> None:
    """End a call with UNAVAILABLE at any point in its handler."""
    context._rpc_event.call.cancel(grpc.StatusCode.UNAVAILABLE.value[0], "fedveil: too many open calls, or no body")
