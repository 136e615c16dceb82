"""Sites are lost in mid-round: killed, broken, out of memory. The round ends with the rest, and all say why."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.main import main
from fedveil.console.runs import run_reader
from fedveil.console.runs.workers import list_workers
from fedveil.console.web.report import run_page
from tests.conftest import ROOT
from tests.deployment.engine import until
from tests.memory_group import join, memory_group

DATA = ROOT / "data" / "e2e"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_round_goes_on_without_a_killed_and_a_broken_site(tmp_path):
    share = (("num-partitions", 3),)
    sites = [
        LocalSite("sound", DATA, (("partition-id", 0), *share)),
        LocalSite("broken", tmp_path / "no-such-folder"),
        LocalSite("killed", DATA, (("partition-id", 1), *share)),
    ]
    overrides = {
        "method.name": "fedavg",
        "run.rounds": 2,
        "run.dir": str(tmp_path),
        "run.name": "run",
        "train.max-steps": 3,
        "cohort.sites": 3,
        "cohort.min-sites": 1,
        "cohort.deadline-seconds": 90.0,
    }
    with LocalDeployment(sites, tmp_path / "federation") as federation:
        run = federation.run(ROOT, overrides)
        ledger = tmp_path / "run" / "disclosure.jsonl"
        until(lambda: ledger.exists() and '"site": "killed"' in ledger.read_text(), 120, "its message is out", 0.1)
        federation.kill_site("killed")
        ended = federation.wait(run, timeout=400)
        assert ended.completed, ended.reason
        log = federation.processes.log("broken").read_text()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["accepted"] == ["sound"]
    assert set(first["failed"]) == {"broken", "killed"}
    assert first["failed"]["broken"] == "TaskError at the site; see the site's log (code 2)"
    assert "no-such-folder" not in json.dumps(first)
    assert "no-such-folder" in log
    page = tmp_path / "report.html"
    run_page.write_run_page(page, [run_reader.load_run(tmp_path / "run")])
    assert "killed" in page.read_text()
    assert first["failed"]["killed"].split(" (")[0].split("&")[0][:20] in page.read_text()


def client_of(superexec: int) -> list[psutil.Process]:
    """The client process that a site's SuperExec has started."""
    children = psutil.Process(superexec).children(recursive=True)
    return [one for one in children if "flwr-clientapp" in " ".join(one.cmdline()[:3])]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_out_of_memory_in_every_turn_and_one_whose_client_is_killed_are_named_with_that_reason(tmp_path, capsys):
    """The kernel kills the worker of one site for real, twice a turn; the client process of another gets a SIGKILL."""
    share = (("num-partitions", 3),)
    sites = [LocalSite(name, DATA, (("partition-id", i), *share)) for i, name in enumerate(("cut", "short", "sound"))]
    overrides = {
        "method.name": "fedavg",
        "run.rounds": 1,
        "run.dir": str(tmp_path),
        "run.name": "run",
        "train.max-steps": 3,
        "cohort.sites": 3,
        "cohort.min-sites": 2,
        "cohort.max-retries": 0,
        "cohort.deadline-seconds": 200.0,
    }
    with memory_group(250) as group, LocalDeployment(sites, tmp_path / "federation") as federation:
        at = tmp_path / "federation" / "sites"
        shorts = WorkerRegistry(at / "short", "short")
        with shorts.locked():
            for spare in shorts.living():
                shorts.kill(spare)  # so that every worker of it is started by its client process
        join(group, federation.processes.pid("short superexec"))
        superexec = federation.processes.pid("cut superexec")
        run = federation.run(ROOT, overrides)
        busy = ("loading", "training")
        until(lambda: any(w.says["state"] in busy for w in list_workers(at / "cut")), 120, "a turn at the site", 0.05)
        for client in client_of(superexec):
            os.kill(client.pid, signal.SIGKILL)
        ended = federation.wait(run, timeout=400)
        log = federation.processes.log("short").read_text()
    short = "short: WorkerError: the site's worker ended: out of memory (code 2)"
    cut = (
        "cut: its client process (flwr-clientapp) ended without a message: killed, perhaps for lack of memory; see "
        "its log"
    )
    for reason in (short, cut, "or lower train.batch-size"):
        assert reason in ended.reason
    assert "killed by the kernel because memory ran out: " in log
    assert main(["watch", str(tmp_path / "run")]) == 1
    stdout = capsys.readouterr().out
    assert stdout.count(short) == 2  # with its round, and at the end
    assert stdout.count(cut) == 2
    run_page.write_run_page(tmp_path / "report.html", [run_reader.load_run(tmp_path / "run")])
    page = (tmp_path / "report.html").read_text().replace("&#x27;", "'")
    assert "WorkerError: the site's worker ended: out of memory" in page
    assert "its client process (flwr-clientapp) ended without a message" in page
    for site, words in (
        ("short", "SIGKILL: killed by the kernel because memory ran out: "),
        ("cut", "its client process exited before the round ended"),
    ):
        assert main(["site", "status", "--state-dir", str(at / site)]) == 1
        stdout = capsys.readouterr().out
        assert f"{site}: the last client round, round 1 of run-" in stdout
        assert words in stdout
