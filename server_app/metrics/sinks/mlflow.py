"""MLflow: a run in the experiment "fedveil", in mlflow.db next to the run folders or on a tracking server.

The store is a database file, because MLflow no longer maintains its file-based store. It needs no server;
`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` displays it. A resumed run continues its MLflow run.
Credentials for a tracking server come from the ServerApp's environment, never from the run config, which
sites see. Telemetry is off, redirects are not followed, and a server that does not answer is tried twice.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, final

from fedveil.server_app.metrics.samples import RoundMetrics

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from fedveil.server_app.metrics.sinks import SinkRunInfo

EXTRA, NEEDS = "mlflow", "mlflow"
EXPERIMENT, DATABASE = "fedveil", "mlflow.db"
_TAG = "fedveil.run"
_AT_ONCE, _MOST_REASONS = 1000, 50  # MLflow accepts this many metrics, and twice as many tags, per call
_OTHER = re.compile(r"[^\w\-. :/]", re.ASCII)  # characters that MLflow rejects in a metric name
_PARAMETERS = ("method.name", "method.params", "task.name", "task.model", "run.rounds")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "GIT_PYTHON_REFRESH": "quiet",
}  # fmt: skip


@final
class MLflowSink:
    """Logs metrics by path, with the number of finished rounds as the step; a failed site's last reason is a tag."""

    def __init__(self, about: SinkRunInfo) -> None:
        self._about = about
        self._client: MlflowClient | None = None
        self._run = ""

    def write(self, told: RoundMetrics) -> None:
        """Write one attempt's metrics. Raises MlflowException if the server or the database rejects them."""
        client, now = self._client or self._opened(), int(time.time() * 1000)
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(_OTHER.sub("_", f.path), f.value, now, told.step) for f in told.figures]
        for i in range(0, len(metrics), _AT_ONCE):
            client.log_batch(self._run, metrics[i : i + _AT_ONCE])
        failed = list(told.failed.items())[:_MOST_REASONS]
        if failed:
            tags = [RunTag(f"failed.{site}", f"round {told.step}: {reason}") for site, reason in failed]
            client.log_batch(self._run, tags=tags)

    def close(self, state: str) -> None:
        """Record in MLflow how the run ended."""
        if self._client is not None:
            self._client.set_terminated(self._run, "FINISHED" if state == "completed" else "FAILED")

    def _opened(self) -> MlflowClient:
        os.environ.update(_ENVIRONMENT)  # MLflow reads it at import
        from mlflow.tracking import MlflowClient

        uri = self._about.config.sinks.mlflow_uri or database_uri(self._about.folder.parent)
        client = MlflowClient(tracking_uri=uri)
        existing_experiment = client.get_experiment_by_name(EXPERIMENT)
        experiment = existing_experiment.experiment_id if existing_experiment else client.create_experiment(EXPERIMENT)
        self._run = self._found(client, experiment) or self._created(client, experiment)
        self._client = client
        return client

    def _found(self, client: MlflowClient, experiment: str) -> str:
        if not self._about.is_resumed:
            return ""
        runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{self._about.name}-{self._about.id}'", max_results=1)
        if not runs:
            return ""
        client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)

    def _created(self, client: MlflowClient, experiment: str) -> str:
        about = self._about
        run = client.create_run(experiment, tags={_TAG: f"{about.name}-{about.id}"}, run_name=about.name).info.run_id
        flat = about.config.flat()
        for name in _PARAMETERS:
            client.log_param(run, name, flat[name])
        return str(run)


def database_uri(folder: Path) -> str:
    """Return the address of the database in that folder; create the file, readable only by its owner."""
    file = folder.absolute() / DATABASE
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    return f"sqlite:///{file}"


def create(about: SinkRunInfo) -> MLflowSink:
    """Create the sink of a run, without importing MLflow or contacting a server yet."""
    return MLflowSink(about)
