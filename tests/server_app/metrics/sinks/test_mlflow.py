"""The run in MLflow, as its own client reads it: from the database, and from a server."""

from __future__ import annotations

import http.server
import os
import stat
import threading
import warnings
from dataclasses import replace

import pytest

from fedveil.config import parse
from fedveil.server_app.metrics.sinks import SinkRunInfo
from tests.server_app.metrics.sinks.runs import TOLD

pytest.importorskip("mlflow", reason='needs the extra "mlflow"')

from fedveil.server_app.metrics.sinks import mlflow

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.filterwarnings("ignore")  # third parties' own, of MLflow's database


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name, value in mlflow._ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def runs_in(folder):
    client = MlflowClient(tracking_uri=mlflow.database_uri(folder))
    experiment = client.get_experiment_by_name(mlflow.EXPERIMENT)
    return client, client.search_runs([experiment.experiment_id])


def test_mlflow_reads_every_figure_and_a_resumed_run_goes_on_in_its_own(tmp_path):
    about = SinkRunInfo(tmp_path / "run", "ab", parse({"method.name": "fedqsn"}))
    sink = mlflow.create(about)
    assert list(tmp_path.iterdir()) == []  # nothing before there is a figure
    sink.write(TOLD)
    sink.close("failed")
    client, (run,) = runs_in(tmp_path)
    assert run.data.metrics == {figure.path: figure.value for figure in TOLD.figures}
    assert (run.info.run_name, run.info.status) == ("run", "FAILED")
    assert run.data.params["method.name"] == "fedqsn"
    assert run.data.tags["failed.south"] == f"round 3: {TOLD.failed['south']}"
    assert stat.S_IMODE((tmp_path / mlflow.DATABASE).stat().st_mode) == 0o600

    again = mlflow.create(replace(about, is_resumed=True))
    again.write(replace(TOLD, step=4))
    again.close("completed")
    other = mlflow.create(replace(about, id="cd"))
    other.write(TOLD)
    client, runs = runs_in(tmp_path)
    assert sorted(run.info.status for run in runs) == ["FINISHED", "RUNNING"]
    (first,) = [run for run in runs if run.info.status == "FINISHED"]
    assert [m.step for m in client.get_metric_history(first.info.run_id, "site_loss_trained/north")] == [3, 4]


ASKED: list[str] = []


class _Away(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ASKED.append(self.path)
        self.send_response(302)
        self.send_header("Location", "http://localhost:1/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_server_that_sends_elsewhere_or_is_not_there_ends_the_sink_and_no_run(runs):
    server = http.server.HTTPServer(("127.0.0.1", 0), _Away)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    runs.go(**{"sinks__use": "mlflow", "sinks__mlflow-uri": f"http://127.0.0.1:{port}"})
    assert ASKED
    assert runs.status["state"] == "completed"
    assert "MlflowException" in runs.status["sinks"]["mlflow"]
    assert "localhost:1" not in runs.status["sinks"]["mlflow"]  # it was not followed
    server.shutdown()
    server.server_close()


def test_a_folder_that_cannot_be_written_ends_the_sink_and_no_run(runs):
    (runs.at / mlflow.DATABASE).mkdir(parents=True)
    runs.go(sinks__use="mlflow")
    assert runs.status["state"] == "completed"
    assert "IsADirectoryError" in runs.status["sinks"]["mlflow"]


def test_nothing_is_told_to_mlflow_s_makers(runs):
    runs.go(sinks__use="mlflow")
    assert "sinks" not in runs.status
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    client, (run,) = runs_in(runs.at)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "site_loss_trained/north")) == 2
