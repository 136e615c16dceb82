"""A federation of real processes whose hosts have proxy variables, as in many hospitals."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from fedveil.console.main import main
from tests.deployment.test_restarts import Command, provisioned, until
from tests.recording_proxy import recording_proxy

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_only_the_fleet_connection_goes_through_the_proxy(tmp_path: Path, monkeypatch, capsys) -> None:
    """The server's name exists at the proxy alone, and the proxy opens tunnels to nothing else."""
    with recording_proxy() as (url, heads):
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        folder = provisioned(tmp_path, "fl.hospital.invalid")
        kit = tmp_path / "pilot-north"
        request = str(kit / "keys" / "request.json")
        server, site = Command(tmp_path / "server.out", "server", "start", str(folder)), None
        try:
            until(lambda: "next: fedveil submit" in server.said, 120, server)
            assert main(["members", "register", str(folder), request, "--fingerprint", "-"]) == 0
            site = Command(tmp_path / "site.out", "site", "start", "--kit", str(kit))
            until(lambda: "site north: online" in site.said, 120, site)
            time.sleep(5)  # both SuperExecs ask for tasks every second or two
            capsys.readouterr()
            main(["status", str(tmp_path / "runs"), "--federation", str(folder)])
            assert re.search(r"north +registered +online", capsys.readouterr().out)
            assert site.process.poll() is None
            assert "firewall" not in site.said
        finally:
            for command in (site, server):
                if command is not None:
                    command.stop()
        assert "502" not in (kit / "state" / "logs" / "north.log").read_text()
    asked = {head.split(b"\r\n")[0].split(b":")[0] for head in heads}
    assert asked == {b"CONNECT fl.hospital.invalid"}
