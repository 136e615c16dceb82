"""Authorize operators by name and role on Flower's control port, which by itself permits everything to everyone.

An operator sends a token in the same way as after a login with Flower's own command line (`Authorization: Bearer`).
operators.json contains the token's SHA-256, a role and an expiry date. The check happens before Flower sees any byte of
the request, and is logged (fedveil/guard/control_log.py):

| role | permissions |
|---|---|
| read | list runs and sites, read a run's output |
| submit | as for read, and start and stop runs |
| members | as for read, and register and unregister site keys |
| admin | all of these |

| other requests to the port | answer |
|---|---|
| `/v1/runtime/...` | from Flower, which requires the SuperExec's secret or a task's token |
| `/health` | from Flower |
| any other Flower call, a page, a WebSocket, another method | 403 for every operator |
| no token or two; an unknown, revoked or expired token; a role without the permission | 403 with the reason |
| starting anything except a ServerApp: with a prompt, a series of runs or connectors | 403 with the reason |
| anything while operators.json cannot be read, or the log cannot be written | 503 |
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from datetime import datetime
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any

from flwr.proto import control_pb2
from flwr.supercore import log
from google.protobuf.message import DecodeError

from fedveil.errors import StateError
from fedveil.guard.control_log import ControlLog
from fedveil.guard.registry_files import WatchedJsonFile, format_time
from fedveil.sanitize import sanitize

FILE = "operators.json"
ROLES = ("read", "submit", "members", "admin")
_CONTROL = "/v1/control/"
_READING = ("list-runs", "list-nodes", "list-federations", "show-federation", "stream-logs", "stream-run-events")
CALLS = {
    **dict.fromkeys(_READING, frozenset(ROLES)),
    **dict.fromkeys(("start-run", "stop-run"), frozenset({"submit", "admin"})),
    **dict.fromkeys(("register-node", "unregister-node"), frozenset({"members", "admin"})),
}
_OPEN = re.compile(r"/health|/v1/runtime/[a-z-]{1,60}")
_MOST_BYTES = {"start-run": 64 << 20}  # Flower's own limit on a bundle is lower
_MOST_BYTES_ELSE = 64 << 10
_LONGEST_TOKEN = 200
# The permitted fields of a StartRunRequest. The others start an agent run, or give a run more than a ServerApp has.
_START_FIELDS = {"fab", "override_config", "override_federation_config", "app_spec", "federation"}

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class _Operator:
    name: str
    role: str
    token: bytes
    until: datetime
    active: bool


class OperatorAccessChecker:
    """Checks requests against operators.json in the folder `registry`. Raises StateError if the file is unusable."""

    def __init__(self, registry: Path, control: ControlLog) -> None:
        self._file = WatchedJsonFile(registry / FILE, _operators)
        self._control = control
        self._file.get()

    def before(self, app: App) -> App:
        """Wrap `app`, an ASGI application, to serve only operators."""

        async def asked(scope: Scope, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan" or (scope["type"] == "http" and _OPEN.fullmatch(scope["path"])):
                await app(scope, receive, send)
                return
            try:
                await self._judged(app, scope, receive, send)
            except StateError as error:
                log(ERROR, "the control port refuses all requests: %s", error)
                await _answer(
                    scope, send, 503, "the server cannot read its operators or write its log; see the server's log"
                )

        return asked

    def operator(self, tokens: list[str]) -> tuple[str, str, str]:
        """Return the name and role for a request's tokens, and the reason to refuse it ("" if none).

        Raises StateError.
        """
        known = self._file.get()
        if len(tokens) != 1 or not 0 < len(tokens[0]) <= _LONGEST_TOKEN:
            return "", "", "this needs an operator token; run fedveil operators login"
        digest = hashlib.sha256(tokens[0].encode()).digest()
        matches = [operator for operator in known if hmac.compare_digest(operator.token, digest)]
        if not matches:
            return "", "", "this operator's token is unknown"
        if not matches[0].active:
            return matches[0].name, matches[0].role, "this operator's token is revoked"
        if matches[0].until <= self._control.clock.now():
            return (
                matches[0].name,
                matches[0].role,
                f"this operator's token expired on {matches[0].until:%Y-%m-%d}",
            )
        return matches[0].name, matches[0].role, ""

    async def _judged(self, app: App, scope: Scope, receive: Any, send: Any) -> None:
        about: dict[str, Any] = {"peer": (scope.get("client") or ("",))[0], "call": _call(scope)}
        about["operator"], about["role"], why = self.operator(_tokens(scope))
        if not why and about["role"] not in CALLS.get(about["call"], ()):
            why = f"operator {about['operator']} with role {about['role']} may not call {sanitize(about['call'], 80)}"
        body = b""
        if not why:
            most = _MOST_BYTES.get(about["call"], _MOST_BYTES_ELSE)
            body, why = await _body(receive, most)
        if not why:
            subject, why = _subject(about["call"], body)
            about |= subject
        if why:
            await asyncio.to_thread(self._control.refused, {**about, "reason": why})
            log(WARNING, "control port: %s", sanitize(why))
            await _answer(scope, send, 403, why)
            return
        await asyncio.to_thread(self._control.write, "asked", {**about, "decision": "permitted"})
        if about["call"] == "start-run":
            send = self._noting(send, about)
        await app(scope, _replayed(body, receive), send)

    def _noting(self, send: Any, about: dict[str, Any]) -> Any:
        """Wrap `send` to log the run that Flower created before any part of the answer is sent."""
        buffer: list[MutableMapping[str, Any]] = []

        async def noted(message: MutableMapping[str, Any]) -> None:
            buffer.append(message)
            if message["type"] != "http.response.body" or message.get("more_body"):
                return
            status = int(buffer[0]["status"])
            run = _run_of(status, b"".join(part.get("body", b"") for part in buffer[1:]))
            line = {"operator": about["operator"], "status": status, "run": run}
            await asyncio.to_thread(self._control.write, "submitted", line)
            for part in buffer:
                await send(part)
            buffer.clear()

        return noted


def _operators(content: Any) -> list[_Operator]:
    """Parse the operators in operators.json. Raises ValueError, KeyError or a similar error."""
    operators = []
    for name, entry in content["operators"].items():
        if entry["role"] not in ROLES or entry["state"] not in ("active", "revoked"):
            raise ValueError(f"{name}: the role must be one of {ROLES}, and the state active or revoked")
        token = bytes.fromhex(entry["token"])
        if len(token) != 32:
            raise ValueError(f"{name}: the token's SHA-256 must be 64 hex digits")
        operators.append(
            _Operator(str(name), entry["role"], token, format_time(entry["until"]), entry["state"] == "active")
        )
    return operators


def _call(scope: Scope) -> str:
    """Return the control call's name, or the requested path if it is not a control call."""
    path = str(scope.get("path", ""))
    if scope["type"] == "http" and scope["method"] == "POST" and path.startswith(_CONTROL):
        return path[len(_CONTROL) :]
    return f"{scope['type']} {scope.get('method', '')} {path}"


