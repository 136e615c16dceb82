"""The endpoint, as prometheus_client's own parser reads it, and who gets nothing from it."""

from __future__ import annotations

import http.client
import socket
import stat
import time
from dataclasses import replace

import pytest

from fedveil.config import parse
from fedveil.errors import ConfigError, StateError
from fedveil.server_app.metrics.sinks import SinkRunInfo
from tests.server_app.metrics.sinks.runs import HOSTILE, TOLD

pytest.importorskip("prometheus_client", reason='needs the extra "prometheus"')

from prometheus_client.parser import text_string_to_metric_families

from fedveil.server_app.metrics.sinks import prometheus


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def sink(tmp_path, port):
    prometheus_sink = prometheus.create(SinkRunInfo(tmp_path / "run", "ab", parse({"sinks.prometheus-port": port})))
    yield prometheus_sink
    prometheus_sink.close("completed")


def asked(port: int, token: str = "", method: str = "GET", scheme: str = "Bearer") -> tuple[int, str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    link.request(method, "/metrics", headers={"Authorization": f"{scheme} {token}"} if token else {})
    answer = link.getresponse()
    return answer.status, answer.read().decode()


def scraped(port: int, folder) -> dict:
    status, text = asked(port, (folder / prometheus.TOKEN).read_text())
    assert status == 200
    return {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_parser_reads_every_figure_and_a_site_s_words_are_a_label(sink, port, tmp_path):
    run, north = ("run", "run"), ("site", "north")
    assert scraped(port, tmp_path) == {("fedveil_rounds", run): 0}
    sink.write(TOLD)
    sink.write(replace(TOLD, step=4, row={}))
    assert scraped(port, tmp_path) == {
        ("fedveil_rounds", run): 4,
        ("fedveil_seconds", run): 2.5,
        ("fedveil_attempt_upload_bytes", run): 700,
        ("fedveil_upload_bytes_total", run): 1400,
        ("fedveil_score", ("metric", "loss"), run, ("view", "server")): 1.25,
        ("fedveil_site_loss_trained", run, north): 0.75,
        ("fedveil_attempt_site_upload_bytes", run, north): 400,
        ("fedveil_site_upload_bytes_total", run, north): 800,
        ("fedveil_site_failed", ("reason", HOSTILE), run, ("site", "south")): 1,
    }
    sink.write(replace(TOLD, step=5, failed={}, row={}))
    assert not [name for name, *_ in scraped(port, tmp_path) if name == "fedveil_site_failed"]


def test_a_neighbour_without_the_token_gets_nothing(sink, port, tmp_path):
    token = (tmp_path / prometheus.TOKEN).read_text()
    assert stat.S_IMODE((tmp_path / prometheus.TOKEN).stat().st_mode) == 0o600
    sink.write(TOLD)
    for given in ("", "x", token[:-1], token + "x", token.lower(), "é"):
        status, text = asked(port, given) if given.isascii() else asked(port, given.encode().decode("latin-1"))
        assert status == 401, given
        assert "fedveil_" not in text
    assert asked(port, token, scheme="Basic")[0] == 401
    assert asked(port, token, method="POST")[0] == 405
    assert asked(port, token)[0] == 200


def test_only_loopback_listens(sink, port):
    assert sink._server.server_address[0] == "127.0.0.1"


def test_a_silent_client_stalls_neither_the_rounds_nor_the_endpoint_for_long(sink, port, tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.3)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /metr")
        time.sleep(0.05)
        started = time.monotonic()
        sink.write(TOLD)
        assert time.monotonic() - started < 0.2
        assert scraped(port, tmp_path)
        assert time.monotonic() - started < 3


def test_a_port_in_use_is_refused_before_a_site_is_asked(runs, port):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"sinks.prometheus-port: port {port} on 127.0.0.1 is not available"):
            runs.go(**{"sinks__use": "prometheus", "sinks__prometheus-port": port})
    assert runs.grid.pushed == []


def test_the_port_is_free_after_the_run_and_the_token_stays(runs, port):
    keys = {"sinks__use": "prometheus", "sinks__prometheus-port": port}
    runs.go(**keys)
    assert "sinks" not in runs.status
    token = (runs.at / prometheus.TOKEN).read_text()
    runs.go(**keys, run__name="second")
    assert (runs.at / prometheus.TOKEN).read_text() == token
    with pytest.raises(ConnectionRefusedError):
        asked(port, token)


@pytest.mark.parametrize("mode,text", [(0o644, "t" * 43), (0o600, "short"), (0o600, ""), (0o600, "t" * 201)])
def test_a_token_that_others_may_know_or_guess_is_refused(tmp_path, mode, text):
    file = tmp_path / prometheus.TOKEN
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(
        StateError, match="the token must have at least 32 characters and be readable only by its owner"
    ):
        prometheus.read_token(tmp_path)


def test_the_page_is_valid_openmetrics(sink, port, tmp_path):
    """The stricter parser refuses a counter and a gauge of one family."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as strict_families

    sink.write(TOLD)
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    token = (tmp_path / prometheus.TOKEN).read_text()
    accepted = "application/openmetrics-text; version=1.0.0"
    link.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}", "Accept": accepted})
    answer = link.getresponse()
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    families = list(strict_families(answer.read().decode()))
    assert len({family.name for family in families}) == len(families)
    assert {"fedveil_upload_bytes", "fedveil_attempt_upload_bytes"} <= {family.name for family in families}
