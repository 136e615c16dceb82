"""What `fedveil doctor` looks at. A check gives its name, a verdict and what it found; none of them changes anything.

A check imports what it alone needs: a container asks for its health every ten seconds, and pays for no more than that.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import socket
import ssl
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from fedveil.errors import FedVeilError
from fedveil.guard import flower

Verdict = Literal["ok", "warn", "fail"]
_SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse, status SERVING
_SOON = timedelta(days=30)
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised
_GIGABYTE = 1_000_000_000
_TIMEOUT = 5.0
_MOST_ANSWER, _MOST_PARTS = 4096, 8  # bytes of a part of what a stranger answers, and parts
_SITES_ALONE = b"this port serves sites"


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    verdict: Verdict
    text: str


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """The check; an error that it meets is its finding."""
    try:
        return check()
    except (FedVeilError, OSError, ValueError) as error:
        return Check(name, "fail", " ".join(str(error).split()) or type(error).__name__)


def certificate(file: Path, now: datetime | None = None) -> Check:
    """Until when a PEM certificate is valid."""
    from cryptography import x509

    found, moment = x509.load_pem_x509_certificate(file.read_bytes()), now or datetime.now(UTC)
    ends, name = found.not_valid_after_utc, f"certificate {file.name}"
    if moment < found.not_valid_before_utc:
        return Check(
            name,
            "fail",
            f"valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, now is {moment:%Y-%m-%d %H:%M}",
        )
    if moment >= ends:
        is_ca = found.issuer == found.subject  # a CA signed itself, and there is no renewing it
        anew = "provision the federation anew" if is_ca else "renew it: fedveil members renew-server"
        return Check(name, "fail", f"expired on {ends:%Y-%m-%d}; the operator has to {anew}")
    return Check(name, "warn" if ends - moment < _SOON else "ok", f"until {ends:%Y-%m-%d}")


def private_key(file: Path) -> Check:
    """A node key that Flower takes, and that nobody else can read."""
    from fedveil.console.flower.keys import require_node_key

    require_node_key(file)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        return Check("key", "fail", f"expected {file} to be readable by its owner only, found mode {mode:o}; chmod 600")
    return Check("key", "ok", f"{file}, P-384")


def fleet(superlink: str, ca: Path) -> Check:
    """The server's fleet port: reached, with TLS, and a certificate of this federation's CA for that name."""
    host, port = address(superlink)
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection((host, port), _TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as link,
        ):
            ends = ssl.cert_time_to_seconds(str((link.getpeercert() or {})["notAfter"]))
            spoken = _spoken(link, host)
    except ssl.SSLCertVerificationError as error:
        return Check(
            "fleet port",
            "fail",
            f"{superlink}: {error.verify_message}; is ca.crt this federation's, and the clock right?",
        )
    except ssl.SSLError as error:
        return Check("fleet port", "fail", f"{superlink} speaks no TLS ({error.reason}); is it the fleet port?")
    except OSError as error:
        return Check(
            "fleet port", "fail", f"{superlink}: {error}; the firewall must allow this one outgoing connection"
        )
    line = flower.here()
    if spoken != line.speaks:
        known = " or ".join(one.release for one in flower.LINES if one.speaks == spoken)
        other = f"A server with Flower {known} does." if known else ""
        return Check(
            "fleet port",
            "fail",
            f"{superlink} has TLS and speaks {spoken or 'something else'}, not {line.speaks} as Flower {line.release} "
            f"here does; is it the fleet port? {other}".rstrip(),
        )
    return Check(
        "fleet port", "ok", f"{superlink}, TLS, its certificate ends {datetime.fromtimestamp(ends, UTC):%Y-%m-%d}"
    )


def _spoken(link: ssl.SSLSocket, host: str) -> str:
    """What a server speaks with SuperNodes: "gRPC", "HTTP" (guard/flower/fleet_http.py), or "" for anything else."""
    if link.selected_alpn_protocol() == "h2":
        return "gRPC"
    link.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = b""
    for _ in range(_MOST_PARTS):
        answer += (more := link.recv(_MOST_ANSWER))
        if not more:
            break
    return "HTTP" if answer.startswith(b"HTTP/1.1 404") and _SITES_ALONE in answer else ""


def closed(host: str, port: int, what: str) -> Check:
    """A port that must not answer from here."""
    try:
        socket.create_connection((host, port), _TIMEOUT).close()
    except OSError:
        return Check(what, "ok", f"{host}:{port} does not answer, as it should be")
    return Check(
        what, "fail", f"{host}:{port} answers: whoever reaches it can submit code; bind it to the server's loopback"
    )


def health(address: str) -> Check:
    """The standard gRPC health check, without TLS: for --health-server-address of a SuperLink or SuperNode."""
    import grpc

    try:
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as link:
            answer = link.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=_TIMEOUT)
    except grpc.RpcError as error:
        return Check("health", "fail", f"{address}: {error.code().name}")
    return Check(
        "health", "ok" if answer == _SERVING else "fail", f"{address}: {'serving' if answer == _SERVING else answer!r}"
    )


def clock() -> Check:
    """Whether the kernel counts its clock as synchronised. Node authentication bears 300 s of difference."""
    if sys.platform != "linux":
        return Check("clock", "warn", "not checked on this system")
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes = 0: asks only
    if state < 0:
        return Check(
            "clock", "warn", "the system does not say whether it is synchronised (in a container: look at the host)"
        )
    if state == _TIME_ERROR:
        return Check(
            "clock",
            "warn",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, not synchronised; more than 300 s off, keys are refused",
        )
    return Check("clock", "ok", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, synchronised")


def versions() -> Check:
    """Python and the packages that both ends must agree on."""
    names = ("fedveil", "flwr", "torch", "transformers")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    python = ".".join(map(str, sys.version_info[:3]))
    right = (
        (3, 11) <= sys.version_info[:2] <= (3, 12)
        and any(found["flwr"].startswith(f"{line.release}.") for line in flower.LINES)
        and "missing" not in found.values()
    )
    known = " or ".join(line.release for line in flower.LINES)
    text = ", ".join([f"Python {python}", *(f"{name} {version}" for name, version in found.items())])
    return Check(
        "versions",
        "ok" if right else "fail",
        text if right else f"{text}; expected Python 3.11 or 3.12 and flwr {known}",
    )


def gpu(device: str, processes: int = 1) -> Check:
    """Whether the site's device is there, or as many of them as it has processes."""
    import torch

    if torch.cuda.is_available():
        if device != "cpu" and (count := torch.cuda.device_count()) < processes:
            return Check("gpu", "fail", f"expected {processes}, one for each of the site's processes, found {count}")
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Check("gpu", "ok", f"{name}, {free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GB free")
    wanted = device.startswith("cuda")
    return Check(
        "gpu", "fail" if wanted else "ok", f"none that torch {torch.__version__} can use; device is {device!r}"
    )


