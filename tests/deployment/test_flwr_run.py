"""`flwr run` on a federation: the commands that docs/runs.md shows, as they stand there."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from fedveil.console.flower.app_bundle import bundle_digest, own_app
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.flower.processes import flower_environment
from fedveil.records import audit_log
from tests.conftest import ROOT
from tests.deployment.loopback import lines

NUMBER = "1210960356280891820"  # of a run, where the page needs one
QUICK = "train.max-steps=1 train.batch-size=2 cohort.sites=2 cohort.deadline-seconds=200.0"


def shown() -> tuple[str, list[str]]:
    """config.toml and the commands of docs/runs.md."""
    page = (ROOT / "docs" / "runs.md").read_text()
    section = page.split("## With Flower's own command line\n")[1].split("\n## ")[0]
    config, commands = section.split("    export ")
    block = "\n".join(line.removeprefix("    ") for line in config.splitlines() if line.startswith("    "))
    return block, re.findall(r"^(?: {4})?((?:flwr|fedveil) .+|FLWR_HOME=.+)$", commands, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_flower_s_own_command_line_runs_an_app_on_a_federation(tmp_path):
    config, (home, nodes, run, listed, log, _, watch) = shown()
    superlink_config = tomllib.loads(config)["superlink"]
    assert (superlink_config["default"], sorted(superlink_config["fedveil"])) == (
        "fedveil",
        ["address", "root-certificates"],
    )
    app = own_app(tmp_path / "app")
    with LocalDeployment([LocalSite(n, ROOT / "data" / "e2e") for n in ("north", "south")], tmp_path / "f") as running:
        made = tomllib.loads((running.folder / "flower" / "config.toml").read_text())
        assert made == {
            "superlink": {
                "default": "fedveil",
                "fedveil": {
                    "address": made["superlink"]["fedveil"]["address"],
                    "root-certificates": str(running.folder / "ca.crt"),
                },
            }
        }

        (app / "pilot" / "server").mkdir(parents=True)
        (app / "pilot" / "server" / "flower").symlink_to(running.folder / "flower")
        env = flower_environment(tmp_path / "no-home")
        env = {key: value for key, value in env.items() if key != "FLWR_HOME"} | {"PYTHONPATH": str(ROOT)}

        def typed(command: str) -> str:
            script = f"export {home.split(' PATH=')[0]}\n{command}"
            done = subprocess.run(
                ["bash", "-c", script], cwd=app, env=env, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        assert typed(nodes).count("online") == 2
        here = f'{QUICK} run.dir="{tmp_path / "runs"}" run.rounds=1'
        stdout = typed(run.replace("run.rounds=20", here))
        (number,) = re.findall(r"run (\d{6,})", stdout)
        assert "completed" in typed(watch.replace(NUMBER, number))
        assert number in typed(f"{listed} --format json")
        shown_log = typed(log.replace(NUMBER, number))
        assert re.search(r"round 1 done: accepted \['(north', 'south|south', 'north)'\]", shown_log), shown_log
        asked = audit_log.read_log(running.folder / "control-log.jsonl")
    (row,) = [row for row in lines(tmp_path / "runs" / "second" / "metrics.jsonl") if row["round"] == 0]
    assert sorted(row["accepted"]) == ["north", "south"]  # in the order of their replies
    (started,) = [line for line in asked if line["event"] == "asked" and line["call"] == "start-run"]
    assert started["app"] == bundle_digest(None)
