"""The checks of `fedveil doctor`. Each returns a name, a verdict and a finding, and changes nothing.

Each check imports only what it needs, because a container runs its health check every ten seconds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import socket
import ssl
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

from fedveil import proxies
from fedveil.errors import FedVeilError
from fedveil.guard import fleet_limits, flower, last_heartbeat

Verdict = Literal["ok", "warn", "fail"]
_SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse, status SERVING
_SOON = timedelta(days=30)
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised
_GIGABYTE = 1_000_000_000
_TIMEOUT = 5.0
_MOST_AHEAD, _MOST_BEHIND = 5.0, 305.0  # seconds: Flower's tolerance for a site's signed time
_MOST_ANSWER, _MOST_PARTS = 4096, 8  # bytes per part of an untrusted answer, and number of parts
_SITES_ALONE = b"this port serves sites"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    verdict: Verdict
    text: str


def run_check(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    """Run the check; report any error as a failed check."""
    try:
        return check()
    except (FedVeilError, OSError, ValueError) as error:
        return CheckResult(name, "fail", " ".join(str(error).split()) or type(error).__name__)


def check_certificate(file: Path, now: datetime | None = None) -> CheckResult:
    """Check how long a PEM certificate remains valid."""
    from cryptography import x509

    certificate, moment = x509.load_pem_x509_certificate(file.read_bytes()), now or datetime.now(UTC)
    ends, name = certificate.not_valid_after_utc, f"certificate {file.name}"
    if moment < certificate.not_valid_before_utc:
        return CheckResult(
            name,
            "fail",
            f"valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, but it is {moment:%Y-%m-%d %H:%M}",
        )
    if moment >= ends:
        is_ca = certificate.issuer == certificate.subject  # a CA certificate is self-signed and cannot be renewed
        anew = "provision the federation again" if is_ca else "renew it: fedveil members renew-server"
        return CheckResult(name, "fail", f"expired on {ends:%Y-%m-%d}; the operator must {anew}")
    return CheckResult(name, "warn" if ends - moment < _SOON else "ok", f"until {ends:%Y-%m-%d}")


def private_key(file: Path) -> CheckResult:
    """Check that the file is a node key that Flower accepts, readable only by its owner."""
    from fedveil.console.flower.certificates import require_node_key

    require_node_key(file)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        return CheckResult(
            "key", "fail", f"expected {file} to be readable by its owner only, found mode {mode:o}; chmod 600"
        )
    return CheckResult("key", "ok", f"{file}, P-384")


def check_fleet_port(superlink: str, ca: Path) -> CheckResult:
    """Check that the server's fleet port speaks TLS, with a certificate for that name from this federation's CA."""
    host, port = parse_address(superlink)
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    line = flower.installed_release()
    proxy = proxies.find_proxy(host, line.speaks, os.environ)
    try:
        with (
            proxies.connect(host, port, proxy, _TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=host) as link,
        ):
            ends = ssl.cert_time_to_seconds(str((link.getpeercert() or {})["notAfter"]))
            spoken = _spoken(link, host)
    except ssl.SSLCertVerificationError as error:
        return CheckResult(
            "fleet port",
            "fail",
            f"{superlink}: {error.verify_message}; check that ca.crt is this federation's and that the clock is right",
        )
    except ssl.SSLError as error:
        return CheckResult(
            "fleet port", "fail", f"{superlink} does not speak TLS ({error.reason}); is it the fleet port?"
        )
    except OSError as error:
        return CheckResult(
            "fleet port", "fail", f"{superlink}: {error}; the firewall must allow this one outgoing connection"
        )
    if spoken != line.speaks:
        known = " or ".join(one.release for one in flower.LINES if one.speaks == spoken)
        other = f"A server with Flower {known} speaks {spoken}." if known else ""
        return CheckResult(
            "fleet port",
            "fail",
            f"{superlink} speaks TLS and {spoken or 'an unknown protocol'}, but Flower {line.release} here speaks "
            f"{line.speaks}; is it the fleet port? {other}".rstrip(),
        )
    through = f", through the proxy {proxy}" if proxy else ""
    return CheckResult(
        "fleet port",
        "ok",
        f"{superlink}{through}, TLS, certificate valid until {datetime.fromtimestamp(ends, UTC):%Y-%m-%d}",
    )


def find_handshake_fault(port: int) -> str:
    """Return why the program at this loopback port completes no TLS handshake, or "".

    A frozen program fails here, although the kernel accepts connections for it. The certificate is not verified: an
    expired certificate or a wrong clock is no reason to stop a program that works. Nothing is sent.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1"),
        ):
            return ""
    except OSError as error:
        return str(error)


