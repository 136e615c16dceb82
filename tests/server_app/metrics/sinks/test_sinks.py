"""Which sinks a run has: found by file name, refused before any site is asked, and never in a round's way."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import types

import pytest

from fedveil.config import parse
from fedveil.errors import ConfigError
from fedveil.server_app.metrics import dispatcher, optional_deps
from tests.server_app.metrics.sinks.runs import SITES


def test_they_are_found_by_their_file():
    assert optional_deps.PLUGINS.list_names() == ["mlflow", "prometheus", "tensorboard", "wandb"]


@pytest.mark.parametrize(
    "flat,match",
    [
        ({"sinks.use": "tensorboard,,mlflow"}, "sinks.use: .*expected unique names separated by commas"),
        ({"sinks.use": "mlflow, mlflow"}, "expected unique names"),
        ({"sinks.use": "../mlflow"}, "expected unique names"),
        ({"sinks.use": "a" * 201}, "at most 200"),
        ({"sinks.mlflow-uri": "http://10.0.0.1:5000"}, "expected https, or http on one of 127.0.0.1, ::1, localhost"),
        ({"sinks.mlflow-uri": "http://127.0.0.1.example.org"}, "expected https, or http on one of"),
        ({"sinks.mlflow-uri": "http://127.0.0.1@example.org"}, "without a user, password"),
        ({"sinks.mlflow-uri": "https://me:secret@example.org"}, "without a user, password"),
        ({"sinks.mlflow-uri": "https://example.org/?token=1"}, "without a user, password, query"),
        ({"sinks.mlflow-uri": "file:///etc"}, "expected an address without"),
        ({"sinks.mlflow-uri": "postgresql://localhost/x"}, "expected https"),
        ({"sinks.mlflow-uri": "databricks"}, "expected an address"),
        ({"sinks.mlflow-uri": "/etc/passwd"}, "expected an address"),
        ({"sinks.mlflow-uri": "http://localhost\\@example.org"}, "expected an address"),
        ({"sinks.mlflow-uri": "http://localhost:99999"}, "expected an address"),
        ({"sinks.mlflow-uri": "http://[::1"}, "expected an address"),
        ({"sinks.mlflow-uri": "https://example.org/\n"}, "expected an address"),
        ({"sinks.prometheus-port": 80}, "sinks.prometheus-port: .*1024"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_key(flat, match):
    with pytest.raises(ConfigError, match=match):
        parse(flat)


@pytest.mark.parametrize(
    "uri", ["", "http://127.0.0.1:5000", "http://localhost:5000/mlflow", "http://[::1]:5000", "https://ml.example.org"]
)
def test_addresses_that_may_be(uri):
    assert parse({"sinks.mlflow-uri": uri}).sinks.mlflow_uri == uri


def test_a_missing_extra_and_an_unknown_sink_are_refused_before_a_site_is_asked(runs, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name))
    with pytest.raises(ConfigError, match=r'tensorboard needs the extra "tensorboard" .* -r lock/tensorboard\.txt'):
        runs.go(sinks__use="tensorboard")
    assert runs.grid.pushed == []
    assert runs.status["state"] == "failed"
    assert "lock/tensorboard.txt" in runs.status["reason"]
    with pytest.raises(
        ConfigError,
        match=r"sinks.use: found .grafana.; expected one of \['mlflow', 'prometheus', 'tensorboard', 'wandb'\]",
    ):
        runs.go(sinks__use="grafana", run__name="other")


class Sink:
    def __init__(self) -> None:
        self.told: list = []
        self.state = ""

    def write(self, told):
        self.told.append(told)

    def close(self, state):
        self.state = state


@pytest.fixture
def use(monkeypatch):
    """Makes sinks of those names, as another package would."""

    def make(**named):
        real = type(optional_deps.PLUGINS).load_module

        def module(room, name):
            if name not in named:
                return real(room, name)
            return types.SimpleNamespace(EXTRA="x", NEEDS="json", create=lambda about: named[name])

        monkeypatch.setattr(type(optional_deps.PLUGINS), "load_module", module)
        return ",".join(named)

    return make


def test_a_run_tells_a_sink_what_its_metrics_have_and_each_site_s_bytes(runs, use):
    sink = Sink()
    runs.go(sinks__use=use(mine=sink))
    assert sink.state == runs.status["state"] == "completed"
    assert "sinks" not in runs.status
    rows = [row for row in runs.rows if row["round"] >= 0]
    assert [metrics.step for metrics in sink.told] == [1, 2]
    for row, metrics in zip(rows, sink.told, strict=True):
        values_by_path = {figure.path: figure.value for figure in metrics.figures}
        assert (values_by_path["asked"], values_by_path["accepted"], values_by_path["seconds"]) == (
            3,
            3,
            row["seconds"],
        )
        for way in ("upload_bytes", "download_bytes"):
            assert sum(values_by_path[f"site_{way}/{site}"] for site in SITES) == values_by_path[way] == row[way] > 0
        for site in SITES:
            assert values_by_path[f"site_loss_trained/{site}"] == row["reports"][site]["loss_trained"]


def test_a_refused_upload_has_its_site_s_bytes_and_reason(runs, use):
    def other(message, reply):
        array = next(iter(reply.content.array_records["fedveil"].values()))
        array.data = array.data[:-3] + b"abc"
        return reply

    sink = Sink()
    runs.go(sinks__use=use(mine=sink), tamper={"south": other}, run__rounds=1)
    (metrics,) = sink.told
    values_by_path = {figure.path: figure.value for figure in metrics.figures}
    assert metrics.failed["south"].startswith("refused: ")
    assert (values_by_path["site_accepted/south"], values_by_path["site_accepted/north"]) == (0, 1)
    assert values_by_path["site_upload_bytes/south"] > 0


class Raises(Sink):
    def write(self, told):
        raise OSError(28, "No space left on device")


class Sleeps(Sink):
    go = threading.Event()

    def write(self, told):
        self.go.wait(30)


def test_sinks_that_raise_or_sleep_for_ever_stop_no_run_and_the_status_says_why(runs, use, monkeypatch):
    monkeypatch.setattr(dispatcher, "END_SECONDS", 0.5)
    good, asleep = Sink(), Sleeps()
    started = time.monotonic()
    runs.go(sinks__use=use(good=good, raises=Raises(), asleep=asleep))
    assert time.monotonic() - started < 15
    assert runs.status["state"] == "completed"
    assert runs.status["sinks"] == {
        "raises": "OSError: [Errno 28] No space left on device",
        "asleep": "it did not write everything within 0.5 s after the run ended",
    }
    assert [metrics.step for metrics in good.told] == [1, 2]
    asleep.go.set()


@pytest.mark.long
def test_a_run_that_fails_says_so_to_its_sinks(runs, use):
    sink = Sink()
    with pytest.raises(Exception, match="at least 2 uploads must be accepted"):
        runs.go(sinks__use=use(mine=sink), tamper=dict.fromkeys(SITES, lambda m, r: None), cohort__max_retries=0)
    assert sink.state == runs.status["state"] == "failed"
    assert sink.told[0].failed == dict.fromkeys(SITES, "no reply within 1 s")


def test_who_names_no_sink_imports_none_of_them(runs):
    before = set(sys.modules)
    runs.go()
    assert not {name for name in set(sys.modules) - before if name.startswith(("tensorboard", "mlflow", "prometheus"))}


def test_sinks_may_change_at_a_resume(runs, use):
    runs.go(run__rounds=1)
    sink = Sink()
    runs.go(run__rounds=2, run__resume=True, sinks__use=use(mine=sink))
    assert [metrics.step for metrics in sink.told] == [2]
