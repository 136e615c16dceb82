from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError
from fedveil.console.flower.machine import free_ports
from fedveil.console.main import main
from tests.conftest import extract


@pytest.mark.long
def test_registering_with_a_server_that_is_not_there_says_how_to_start_it(tmp_path, capsys, monkeypatch):
    """Flower's own answer, for a port at which nothing listens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedveil").mkdir()  # as beside a clone: Flower would take our connection's name for this app's path
    (tmp_path / "fedveil" / "pyproject.toml").touch()
    text = 'name = "pilot"\nserver = ["localhost"]\nsites = ["north"]\ncontrol-port = {}\n'
    (tmp_path / "federation.toml").write_text(text.format(free_ports(1)[0]))
    assert main(["provision", "federation.toml"]) == 0
    extract(tmp_path / "pilot" / "kits" / "north.tar.gz", tmp_path)
    assert main(["site", "init", "--kit", "pilot-north"]) == 0
    register = ["members", "register", "pilot", "pilot-north/keys/request.json", "--fingerprint", "-"]
    capsys.readouterr()
    assert main(register) == 2
    stderr = capsys.readouterr().err
    assert "fedveil server start pilot" in stderr
    assert "--offline" in stderr
    with pytest.raises(ServerUnreachableError, match="tunnel"):
        FlowerCli(Path("pilot/server/flower")).nodes()
    assert main(["status", "--federation", "pilot"]) == 2
    output = capsys.readouterr()
    assert "no runs in" in output.out  # the runs, though nobody answers for the sites
    assert "control port" in output.err
    assert main([*register, "--offline"]) == 0
    capsys.readouterr()
    assert main([*register, "--offline"]) == 2
    assert "found the site's registered key; there is nothing to do" in capsys.readouterr().err
