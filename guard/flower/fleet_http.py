"""A port for sites alone, where Flower 1.41 and 1.42 have one HTTP port for sites, operators and its own processes.

The process listens at a second address. What comes in there is judged by its header, before a byte of the body is
read:

| a request to the sites' port | is answered |
|---|---|
| another path than /v1/fleet/NAME, another method than POST, a web socket | 404 |
| without a length, or longer than 64 MiB | 411, 413 |
| no key, two keys, a time of another hour, a signature that is not the key's | 401: its SuperNode ends |
| a key that members.json does not permit | 412 with the reason when its SuperNode starts, later 401 |
| members.json cannot be read | 503: its SuperNode asks again |
| anything else | by Flower, which checks the signature again, and that the key is that of the node that asks |

The path is the one that Flower's router goes by. Which port a connection came in by says the kernel, and no header.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
import socket
import sys
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from datetime import datetime
from typing import Any

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from fedveil.guard.flower import Answer

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
Refusal = Callable[[bytes, bool], tuple[Answer, str] | None]

# Flower's names of them; 1.39, which has no such port, has not got the constants either.
PUBLIC_KEY, SIGNATURE = "flwr-public-key", "flwr-signature"
_HEADERS = (PUBLIC_KEY, SIGNATURE, TIMESTAMP_HEADER)
_PATH = re.compile(r"/v1/fleet/[a-z-]{1,60}")
_ACTIVATES = "/v1/fleet/activate-node"
_MOST_BYTES = 64 << 20  # Flower cuts what it sends into parts of 5 MiB
_LONGEST = 1000  # characters of a header
_STATUS = {Answer.SAYS_WHY: 412, Answer.ENDS: 401, Answer.ASKS_AGAIN: 503}


def before(app: App, refusal: Refusal) -> App:
    """`app`, an ASGI application, for sites alone.

    Args:
        refusal: by the key that signed (PEM) and whether the request is the first of a SuperNode, what it is answered;
            None where Flower answers it.
    """

    async def asked(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        status, why = _unfit(scope)
        if not why:
            status, why = await asyncio.to_thread(_refused, scope, refusal)
        if why:
            # Flower's SuperNode shows what looks like an error of Flower's own: a number, and `detail`.
            body = json.dumps({"code": 0, "detail": f"fedveil: {why}"}).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await app(scope, receive, send)

    return asked


def by_port(port: int, sites: App, others: App) -> App:
    """`sites` for what came in by this port of the machine, `others` for the rest, and for the start and the end."""

    async def asked(scope: Scope, receive: Any, send: Any) -> None:
        server = scope.get("server") if scope["type"] != "lifespan" else None
        await (sites if server and server[1] == port else others)(scope, receive, send)

    return asked


def listen_also(host: str, port: int) -> None:
    """From now on a server of uvicorn in this process listens at this address too, with the same certificate.

    It ends the process where nobody can listen there.
    """
    original = uvicorn.Server.run

    def run(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            second = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            sys.exit(f"error: fleet-port: expected a free port at {host}:{port}, found none ({error}); name another")
        original(self, [*(sockets or [self.config.bind_socket()]), second])

    uvicorn.Server.run = run  # type: ignore[method-assign]


def _unfit(scope: Scope) -> tuple[int, str]:
    """Status and reason where a request is none of a SuperNode's; ("" where it may be one)."""
    if scope["method"] != "POST" or not _PATH.fullmatch(scope["path"]):
        return 404, "this port serves sites, at /v1/fleet alone"
    length = _values(scope, "content-length")
    if len(length) != 1 or not re.fullmatch(r"[0-9]{1,12}", length[0]):
        return 411, "a request with its length is needed"
    if int(length[0]) > _MOST_BYTES:
        return 413, f"expected at most {_MOST_BYTES} bytes, found {length[0]}"
    return 0, ""


def _refused(scope: Scope, refusal: Refusal) -> tuple[int, str]:
    found = {name: _values(scope, name) for name in _HEADERS}
    if any(len(values) != 1 or len(values[0]) > _LONGEST for values in found.values()):
        return 401, "a key, a time and a signature are needed, each once"
    try:
        key = _signed_by({name: values[0] for name, values in found.items()})
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm, binascii.Error):
        return 401, "the signature is none of this key and time; is the clock right?"
    refused = refusal(key, scope["path"] == _ACTIVATES)
    return (0, "") if refused is None else (_STATUS[refused[0]], refused[1].removeprefix("fedveil: "))


def _signed_by(headers: Mapping[str, str]) -> bytes:
    """The key (PEM) that signed the request's time, as Flower's SuperNode does. Raises ValueError or the like."""
    key = b64decode(headers[PUBLIC_KEY], validate=True)
    stamp = headers[TIMESTAMP_HEADER]
    age = (now() - datetime.fromisoformat(stamp)).total_seconds()
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        raise ValueError("another time")
    signature = b64decode(headers[SIGNATURE], validate=True)
    if not verify_signature(bytes_to_public_key(key), stamp.encode("ascii"), signature):
        raise ValueError("another signature")
    return key


def _values(scope: Scope, name: str) -> list[str]:
    return [value.decode("latin-1") for found, value in scope["headers"] if found.lower() == name.encode()]
