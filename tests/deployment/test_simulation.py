"""`flwr run .` on Flower's simulation engine, the same app."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_app_runs_on_the_simulation_engine(tmp_path):
    pytest.importorskip("ray", reason='needs the extra "simulation"')
    data = ROOT / "data" / "e2e"
    settings = {
        "task.data": str(data),
        "task.evaluation": str(data),
        "run.rounds": 2,
        "run.dir": str(tmp_path),
        "run.name": "simulated",
        "train.max-steps": 2,
        "evaluate.generate": "never",
        "evaluate.max-examples": 4,
    }
    overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    bin_folder = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "FLWR_HOME": str(tmp_path / "flower"),
        "HOME": str(tmp_path),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    command = [str(bin_folder / "flwr"), "run", str(ROOT), "--stream", "-c", overrides]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=350, check=False)
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if "flower-superlink" in " ".join(process.info["cmdline"] or []) and str(tmp_path) in str(
                _environ(process)
            ):
                process.send_signal(signal.SIGTERM)
    status = json.loads((tmp_path / "simulated" / "status.json").read_text())
    assert status["state"] == "completed", done.stdout[-2000:]
    metrics = [json.loads(x) for x in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    assert [sorted(m["accepted"]) for m in metrics[1:]] == [["partition-0", "partition-1"]] * 2


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
