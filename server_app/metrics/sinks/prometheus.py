"""Prometheus: an endpoint on 127.0.0.1 that a Prometheus server on this machine scrapes during the run.

    scrape_configs:
      - job_name: fedveil
        authorization: {credentials_file: /srv/pilot/runs/prometheus.token}
        static_configs: [{targets: ["127.0.0.1:9464"]}]

Gauges have the last attempt's metrics; `fedveil_..._total` counts all attempts since the ServerApp started. In
OpenMetrics, a counter's family name omits "_total" and would equal its gauge's name, so that gauge is called
`fedveil_attempt_...`.
Every user on a machine can reach its loopback interface, so a scrape without the token gets 401. The token is in a file
in run.dir that only its owner can read, and is kept for later runs. The endpoint serves one connection at a time and
closes it after 5 s of silence. A client that holds the connection delays a scrape, never a round.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socketserver
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from typing_extensions import override

from fedveil.errors import ConfigError, StateError
from fedveil.server_app.metrics.samples import Labels, RoundMetrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from fedveil.server_app.metrics.sinks import SinkRunInfo

EXTRA, NEEDS = "prometheus", "prometheus_client"
TOKEN = "prometheus.token"
_ADDRESS, _SILENCE_SECONDS = "127.0.0.1", 5.0
_TOKEN_BYTES, _LONGEST = 32, 200
_COUNTED = {"accepted", "failed", "upload_bytes", "download_bytes", "site_upload_bytes", "site_download_bytes"}

Environ = dict[str, Any]


@final
class PrometheusSink:
    """Stores the last metrics and serves them until it is closed. Raises ConfigError if the port is in use."""

    def __init__(self, run: str, port: int, token: str) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._run, self._told = run, RoundMetrics(0, (), {})
        self._totals: Counter[tuple[str, Labels]] = Counter()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        served = _guarded(make_wsgi_app(registry), token)
        try:
            self._server = make_server(_ADDRESS, port, served, _Server, _Handler)
        except OSError as error:
            raise ConfigError(
                f"sinks.prometheus-port: port {port} on {_ADDRESS} is not available: {error.strerror}; choose another, "
                "or wait for the run that uses it"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, told: RoundMetrics) -> None:
        """Replace the metrics; a scrape sees either the old ones or the new ones."""
        counted = self._totals.copy()
        for figure in told.figures:
            if figure.name in _COUNTED:
                counted[figure.name, figure.labels] += int(figure.value)
        before = self._told
        if told.row is before.row:  # the rest of the same attempt
            told = replace(told, figures=before.figures + told.figures, failed=before.failed)
        self._told, self._totals = told, counted

    def close(self, state: str) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for prometheus_client, which escapes labels and calls this on every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        round_metrics, totals = self._told, self._totals
        step = GaugeMetricFamily("fedveil_rounds", "Rounds that have ended", labels=["run"])
        step.add_metric([self._run], round_metrics.step)
        yield step
        gauges = [(figure.name, figure.labels, figure.value) for figure in round_metrics.figures]
        yield from self._families(GaugeMetricFamily, "of the last attempt at a round", gauges)
        counted = [(name, labels, float(value)) for (name, labels), value in totals.items()]
        yield from self._families(CounterMetricFamily, "since the ServerApp started", counted)
        why = GaugeMetricFamily(
            "fedveil_site_failed",
            "Sites whose upload was missing in the last attempt",
            labels=["run", "site", "reason"],
        )
        for site, reason in round_metrics.failed.items():
            why.add_metric([self._run, site, reason], 1)
        yield why

    def _families(
        self, kind: Callable[..., Any], words: str, figures: Iterable[tuple[str, Labels, float]]
    ) -> Iterator[Metric]:
        by_name: dict[str, Any] = {}
        is_gauge = kind.__name__.startswith("Gauge")
        for name, labels, value in figures:
            names = ["run", *(label for label, _ in labels)]
            prefix = "fedveil_attempt" if is_gauge and name in _COUNTED else "fedveil"
            family = by_name.setdefault(name, kind(f"{prefix}_{name}", f"{name}, {words}", labels=names))
            family.add_metric([self._run, *(text for _, text in labels)], value)
        yield from by_name.values()


def read_token(folder: Path) -> str:
    """Return the token in that folder, creating it if there is none. Raises StateError, like `read_token_file`."""
    return read_token_file(folder / TOKEN)


def read_token_file(file: Path) -> str:
    """Return the bearer token in `file`, creating it if there is none.

    Raises:
        StateError: the token is readable by others, or is malformed.
        OSError: the file cannot be read or created.
    """
    with contextlib.suppress(FileExistsError):  # an earlier run has created it
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as new:
            new.write(secrets.token_urlsafe(_TOKEN_BYTES))
    with file.open("rb") as token_file:
        mode, text = os.fstat(token_file.fileno()).st_mode, token_file.read(_LONGEST + 1).strip()
    if stat.S_IMODE(mode) & 0o077 or not _TOKEN_BYTES <= len(text) <= _LONGEST:
        raise StateError(
            f"{file}: the token must have at least {_TOKEN_BYTES} characters and be readable only by its owner, but "
            f"the file has mode {stat.S_IMODE(mode):o} and {len(text)} bytes; remove it, and the next start creates one"
        )
    return text.decode("ascii", errors="replace")


def create(about: SinkRunInfo) -> PrometheusSink:
    """Create the sink of a run and open its endpoint. Raises ConfigError, StateError."""
    return PrometheusSink(about.name, about.config.sinks.prometheus_port, read_token(about.folder.parent))


def _guarded(app: Callable[..., Iterable[bytes]], token: str) -> Callable[..., Iterable[bytes]]:
    wanted = f"Bearer {token}".encode()

    def answer(environ: Environ, start: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", errors="replace")
        if not hmac.compare_digest(given, wanted):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [f"send the token in {TOKEN} as a bearer token\n".encode()]
        return app(environ, start)

    return answer


class _Server(WSGIServer):
    """An HTTP server that does not look up its host name and ignores clients that disconnect."""

    @override
    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.server_address[1]
        self.setup_environ()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error, because a client may disconnect in the middle of a request."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_SECONDS

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, rather than one line per scrape."""
