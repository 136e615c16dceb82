"""Runs of three sites through the ServerApp's main(), and the figures that sinks are tested with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedveil.client_app.app import app
from fedveil.config import parse
from fedveil.server_app import app as server
from fedveil.server_app.metrics.samples import MetricSample, RoundMetrics
from tests.server_app.grid import LocalGrid, use_toy_task

SITES = ["east", "north", "south"]
BASIC = {
    "run.name": "run", "run.rounds": 2, "run.deterministic": True, "cohort.wait-seconds": 1.0,
    "cohort.deadline-seconds": 1.0, "cohort.min-sites": 2, "method.params": "rho = 0.5",
}  # fmt: skip
HOSTILE = 'x" } 1\n<script>alert(1)</script>![a](http://127.0.0.1:9/a.png)'
TOLD = RoundMetrics(
    3,
    (
        MetricSample("seconds", 2.5),
        MetricSample("upload_bytes", 700),
        MetricSample("score", 1.25, (("view", "server"), ("metric", "loss"))),
        MetricSample("site_loss_trained", 0.75, (("site", "north"),)),
        MetricSample("site_upload_bytes", 400, (("site", "north"),)),
    ),
    {"south": HOSTILE},
)


class Named(LocalGrid):
    @property
    def run(self):
        return type("Run", (), {"fab_hash": "5f"})()


class Runs:
    """A folder of runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: Path) -> None:
        use_toy_task(monkeypatch)
        self.at = at

    def go(self, tamper=None, **changes) -> None:
        """main() itself."""
        keys = {key.replace("__", "."): value for key, value in changes.items()}
        flat = parse(BASIC | {"run.dir": str(self.at)} | keys).flat()
        self.grid = Named(app, SITES, self.at / "sites", flat, tamper)
        server.main(self.grid, Context(7, 1, {}, RecordDict(), flat))

    @property
    def status(self) -> dict:
        return json.loads((self.at / "run" / "status.json").read_text())

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.at / "run" / "metrics.jsonl").read_text().splitlines()]
