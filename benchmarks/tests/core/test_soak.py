"""The soak test's samples, rows and verdicts, from a federation of a few processes of the test."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fedveil.errors import ConfigError
from fedveil_bench.core import soak
from fedveil_bench.core.soak import ProcessSamples
from fedveil_bench.process_monitor.usage import HeldResources
from fedveil_bench.runner import BenchOptions

ROUNDS = 40


def samples(leak_mb: float = 0.0, leak_files: int = 0) -> ProcessSamples:
    """A worker that may leak, and client processes that live for a round each."""
    found = ProcessSamples()
    for i in range(ROUNDS):
        wobble = 0.1 * (i % 3)
        held = HeldResources(100 + wobble + leak_mb * i, 90.0, 8 + leak_files * i, 4)
        found.held.setdefault("site-0 worker 11", []).append(held)
        found.held[f"site-0 client process {100 + i}"] = [HeldResources(50, 40, 6, 2)]
        found.alive.append(2)
        found.disk.setdefault("run folder", []).append(1000 * i)
    return found


def said(found: ProcessSamples) -> str:
    return "\n".join(soak._verdicts(found, soak._rows(found, 10), 10))


def test_flat_is_flat_and_what_came_and_went_is_counted():
    text = said(samples())
    assert "No process's memory, open files or threads grow" in text
    assert f"site-0 client process: {ROUNDS} of them came and went" in text


@pytest.mark.parametrize(
    "leak,what", [({"leak_mb": 0.05}, "RSS KB a round 50"), ({"leak_files": 1}, "files a round 1 ")]
)
def test_a_leak_is_named_with_its_slope(leak, what):
    text = said(samples(**leak))
    assert f"site-0 worker grows: {what}" in text
    assert "No process" not in text


def test_what_grows_at_first_and_then_stays_is_no_leak():
    found = samples()
    for i, held in enumerate(found.held["site-0 worker 11"]):
        found.held["site-0 worker 11"][i] = replace(held, rss_mb=100 + min(i, ROUNDS // 2) + 0.1 * (i % 3))
    slope = soak._rows(found, 10)[0]["metrics"]["RSS KB a round"]
    assert slope["low"] > 0
    assert "No process's memory" in said(found)


def test_the_folders_growth_is_a_row():
    rows = {row["name"]: row["metrics"] for row in soak._rows(samples(), 10)}
    assert rows["run folder"]["disk KB a round"]["mean"] == pytest.approx(1.0)
    assert rows["all processes"]["processes a round"]["mean"] == 0.0


class Processes:
    """Of two owners; the site's process lives until `ended`."""

    def __init__(self) -> None:
        self.site = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "flower-supernode"])

    def alive(self, owner: str) -> list[psutil.Process]:
        running = self.site.poll() is None
        return [psutil.Process()] if owner == "superlink" else [psutil.Process(self.site.pid)] if running else []


def federation(tmp_path: Path, wait) -> SimpleNamespace:
    return SimpleNamespace(
        sites={"site-0": None}, processes=Processes(), folder=tmp_path / "federation", run=lambda app, c: 1, wait=wait
    )


def test_a_sample_is_taken_after_each_round_and_a_stop_keeps_those_so_far(tmp_path):
    run = tmp_path / "runs" / "soak"
    run.mkdir(parents=True)
    told: list[str] = []

    def wait(number, seconds, look):
        look({})  # no file yet
        for round_ in range(12):
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"round": -1, "scores": {}}\n' if round_ == 0 else '{"round": 1, "accepted": []}\n')
            look({})
            look({})  # the same round
        raise KeyboardInterrupt

    fed = federation(tmp_path, wait)
    try:
        config = {"run.dir": str(tmp_path / "runs"), "run.name": "soak", "run.rounds": 200}
        found = soak._sampled(fed, config, BenchOptions(say=told.append))
    finally:
        fed.processes.site.kill()
        fed.processes.site.wait()
    assert len(found.alive) == 11
    assert sorted(name.rpartition(" ")[0] for name in found.held) == ["site-0 SuperNode", "superlink other"]
    assert found.disk["run folder"][-1] > found.disk["run folder"][0]
    assert told[-1] == "stopped after 11 rounds"
    assert soak._curves(found)[:4] == b"\x89PNG"


def test_a_run_that_failed_is_no_soak(tmp_path):
    ended = SimpleNamespace(completed=False, reason="the disk is full")
    fed = federation(tmp_path, lambda number, seconds, look: ended)
    fed.processes.site.kill()
    fed.processes.site.wait()
    with pytest.raises(ConfigError, match="completed run, found: the disk is full"):
        soak._sampled(fed, {"run.dir": str(tmp_path), "run.name": "s", "run.rounds": 2}, BenchOptions())