def _tokens(scope: Scope) -> list[str]:
    values = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"authorization"]
    return [value[7:] if value[:7].lower() == "bearer " else "" for value in values]


async def _body(receive: Any, most: int) -> tuple[bytes, str]:
    """Return the whole body, and the reason to reject it ("" if none)."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"", "the connection closed before the request was complete"
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return b"", f"the request has more than {most} bytes"
        if not message.get("more_body"):
            return b"".join(parts), ""


def _replayed(body: bytes, receive: Any) -> Any:
    """Wrap `receive` to return the body that was already read."""
    taken = False

    async def received() -> Any:
        nonlocal taken
        if taken:
            return await receive()
        taken = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


def _subject(call: str, body: bytes) -> tuple[dict[str, Any], str]:
    """Return a call's subject for the log, and the reason to refuse it ("" if none)."""
    kinds = {
        "start-run": control_pb2.StartRunRequest, "stop-run": control_pb2.StopRunRequest,
        "list-runs": control_pb2.ListRunsRequest, "stream-logs": control_pb2.StreamLogsRequest,
        "stream-run-events": control_pb2.StreamRunEventsRequest, "register-node": control_pb2.RegisterNodeRequest,
        "unregister-node": control_pb2.UnregisterNodeRequest,
    }  # fmt: skip
    if call not in kinds:
        return {}, ""
    request: Any = kinds[call]()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return {}, "this is not a request from Flower's command line"
    if call == "start-run":
        other = sorted({about.name for about, _ in request.ListFields()} - _START_FIELDS)
        why = (
            f"{', '.join(other)}: this server starts only ServerApp runs, whose requests have no such field"
            if other
            else ""
        )
        return {"app": hashlib.sha256(request.fab.content).hexdigest(), "remote_app": request.app_spec}, why
    if call == "register-node":
        return {"key": hashlib.sha256(request.public_key).hexdigest(), "name": request.name}, ""
    if call == "unregister-node":
        return {"node": str(request.node_id)}, ""
    return {"run": str(getattr(request, "run_id", ""))}, ""


def _run_of(status: int, answer: bytes) -> str:
    """Return the run id in Flower's answer to start-run; "" if there is none."""
    if status != 200:
        return ""
    response = control_pb2.StartRunResponse()
    try:
        response.ParseFromString(answer)
    except DecodeError:
        return ""
    return str(response.run_id) if response.HasField("run_id") else ""


async def _answer(scope: Scope, send: Any, status: int, why: str) -> None:
    """Send an error response; Flower's command line prints `detail`."""
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"detail": f"fedveil: {why}"}).encode()})
