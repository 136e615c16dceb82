"""Authentication: every request passes through here before any of its content is trusted.

    http://127.0.0.1:8050/PLACE/?token=TOKEN     printed by `fedveil dashboard`, which draws PLACE and TOKEN at start
    303 to http://127.0.0.1:8050/PLACE/          with a cookie (HttpOnly, SameSite=Strict, only for PLACE)

| a request ... | response |
|---|---|
| whose Host is not this machine's loopback, such as another name for the machine | 421 |
| with a method other than GET or HEAD | 405 |
| for /metrics, with the scrapers' bearer token, if `--metrics-token` gave one | the metrics |
| with the link's token, for the first page | the cookie, and a redirect to a URL without the token |
| without a valid cookie, such as from another user of this machine | 401, for any path |
| any other | the requested page |

A browser sends a host's cookies to every port on that host, so another user's server on this machine could receive
ours. It does not, because it does not know PLACE. Every response forbids what our pages do not use: inline scripts
and styles, requests to other hosts, frames, forms that send anything to another host, and cached copies. A form here
only asks for another page.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost")
METRICS_PATH = "/metrics"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LONGEST = 4096  # maximum characters in a cookie header or a query


@dataclass(frozen=True)
class DashboardCredentials:
    """A dashboard's secrets: its place, the link's token, and the cookie's value.

    Attributes:
        port: where it listens.
        scrape_token: the bearer token for /metrics, and only for it; "" = no metrics.
    """

    port: int
    place: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    scrape_token: str = field(default="", repr=False)

    @property
    def base(self) -> str:
        """Return the prefix of every path."""
        return f"/{self.place}"

    @property
    def link(self) -> str:
        """Return the URL that opens the dashboard in a browser."""
        return f"http://127.0.0.1:{self.port}{self.base}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """Return the cookie's name, which differs between dashboards on the same machine."""
        return f"fedveil-{self.port}"


class AccessMiddleware:
    """ASGI middleware that serves `app` only to clients with valid credentials."""

    def __init__(self, app: ASGIApp, entry: DashboardCredentials) -> None:
        self._app, self._entry = app, entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; ignore anything but HTTP."""
        if scope["type"] != "http":
            return

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = {name.lower().encode() for name in _HEADERS}
                app_headers = [pair for pair in message["headers"] if pair[0].lower() not in ours]
                message["headers"] = app_headers + [(n.lower().encode(), v.encode()) for n, v in _HEADERS.items()]
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, sealed)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return a response that refuses the request or sets the cookie; None if the request has access."""
        headers = Headers(scope=scope)
        if not _is_ours(headers.getlist("host")):
            return _said(421, f"Host: expected {' or '.join(HOSTS)}, found a different host; open the printed link")
        if scope["method"] not in ("GET", "HEAD"):
            return _said(405, "expected GET or HEAD: this dashboard is read-only", Allow="GET, HEAD")
        if scope["path"] == METRICS_PATH and self._entry.scrape_token:
            if _same(_bearer(headers.getlist("authorization")), self._entry.scrape_token):
                return None
            return _said(
                401, "expected the bearer token in the file of --metrics-token", **{"WWW-Authenticate": "Bearer"}
            )
        # Check the token first, even if there is a cookie, so that the token does not stay in the URL.
        if scope["path"] == f"{self._entry.base}/" and _same(_token(scope["query_string"]), self._entry.token):
            return self._let_in()
        if _same(_cookies(headers.getlist("cookie")).get(self._entry.cookie, ""), self._entry.session):
            return None
        return _said(401, "expected the link that fedveil printed when it started; open that link")

    def _let_in(self) -> Response:
        answer = RedirectResponse(f"{self._entry.base}/", 303)
        answer.set_cookie(
            self._entry.cookie, self._entry.session, path=f"{self._entry.base}/", httponly=True, samesite="strict"
        )
        return answer


def _is_ours(hosts: list[str]) -> bool:
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].lower().partition(":")
    return name in HOSTS and (not port or (port.isdecimal() and port.isascii()))


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _bearer(headers: list[str]) -> str:
    """Return the token of the only Authorization header; "" for several, for another scheme, or for a long one."""
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" and len(token) <= _LONGEST else ""


def _token(query: bytes) -> str:
    try:
        tokens = parse_qs(query[:_LONGEST].decode("ascii"), max_num_fields=8).get("token", [""])
    except ValueError:
        return ""
    return tokens[0] if len(tokens) == 1 else ""


def _cookies(headers: list[str]) -> dict[str, str]:
    pairs = (pair.partition("=") for header in headers for pair in header[:_LONGEST].split(";"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _said(status: int, words: str, **headers: str) -> Response:
    return PlainTextResponse(f"{words}\n", status, headers)
