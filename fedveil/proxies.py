"""Proxy variables: ignored for loopback, and read by the rules of gRPC and httpx for a server's fleet port.

A hospital often sets `https_proxy` for all of its users. Flower's processes then send every HTTP request to the
proxy, even requests between processes on the same machine, which contain signed tokens.

| connection | proxy |
|---|---|
| to 127.0.0.1, ::1, localhost, and to the host of a program's own API address | none, regardless of the variables |
| a SuperNode that speaks gRPC, to the server | the first of grpc_proxy, https_proxy, http_proxy; lower case only |
| a SuperNode that speaks HTTP, to the server | https_proxy, else all_proxy; lower or upper case |
| to a host that no_proxy lists, by name or by suffix | none |

The proxy must permit CONNECT to the server's port. TLS runs inside the tunnel: the proxy sees neither content nor keys.
"""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from fedveil.errors import ConfigError

__all__ = ["LOOPBACK", "Proxy", "connect", "exempt_loopback", "find_proxy"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OF_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
_OF_HTTP = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
_ADDRESS = re.compile(r"--(?:runtime|clientappio|serverappio)-api-address(?:=(.*))?")
_MOST_BYTES = 8192  # maximum size of a proxy's response


@dataclass(frozen=True)
class Proxy:
    """A proxy for connections to a server.

    Attributes:
        variable: the environment variable that names it.
        host, port: its address.
        user: "NAME:PASSWORD", or "".
    """

    variable: str
    host: str
    port: int
    user: str = ""

    def __str__(self) -> str:
        """Return host, port and variable; never the password."""
        return f"{self.host}:{self.port} ({self.variable})"


def exempt_loopback(environ: MutableMapping[str, str], arguments: Sequence[str] = ()) -> None:
    """Add loopback, and the hosts of API addresses in `arguments`, to an environment's no_proxy and NO_PROXY.

    "*", which exempts every host, is left alone: libraries recognize it only if it is the whole value.
    """
    entries = [entry.strip() for name in ("no_proxy", "NO_PROXY") for entry in environ.get(name, "").split(",")]
    if "*" in entries:
        environ["no_proxy"] = environ["NO_PROXY"] = "*"
        return
    hosts = (*LOOPBACK, *_api_hosts(arguments))
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(dict.fromkeys([*filter(None, entries), *hosts]))


def _api_hosts(arguments: Sequence[str]) -> list[str]:
    hosts = []
    for word, after in zip(arguments, [*arguments, ""][1:], strict=True):
        if match := _ADDRESS.fullmatch(word):
            hosts.append((after if match[1] is None else match[1]).rpartition(":")[0].strip("[]"))
    return [host for host in hosts if host]


def find_proxy(host: str, speaks: str, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy that a SuperNode uses to reach `host`; None if it connects directly.

    Args:
        speaks: "gRPC" or "HTTP", the protocol between this installation's SuperNode and the server.

    Raises:
        ConfigError: the variable's value isn't a proxy address.
    """
    variable = next((name for name in (_OF_GRPC if speaks == "gRPC" else _OF_HTTP) if environ.get(name)), "")
    exempted = environ.get("no_proxy", "") or environ.get("NO_PROXY", "")
    if not variable or host in LOOPBACK or proxy_bypass_environment(host, {"no": exempted}):
        return None
    value = environ[variable]
    parts = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(
            f"{variable}: Flower cannot use its value as a proxy for the server; set it to http://HOST:PORT, or "
            f"add {host} to no_proxy if the server is reached directly"
        )
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Proxy(variable, parts.hostname, port, user)


def connect(host: str, port: int, proxy: Proxy | None, timeout: float) -> socket.socket:
    """Return a TCP connection to the server, through the proxy if there is one.

    Raises:
        OSError: nothing answers at that address.
        ConfigError: the proxy refused, or its response is invalid.
    """
    if proxy is None:
        return socket.create_connection((host, port), timeout)
    try:
        link = socket.create_connection((proxy.host, proxy.port), timeout)
    except OSError as error:
        raise ConfigError(f"the proxy {proxy} does not answer ({error}); correct {proxy.variable}") from None
    try:
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n"
        if proxy.user:
            head += f"Proxy-Authorization: Basic {base64.b64encode(proxy.user.encode()).decode()}\r\n"
        link.sendall(f"{head}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < _MOST_BYTES and (more := link.recv(1)):
            answer += more
        status = answer.split(b"\r\n")[0].decode("ascii", "replace")[:80]
        if not re.match(r"HTTP/1\.[01] 2\d\d\b", status):
            raise ConfigError(
                f"the proxy {proxy} refused a connection to {name}: {status or 'it closed the connection'}; ask its "
                f"administrator to permit CONNECT to {name}, or add {host} to no_proxy if the firewall lets it through"
            )
    except BaseException:
        link.close()
        raise
    return link
