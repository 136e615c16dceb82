"""Federations over slow lines, with real processes: a run ends, and a slow line is not mistaken for a dead one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fedveil import resources
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil_bench.core.shaped_line import LineSpeed, ShapedLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SITES = ("site-0", "site-1")
CONFIG = {
    "method.name": "fedavg", "run.rounds": 2, "train.epochs": 0, "train.max-steps": 1, "train.batch-size": 2,
    "task.max-tokens": 96, "train.received-loss-examples": 0, "evaluate.every": 0, "evaluate.generate": "never",
    "cohort.sites": 2, "cohort.min-sites": 2, "cohort.max-retries": 0, "cohort.deadline-seconds": 3000.0,
}  # fmt: skip


class SlowFederation(LocalDeployment):
    """A federation whose sites each reach the server over a line of their own."""

    def __init__(self, speed: LineSpeed, folder: Path) -> None:
        sites = [LocalSite(name, resources.data_folder("e2e")) for name in SITES]
        super().__init__(sites, folder, guarded=True, start_timeout=600)
        self.speed, self.lines, self._making = speed, dict[str, ShapedLine](), threading.Lock()

    def fleet_address(self, name: str) -> str:
        with self._making:
            if name not in self.lines:
                self.lines[name] = ShapedLine(self.speed, int(super().fleet_address(name).rpartition(":")[2]))
                self.lines[name].__enter__()
        return f"127.0.0.1:{self.lines[name].port}"

    def stop(self) -> None:
        super().stop()
        for line in self.lines.values():
            line.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("speed", "breaks"),
    [
        pytest.param(LineSpeed(5_000, 5_000, 0.15), False, id="5 kB/s"),
        pytest.param(LineSpeed(20_000, 50_000, 0.15), False, id="20 kB/s up"),
        pytest.param(LineSpeed(120_000, 120_000, 0.04, break_every=30.0), True, id="broken every 30 s"),
    ],
)
def test_a_run_over_a_slow_line_completes(speed, breaks, tmp_path):
    with SlowFederation(speed, tmp_path / "federation") as federation:
        run = federation.run(None, CONFIG | {"run.dir": str(tmp_path / "runs"), "run.name": "slow"})
        ended = federation.wait(run, timeout=3000)
        carried = {name: dict(line.carried) for name, line in federation.lines.items()}
    records = [json.loads(line) for line in (tmp_path / "runs" / "slow" / "metrics.jsonl").read_text().splitlines()]
    print(speed, round(ended.seconds), [round(record.get("seconds", 0)) for record in records], carried)
    assert ended.completed, ended.reason
    assert all(sorted(record["accepted"]) == sorted(SITES) for record in records[1:])
    for line in carried.values():
        if breaks:
            assert line["breaks"] >= 3
        else:  # one for polls, and one for large messages, which is reopened after a minute without a part
            assert line["connections"] <= 2 + CONFIG["run.rounds"]
