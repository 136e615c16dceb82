from __future__ import annotations

import pytest

from tests.server_app.metrics.sinks.runs import Runs


@pytest.fixture
def runs(monkeypatch, tmp_path) -> Runs:
    return Runs(monkeypatch, tmp_path / "runs")
