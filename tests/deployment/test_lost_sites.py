"""A site is killed in mid-round and another one's client raises: the round ends with the rest, the report says why."""

from __future__ import annotations

import json

import pytest

from fedveil.console.flower.local_federation import LocalFederation, LocalSite
from fedveil.console.report import run_page
from fedveil.console.runs import folder
from tests.conftest import ROOT
from tests.deployment.engine import until

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
    with LocalFederation(sites, tmp_path / "federation") as federation:
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
    assert first["failed"]["broken"] == "TaskError at the site; its log has the text (code 2)"
    assert "no-such-folder" not in json.dumps(first)
    assert "no-such-folder" in log
    page = tmp_path / "report.html"
    run_page.write(page, [folder.load(tmp_path / "run")])
    assert "killed" in page.read_text()
    assert first["failed"]["killed"].split(" (")[0].split("&")[0][:20] in page.read_text()