def check_proxy(superlink: str) -> CheckResult:
    """Check which proxy the site's processes use for the server, if any; loopback connections never use one."""
    host, _ = parse_address(superlink)
    speaks = flower.installed_release().speaks
    proxy = proxies.find_proxy(host, speaks, os.environ)
    if proxy:
        text = f"{host} is reached through {proxy}; connections within this machine never use a proxy"
        return CheckResult("proxy", "ok", text)
    if speaks == "gRPC" and (os.environ.get("HTTPS_PROXY") or os.environ.get("HTTP_PROXY")):
        name = "HTTPS_PROXY" if os.environ.get("HTTPS_PROXY") else "HTTP_PROXY"
        return CheckResult(
            "proxy",
            "warn",
            f"{host} is reached directly: a SuperNode of this Flower does not read {name}; if the server is behind the "
            "proxy, set https_proxy in lower case",
        )
    return CheckResult("proxy", "ok", f"{host} is reached directly, without a proxy")


def _spoken(link: ssl.SSLSocket, host: str) -> str:
    """Return a server's protocol for SuperNodes: "gRPC", "HTTP" (fedveil/guard/flower/fleet_http.py), or ""."""
    if link.selected_alpn_protocol() == "h2":
        return "gRPC"
    link.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = b""
    for _ in range(_MOST_PARTS):
        answer += (more := link.recv(_MOST_ANSWER))
        if not more:
            break
    return "HTTP" if answer.startswith(b"HTTP/1.1 404") and _SITES_ALONE in answer else ""


def check_closed_port(host: str, port: int, what: str) -> CheckResult:
    """Check that a port cannot be reached from here."""
    try:
        socket.create_connection((host, port), _TIMEOUT).close()
    except OSError:
        return CheckResult(what, "ok", f"{host}:{port} does not answer, as intended")
    return CheckResult(
        what, "fail", f"{host}:{port} answers: anyone who reaches it can submit code; bind it to the server's loopback"
    )


def check_health(address: str) -> CheckResult:
    """Run the standard gRPC health check, without TLS, on a SuperLink's or SuperNode's --health-server-address."""
    import grpc

    try:
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as link:
            answer = link.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=_TIMEOUT)
    except grpc.RpcError as error:
        return CheckResult("health", "fail", f"{address}: {error.code().name}")
    return CheckResult(
        "health", "ok" if answer == _SERVING else "fail", f"{address}: {'serving' if answer == _SERVING else answer!r}"
    )


def check_heartbeat(file: Path) -> CheckResult:
    """Check that the server recently answered this site's heartbeat; before the first answer, only warn."""
    if silence := last_heartbeat.describe_silence(file):
        return CheckResult("heartbeat", "fail", f"{silence}; the SuperNode keeps retrying: see its log")
    if last_heartbeat.last_answer(file) is None:
        return CheckResult(
            "heartbeat", "warn", f"the server has answered no heartbeat yet, or {file} belongs to another SuperNode"
        )
    return CheckResult("heartbeat", "ok", last_heartbeat.describe_answer(file))


