"""A port for sites only: Flower 1.41 and 1.42 have one HTTP port for sites, operators and Flower's own processes.

The process listens on a second address. For each request there, this module checks the headers before it reads a byte
of the body, and it reads the body before Flower sees the request:

| a request to the sites' port | answer |
|---|---|
| a path other than /v1/fleet/NAME, a method other than POST, a WebSocket | 404 |
| without a length, or longer than 64 KiB (push-messages 2 MiB, push-object 8 MiB) | 411, 413 |
| a key that is not in the registry | as below; its signature is not checked |
| no key, two keys, a wrong time, a signature by a different key | 401: its SuperNode ends |
| a key that members.json does not permit | 412 with the reason when its SuperNode starts, later 401 |
| members.json cannot be read | 503: its SuperNode retries |
| the ninth open call with the same key and no body yet | the key's oldest call gets 503 |
| no body after 15 minutes | 503 |
| anything else | from Flower, which checks the signature again and that the key belongs to the calling node |

Flower's router uses the same path. The kernel, not a header, determines a connection's port.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from flwr.common.constant import TIMESTAMP_HEADER

from fedveil.guard import fleet_limits as limits
from fedveil.guard.flower import RefusalBehavior
from fedveil.guard.open_calls import OpenCalls
from fedveil.guard.signed_time import ERRORS, ClockDifferenceError, check_signed_time

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
Refusal = Callable[[bytes, bool], tuple[RefusalBehavior, str] | None]

# Flower's header names; 1.39 has neither this port nor these constants.
PUBLIC_KEY, SIGNATURE = "flwr-public-key", "flwr-signature"
_HEADERS = (PUBLIC_KEY, SIGNATURE, TIMESTAMP_HEADER)
_PATH = re.compile(r"/v1/fleet/[a-z-]{1,60}")
_ACTIVATES = "/v1/fleet/activate-node"
_MAX_BYTES = {
    "/v1/fleet/push-messages": limits.MAX_ANNOUNCEMENT_CALL_BYTES,
    "/v1/fleet/push-object": limits.MAX_OBJECT_CALL_BYTES,
}
_LONGEST = 1000  # maximum characters of a header
_STATUS = {RefusalBehavior.SAYS_WHY: 412, RefusalBehavior.ENDS: 401, RefusalBehavior.ASKS_AGAIN: 503}


def sites_only(
    app: App,
    refusal: Refusal,
    is_known: Callable[[bytes], bool] = lambda key: True,
    open_calls: OpenCalls | None = None,
) -> App:
    """Wrap `app`, an ASGI application, to serve only sites.

    Args:
        refusal: returns the answer, given a signing key (PEM) and whether this is a SuperNode's first request;
            None if Flower answers the request.
        is_known: returns whether a key is in the registry, valid or not.
        open_calls: the calls whose bodies have not arrived.
    """
    calls = open_calls or OpenCalls()

    async def asked(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        status, why = _unfit(scope)
        key = b""
        if not why:
            status, why, key = await asyncio.to_thread(_refused, scope, refusal, is_known)
        body = None if why else await _read_body(receive, calls, key)
        if not why and body is None:
            status, why = 503, "too many open calls, or no body"
        if why:
            # Flower's SuperNode prints bodies that look like a Flower error: a number, and `detail`.
            body = json.dumps({"code": 0, "detail": f"fedveil: {why}"}).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await app(scope, _with_body(body or b"", receive), send)

    return asked


async def _read_body(receive: Any, calls: OpenCalls, key: bytes) -> bytes | None:
    """Return a request's body; None if the body is late or the call must yield to a newer call."""
    loop, reading = asyncio.get_running_loop(), asyncio.ensure_future(_receive_all(receive))
    call = calls.enter(key, lambda: loop.call_soon_threadsafe(reading.cancel))
    try:
        await asyncio.wait([reading], timeout=limits.MAX_BODY_SECONDS)
        return reading.result() if reading.done() and not reading.cancelled() else None
    finally:
        reading.cancel()
        calls.leave(call)


async def _receive_all(receive: Any) -> bytes | None:
    """Return the body; None if the client disconnects. Uvicorn enforces the length in the header, which limits it."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _with_body(body: bytes, receive: Any) -> Any:
    """Return an ASGI channel that yields this body, followed by the later events."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return waiting.pop() if waiting else await receive()

    return replay


def route_by_port(port: int, sites: App, others: App) -> App:
    """Route requests on this local port to `sites`, and all others and the lifespan events to `others`."""

    async def asked(scope: Scope, receive: Any, send: Any) -> None:
        server = scope.get("server") if scope["type"] != "lifespan" else None
        await (sites if server and server[1] == port else others)(scope, receive, send)

    return asked


def add_listener(host: str, port: int) -> None:
    """Make this process's uvicorn server also listen on this address, with the same certificate.

    Exits the process if the address is not available.
    """
    original = uvicorn.Server.run

    def run(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        """Run the server like uvicorn's own method."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            second = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            sys.exit(f"error: fleet-port: the port at {host}:{port} is not available ({error}); choose another")
        original(self, [*(sockets or [self.config.bind_socket()]), second])

    uvicorn.Server.run = run  # type: ignore[method-assign]


def _unfit(scope: Scope) -> tuple[int, str]:
    """Return the status and reason for a request that no SuperNode sends; the reason is "" for a possible request."""
    if scope["method"] != "POST" or not _PATH.fullmatch(scope["path"]):
        return 404, "this port serves sites, at /v1/fleet alone"  # fedveil doctor recognizes the port by this text
    length = _values(scope, "content-length")
    if len(length) != 1 or not re.fullmatch(r"[0-9]{1,12}", length[0]):
        return 411, "the request needs a length"
    if int(length[0]) > (most := _MAX_BYTES.get(scope["path"], limits.MAX_CALL_BYTES)):
        return 413, f"the body has {length[0]} bytes; at most {most} are allowed"
    return 0, ""


def _refused(scope: Scope, refusal: Refusal, is_known: Callable[[bytes], bool]) -> tuple[int, str, bytes]:
    """Return a request's status, reason and key; the reason is "" if Flower answers the request."""
    headers = {name: _values(scope, name) for name in _HEADERS}
    if any(len(values) != 1 or len(values[0]) > _LONGEST for values in headers.values()):
        return 401, "exactly one key, one time and one signature are needed", b""
    key_text, signature_text, stamp = (headers[name][0] for name in _HEADERS)
    try:
        key = b64decode(key_text, validate=True)
        refused = None if is_known(key) else refusal(key, scope["path"] == _ACTIVATES)
        if refused is None:
            check_signed_time(key, stamp, b64decode(signature_text, validate=True))
            refused = refusal(key, scope["path"] == _ACTIVATES)
    except ClockDifferenceError as error:
        return 503, str(error), b""
    except ERRORS:
        return 401, "this key did not sign this time", b""
    if refused is None:
        return 0, "", key
    return _STATUS[refused[0]], refused[1].removeprefix("fedveil: "), b""


def _values(scope: Scope, name: str) -> list[str]:
    return [value.decode("latin-1") for header, value in scope["headers"] if header.lower() == name.encode()]