def disk(folder: Path) -> Check:
    """Room for private state and messages."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / _GIGABYTE
    verdict: Verdict = "fail" if free < 1 else "warn" if free < 10 else "ok"
    return Check("disk", verdict, f"{free:.1f} GB free at {there}")


def key_file(file: str, state: Path) -> Check:
    """A key file that fits what the site keeps."""
    from fedveil.console.runs import sealing
    from fedveil.sealed import Seal

    seal = Seal.of(file)
    sealing.require(state, seal)
    kept = f"sealed under key {seal.id}" if seal.id else "kept in the clear: the node config names no key-file"
    return Check("key file", "ok", f"private state and ledger are {kept}")


def entry_point() -> Check:
    """Whether a client process that is started from here would pass this site's entry point."""
    found = shutil.which("flwr-clientapp")
    if found and b"fedveil.guard.clientapp" in Path(found).read_bytes()[:4096]:
        return Check("entry point", "ok", f"{found} decides before the app's code runs")
    return Check(
        "entry point", "warn", f"flwr-clientapp is {found}, Flower's own: fedveil site start puts ours before it"
    )


def audit_log(file: Path) -> Check:
    """Whether the site's log is as it was written."""
    from fedveil.records import audit_log as log

    if not file.exists():
        return Check("audit log", "ok", "none yet")
    return Check("audit log", "ok", f"{log.verify(file).lines} lines as they were written, in {file}")


def address(superlink: str) -> tuple[str, int]:
    """Host and port. Raises ValueError."""
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"superlink: expected HOST:PORT, found {superlink!r}")
    return host.strip("[]"), int(port)