def check_clock() -> CheckResult:
    """Check whether the kernel reports a synchronized clock. Node authentication tolerates a difference of 300 s."""
    if sys.platform != "linux":
        return CheckResult("clock", "warn", "not checked on this system")
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes = 0: read only
    if state < 0:
        return CheckResult(
            "clock", "warn", "the system does not report whether it is synchronized (in a container: check the host)"
        )
    if state == _TIME_ERROR:
        return CheckResult(
            "clock",
            "warn",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, not synchronized; if more than 300 s off, keys are refused",
        )
    return CheckResult("clock", "ok", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, synchronized")


def check_server_clock(superlink: str, ca: Path) -> CheckResult:
    """Compare this machine's clock with the server's, which the fleet port tells anyone who asks."""
    host, port = parse_address(superlink)
    began = datetime.now(UTC)
    shown = _grpc_clock(superlink, ca) if flower.installed_release().speaks == "gRPC" else _http_clock(host, port, ca)
    ended = datetime.now(UTC)
    if shown is None:
        return CheckResult("clock", "ok", f"{ended:%Y-%m-%d %H:%M:%S} UTC; the server does not report its time")
    # The server read its clock between these two times, so a smaller difference counts as zero.
    ahead = max(0.0, (began - shown).total_seconds()) or min(0.0, (ended - shown).total_seconds())
    if -_MOST_BEHIND < ahead < _MOST_AHEAD:
        text = f"{ended:%Y-%m-%d %H:%M:%S} UTC, within {abs(ahead):.0f} s of the server's"
        return CheckResult("clock", "warn" if ahead > _MOST_AHEAD / 2 else "ok", text)
    way = "ahead of" if ahead > 0 else "behind"
    return CheckResult(
        "clock",
        "fail",
        f"this machine's clock is {abs(ahead):,.0f} s {way} the server's, which shows {shown:%Y-%m-%d %H:%M:%S} UTC; "
        f"the server accepts a clock up to {_MOST_AHEAD:.0f} s ahead and {_MOST_BEHIND:.0f} s behind; correct the one "
        "that is wrong",
    )


def _grpc_clock(superlink: str, ca: Path) -> datetime | None:
    import grpc

    with grpc.secure_channel(superlink, grpc.ssl_channel_credentials(ca.read_bytes())) as link:
        try:
            link.unary_unary("/flwr.proto.Fleet/PullMessages")(b"", timeout=_TIMEOUT)
        except grpc.RpcError as error:
            return _time_in(str(error.details()))
    return None


def _http_clock(host: str, port: int, ca: Path) -> datetime | None:
    """Return the date in the response, which is up to a second old."""
    context = ssl.create_default_context(cafile=str(ca))
    proxy = proxies.find_proxy(host, "HTTP", os.environ)
    with (
        proxies.connect(host, port, proxy, _TIMEOUT) as plain,
        context.wrap_socket(plain, server_hostname=host) as link,
    ):
        link.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(link.recv(_MOST_ANSWER) for _ in range(_MOST_PARTS))[:_MOST_ANSWER]
    match = re.search(rb"^date: ([^\r\n]{10,40})", answer, re.IGNORECASE | re.MULTILINE)
    shown = parsedate_to_datetime(match[1].decode("ascii", "replace")) if match else None
    return shown if shown is not None and shown.tzinfo else None


def _time_in(text: str) -> datetime | None:
    """Return the server time in an error from the fleet port (fedveil/guard/flower/fleet_calls.py)."""
    match = re.search(rf"{fleet_limits.SHOWS_TIME}([0-9T:.+-]{{19,40}})", text[:1000])
    try:
        shown = datetime.fromisoformat(match[1]) if match else None
    except ValueError:
        return None
    return shown if shown is not None and shown.tzinfo else None


def check_versions() -> CheckResult:
    """Check the versions of Python and of the packages that both ends must agree on."""
    names = ("fedveil", "flwr", "torch", "transformers")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    python = ".".join(map(str, sys.version_info[:3]))
    right = (
        (3, 11) <= sys.version_info[:2] <= (3, 12)
        and any(versions["flwr"].startswith(f"{line.release}.") for line in flower.LINES)
        and "missing" not in versions.values()
    )
    known = " or ".join(line.release for line in flower.LINES)
    text = ", ".join([f"Python {python}", *(f"{name} {version}" for name, version in versions.items())])
    return CheckResult(
        "versions",
        "ok" if right else "fail",
        text if right else f"{text}; expected Python 3.11 or 3.12 and flwr {known}",
    )


def check_gpu(device: str, processes: int = 1) -> CheckResult:
    """Check that the site's device exists, or that there is a device for each of its processes."""
    import torch

    if torch.cuda.is_available():
        if device != "cpu" and (count := torch.cuda.device_count()) < processes:
            return CheckResult(
                "gpu", "fail", f"expected {processes} GPUs, one for each of the site's processes, found {count} GPUs"
            )
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return CheckResult("gpu", "ok", f"{name}, {free / _GIGABYTE:.0f} of {total / _GIGABYTE:.0f} GB free")
    wanted = device.startswith("cuda")
    return CheckResult(
        "gpu", "fail" if wanted else "ok", f"no GPU that torch {torch.__version__} can use; device is {device!r}"
    )


def check_disk(folder: Path) -> CheckResult:
    """Check the disk space for private state and messages."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / _GIGABYTE
    verdict: Verdict = "fail" if free < 1 else "warn" if free < 10 else "ok"
    return CheckResult("disk", verdict, f"{free:.1f} GB free at {there}")


def key_file(file: str, state: Path) -> CheckResult:
    """Check that the key file matches the site's stored files."""
    from fedveil.console.runs import re_encrypt
    from fedveil.encrypted_files import FileSeal

    seal = FileSeal.from_key_file(file)
    re_encrypt.require_key(state, seal)
    protection = f"encrypted with key {seal.id}" if seal.id else "unencrypted: the node config names no key-file"
    return CheckResult("key file", "ok", f"private state and ledger are {protection}")


def entry_point() -> CheckResult:
    """Check whether a client process started from here would go through this site's entry point."""
    program_path = shutil.which("flwr-clientapp")
    if program_path and b"fedveil.guard.clientapp" in Path(program_path).read_bytes()[:4096]:
        return CheckResult("entry point", "ok", f"{program_path} checks the policy before the app's code runs")
    return CheckResult(
        "entry point",
        "warn",
        f"flwr-clientapp is {program_path}, which is Flower's own; fedveil site start puts FedVeil's first on the PATH",
    )


def audit_log(file: Path) -> CheckResult:
    """Check that the site's audit log has not been changed since it was written."""
    from fedveil.records import audit_log as log

    if not file.exists():
        return CheckResult("audit log", "ok", "none yet")
    files, head = log.list_log_files(file), log.verify_log(file)
    lines = head.lines - log.start_of(files[0]).lines
    if damaged := log.count_damaged(files):
        words = f"{file}: {damaged} lines are damaged, as the log records; all other lines are unchanged"
        return CheckResult("audit log", "warn", words)
    return CheckResult("audit log", "ok", f"{file}: {lines} lines, all unchanged")


def parse_address(superlink: str) -> tuple[str, int]:
    """Return host and port. Raises ValueError if the address is not HOST:PORT."""
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"superlink: expected HOST:PORT, found {superlink!r}")
    return host.strip("[]"), int(port)
