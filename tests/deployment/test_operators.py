"""A running SuperLink: a key past its expiry date, and operators with roles, through Flower's own command line."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.flower.processes import LaunchError
from fedveil.console.main import main
from fedveil.records import audit_log
from tests.conftest import ROOT
from tests.deployment.engine import until


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    sites = [LocalSite(name, ROOT / "data" / "e2e") for name in ("north", "south")]
    with LocalDeployment(sites, tmp_path_factory.mktemp("federation")) as running:
        yield running


def _log(federation) -> list[dict]:
    return audit_log.read_log(federation.folder / "control-log.jsonl")


def _login(federation, tmp_path, name: str, role: str) -> FlowerCli:
    folder = str(federation.folder)
    token = tmp_path / f"{name}.token"
    assert main(["operators", "add", folder, name, "--role", role, "--out", str(token)]) == 0
    assert token.stat().st_mode & 0o777 == 0o600
    address, ca = f"127.0.0.1:{federation._control_port}", str(federation.folder / "ca.crt")
    given = ["--token", str(token), "--ca", ca, "--address", address]
    assert main(["operators", "login", str(tmp_path / name), *given]) == 0
    return FlowerCli(tmp_path / name / "server" / "flower")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_operator_may_what_its_role_says_and_each_attempt_is_logged(federation, tmp_path):
    """`flwr` alone does it: no part of ours is at the operator's end but a file with the token."""
    bad = {"method.params": "rho = 1.5", "run.dir": str(tmp_path / "runs"), "run.name": "bad"}
    anna, ben = _login(federation, tmp_path, "anna", "read"), _login(federation, tmp_path, "ben", "submit")
    assert sorted(anna.nodes().values()) == ["online", "online"]
    with pytest.raises(LaunchError, match="operator anna with role read may not call start-run"):
        anna.submit(None, bad)
    run = ben.submit(None, bad)
    with pytest.raises(LaunchError, match="operator anna with role read may not call stop-run"):
        anna.stop(run)
    with pytest.raises(LaunchError, match="operator ben with role submit may not call unregister-node"):
        ben.unregister(next(iter(anna.nodes())))
    public = (federation.folder / "keys" / "north.pub").read_text()
    with pytest.raises(LaunchError, match="operator ben with role submit may not call register-node"):
        ben.register(public, "north")
    assert main(["operators", "revoke", str(federation.folder), "ben"]) == 0
    with pytest.raises(LaunchError, match="revoked"):
        ben.submit(None, bad)
    (tmp_path / "nobody").mkdir()
    shutil.copy(tmp_path / "anna" / "server" / "flower" / "config.toml", tmp_path / "nobody")
    with pytest.raises(LaunchError, match="this needs an operator token"):
        FlowerCli(tmp_path / "nobody").nodes()
    decisions = [
        (line["operator"], line["call"], line["decision"])
        for line in _log(federation)
        if line["event"] == "asked" and line["operator"] != "owner" and line["call"] != "list-nodes"
    ]
    assert decisions == [
        ("anna", "start-run", "refused"),
        ("ben", "start-run", "permitted"),
        ("anna", "stop-run", "refused"),
        ("ben", "unregister-node", "refused"),
        ("ben", "register-node", "refused"),
        ("ben", "start-run", "refused"),
    ]
    assert [line["run"] for line in _log(federation) if line["event"] == "submitted"] == [run]
    assert [line["call"] for line in _log(federation) if line.get("operator") == ""] == ["list-nodes"]
    audit_log.verify_log(federation.folder / "control-log.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_key_past_its_last_day_is_shut_out_in_mid_connection_and_nothing_is_run(federation):
    file, processes = federation.folder / "registry" / "members.json", federation.processes
    members = json.loads(file.read_text())
    ends = datetime.now(UTC) + timedelta(seconds=8)
    members["sites"]["north"]["until"] = ends.isoformat()
    partial = file.with_name("part")
    partial.write_text(json.dumps(members))
    os.replace(partial, file)
    assert processes.ended("north") is None
    until(lambda: processes.ended("north") is not None, 60, "north is shut out", 0.1)
    assert datetime.now(UTC) >= ends
    assert "a request of north is refused: this key expired on" in processes.log("superlink").read_text()
    (line,) = [line for line in _log(federation) if line["event"] == "shut-out"]
    assert (line["site"], line["state"]) == ("north", "registered")
    assert processes.ended("south") is None

    processes.kill("north")
    federation.start_site("north")  # the same key again
    until(lambda: processes.ended("north") is not None, 60, "north is not activated again", 0.1)
    assert not federation.processes.log("north").read_bytes()[federation._log_starts["north"] :].count(b"SuperNode ID:")
    message = f"fedveil: this key expired on {ends:%Y-%m-%d}; make a new key at the site with fedveil"
    assert message in processes.log("north").read_text()
    assert processes.ended("south") is None
