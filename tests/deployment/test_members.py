"""Members of a federation at a running SuperLink: a key is let in, shut out, not let in again; runs are watched."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from fedveil.console.flower.flwr_cli import FlowerCli
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.flower.machine import free_ports
from fedveil.console.flower.processes import LaunchError
from fedveil.console.flower.programs import supernode_command
from fedveil.console.main import main
from fedveil.records.atomic_files import write_atomic
from tests.conftest import ROOT, extract
from tests.deployment.engine import until


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_site_joins_with_its_own_key_and_is_shut_out_when_revoked(tmp_path, capsys):
    (tmp_path / "federation.toml").write_text('name = "pilot"\nserver = ["127.0.0.1"]\nsites = ["guest"]\n')
    assert main(["provision", str(tmp_path / "federation.toml")]) == 0
    pilot, home = tmp_path / "pilot", tmp_path / "pilot" / "server" / "flower"
    extract(pilot / "kits" / "guest.tar.gz", tmp_path)
    kit = tmp_path / "pilot-guest"
    assert main(["site", "init", "--kit", str(kit)]) == 0
    fingerprint = re.findall(r"SHA256:\S+", capsys.readouterr().out)[-1]
    request = str(kit / "keys" / "request.json")
    with LocalDeployment([LocalSite("north", ROOT / "data" / "e2e")], tmp_path / "federation") as federation:
        for name in ("config.toml", "credentials.yaml"):
            shutil.copy(federation.folder / "flower" / name, home)  # the same server, by another road
        shutil.copy(federation.folder / "ca.crt", home.parent)  # which a moved folder's connection is rewritten to
        flower = FlowerCli(home)

        def started(name: str) -> None:
            (port,) = free_ports(1)
            (tmp_path / "node.toml").write_text('site = "guest"\n')
            command = supernode_command(
                f"127.0.0.1:{federation._fleet_port}", federation.folder / "ca.crt", kit / "keys" / "node.key", port,
                tmp_path / "node.toml", kit / "keys" / "superexec-secret",
            )  # fmt: skip
            federation.processes.start(name, command, federation._env())

        def told() -> None:
            """The server's registry is `pilot`'s too."""
            file, members = federation.folder / "registry" / "members.json", json.loads(own)
            known = json.loads((pilot / "registry" / "members.json").read_text())
            write_atomic(file, json.dumps({"sites": {**members["sites"], **known["sites"]}, "retired": {}}).encode())

        own = (federation.folder / "registry" / "members.json").read_text()
        started("unregistered")
        until(lambda: federation.processes.ended("unregistered") is not None, 60, "an unregistered key is refused", 0.1)
        assert federation.processes.ended("unregistered") != 0  # no message is served without a registered key
        assert main(["members", "register", str(pilot), request, "--fingerprint", fingerprint]) == 0
        started("stranger")  # Flower has its key, and the server's registry not: nobody registered it there
        until(lambda: federation.processes.ended("stranger") is not None, 60, "a key of Flower's alone is refused", 0.1)
        assert "fedveil: this key is not registered" in federation.processes.log("stranger").read_text()
        told()
        started("guest")
        until(
            lambda: re.search(r"guest +registered +online", _status(pilot, capsys)) is not None, 60, "guest is online"
        )
        assert main(["members", "revoke", str(pilot), "guest"]) == 0
        told()
        assert sorted(flower.nodes().values()).count("online") == 1  # north alone
        federation.processes.kill("guest")
        started("revoked")
        until(lambda: federation.processes.ended("revoked") is not None, 60, "a revoked key is refused", 0.1)
        assert federation.processes.ended("revoked") != 0
        assert main(["members", "register", str(pilot), request, "--fingerprint", fingerprint]) == 2
        assert main(["members", "sync", str(pilot)]) == 0

        bad = {"method.params": "rho = 1.5", "run.dir": str(tmp_path / "runs"), "run.name": "bad"}
        run = str(federation.run(ROOT, bad))
        assert main(["watch", run, "--flower-home", str(home), "--timeout", "90"]) == 1
        assert main(["watch", str(tmp_path / "runs" / "bad"), "--federation", str(pilot)]) == 1
        assert "rho: expected a probability from 0 to 1, found 1.5" in capsys.readouterr().out
        assert (tmp_path / "runs" / "bad" / "flower-run").read_text() == run
        waiting = {"cohort.sites": 5, "run.dir": str(tmp_path / "runs"), "run.name": "long"}
        run = str(federation.run(ROOT, waiting))
        assert main(["watch", run, "--flower-home", str(home), "--timeout", "1"]) == 4
        federation.flower.stop(run)
        assert main(["watch", run, "--flower-home", str(home), "--timeout", "60"]) == 3
        with pytest.raises(LaunchError):
            flower.run_status("123")


def _status(folder, capsys) -> str:
    main(["status", str(folder / "no-runs"), "--federation", str(folder)])
    return capsys.readouterr().out
