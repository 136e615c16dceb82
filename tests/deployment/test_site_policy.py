"""A federation whose sites decide for themselves: three policies, two apps, and the logs that both ends keep of it."""

from __future__ import annotations

import json

import pytest

from fedveil.client_app.policy import run_config_rules
from fedveil.config import parse
from fedveil.console.commands.federation import app as console_app
from fedveil.console.flower.app_bundle import own_app
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.main import main
from fedveil.records import audit_log
from tests.conftest import ROOT

DATA = ROOT / "data" / "e2e"
CONFIG = {
    "method.name": "fedavg",
    "run.rounds": 1,
    "train.max-steps": 1,
    "train.batch-size": 2,
    "cohort.sites": 3,
    "cohort.min-sites": 1,
    "cohort.max-retries": 0,
    "cohort.deadline-seconds": 120.0,
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sites_refuse_what_they_do_not_permit_before_its_code_runs(tmp_path, capsys):
    digest = console_app.bundle_digest(ROOT)
    policies = {
        "open": f'app-digests = ["{digest}"]\nmethods = ["fedavg"]\ntasks = ["text-generation"]',
        "other-app": f'app-digests = ["{"0" * 64}"]',
        "other-method": f'app-digests = ["{digest}"]\nmethods = ["fedrand"]',
    }
    sites = []
    overrides = CONFIG | {"run.dir": str(tmp_path / "runs")}
    needed = run_config_rules.permits_for_run(parse(overrides | {"run.name": "first"}))
    for name, text in policies.items():
        (tmp_path / f"{name}.toml").write_text(f"{text}\n{needed}")
        sites.append(LocalSite(name, DATA, (("policy", str(tmp_path / f"{name}.toml")), ("num-partitions", 3))))
    changed = tmp_path / "changed"
    own_app(changed)
    marker = tmp_path / "ran-at-a-site"
    shim = changed / "client_app" / "app.py"
    shim.write_text(
        f"open({str(marker)!r}, 'w').close()\n" + shim.read_text().replace("from __future__ import annotations\n", "")
    )
    with LocalDeployment(sites, tmp_path / "federation") as federation:
        ended = federation.wait(federation.run(ROOT, overrides | {"run.name": "first"}), timeout=150)
        assert ended.completed, ended.reason
        refused = federation.wait(federation.run(changed, overrides | {"run.name": "second"}), timeout=150)
    assert not refused.completed
    assert not marker.exists()
    first = json.loads((tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["accepted"] == ["open"]
    assert first["failed"]["other-app"].startswith("PolicyError: app digest: this site permits")
    assert first["failed"]["other-method"].startswith("PolicyError: method.name: this site permits")
    second = json.loads((tmp_path / "runs" / "second" / "metrics.jsonl").read_text().splitlines()[0])
    assert {site: reason[:24] for site, reason in second["failed"].items()} == dict.fromkeys(
        policies, "PolicyError: app digest:"
    )
    server = tmp_path / "runs" / audit_log.NAME
    site = tmp_path / "federation" / "sites" / "open" / audit_log.NAME
    assert [line["event"] for line in audit_log.read_log(site)] == ["admitted", "sent", "refused"]
    assert audit_log.read_log(site)[0]["app"] == audit_log.read_log(server)[0]["app"] == digest
    assert main(["log", "verify", str(site), "--other", str(server), "--site", "open"]) == 0
    assert main(["log", "verify", str(server), "--other", str(site)]) == 0
    site.write_bytes(b"".join(site.read_bytes().splitlines(keepends=True)[:1]))
    assert main(["log", "verify", str(site)]) == 0
    assert main(["log", "verify", str(site), "--other", str(server), "--site", "open"]) == 2
    assert "its end was cut off" in capsys.readouterr().err
