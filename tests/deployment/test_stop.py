"""`fedveil stop` at a running SuperLink."""

from __future__ import annotations

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.main import main
from tests.conftest import ROOT
from tests.deployment.engine import until


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_waits_for_sites_is_stopped_once(tmp_path, capsys):
    run_folder, settings = tmp_path / "runs" / "long", {"cohort.sites": 5, "run.name": "long"}
    with LocalDeployment([LocalSite("north", ROOT / "data" / "e2e")], tmp_path / "federation") as federation:
        number = str(federation.run(ROOT, {**settings, "run.dir": str(tmp_path / "runs")}))
        until(lambda: (run_folder / "status.json").is_file(), 120, "the run has begun")
        server = ["--flower-home", str(federation.folder / "flower")]
        assert main(["stop", str(run_folder), *server]) == 0
        stdout = capsys.readouterr().out
        assert f"run {number}: the server has stopped it" in stdout
        assert "long: stopped" in stdout
        assert main(["watch", number, *server, "--timeout", "60"]) == 3
        for name in (number, str(run_folder)):
            assert main(["stop", name, *server]) == 2
            assert "RUN: expected a run that has not ended, found " in capsys.readouterr().err
