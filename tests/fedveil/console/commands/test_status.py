"""`fedveil status`: a head, elapsed time and loss, and JSON with documented fields."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from datetime import UTC, datetime

import pytest

from fedveil.console.commands.runs import status
from fedveil.console.flower.flwr_cli import FlowerCli, ServerUnreachableError, write_connection
from fedveil.console.main import main
from fedveil.console.provisioning.refused_calls import RefusedCalls
from fedveil.console.runs import run_list
from fedveil.console.runs.run_list import ListedRun
from tests.fedveil.console.conftest import unscored

RUN_FIELDS = ["name", "folder", "state", "is_healthy", "rounds_done", "rounds", "elapsed_seconds", "loss", "loss_of",
              "flower_run", "note"]  # fmt: skip
SITE_FIELDS = ["name", "state", "is_online", "note", "refused_calls", "is_rogue"]
HOSTILE = "\x1b]0;owned\x07\u202e"


def changed(run, name, **values):
    (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | values))
    return run


def document(capsys) -> dict:
    """The one JSON document on standard output, without colors."""
    output = capsys.readouterr()
    assert "\x1b" not in output.out
    return json.loads(output.out)


def test_a_head_stands_above_the_columns_with_elapsed_time_and_loss(make_run, tmp_path, capsys):
    make_run(method="fedavg")
    assert main(["status", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "rounds", "elapsed", "loss"]
    assert re.split(r"  +", line) == ["fedavg", ["completed", "3/3"][0], "3/3", "2 h 02 min", "3.1312"]
    assert [head.index("elapsed") + 7, head.index("loss") + 4] == [line.index("min") + 3, len(line)]


def test_a_loss_at_the_sites_is_marked_and_explained(make_run, tmp_path, capsys):
    unscored(make_run(method="fedavg"))
    assert main(["status", str(tmp_path)]) == 0
    stdout = capsys.readouterr().out
    assert re.search(r"fedavg .* \d\.\d{4}\*$", stdout, re.MULTILINE)
    assert stdout.splitlines()[-1].startswith("* at the sites, on their training examples")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0, "0 s"), (59.4, "59 s"), (59.7, "1 min"), (3599, "59 min"), (3600, "1 h 00 min"),
     (48 * 3600 - 1, "47 h 59 min"), (50 * 3600, "2 d 2 h")],
)  # fmt: skip
def test_a_time_is_in_its_two_largest_units(seconds, words):
    assert run_list.elapsed_words(seconds) == words


def test_json_has_the_fields_of_the_help_and_no_others(make_run, tmp_path, capsys):
    (changed(make_run(method="fedavg"), "status.json") / "flower-run").write_text("77")
    make_run(method="fedrand", state="failed")
    assert main(["status", str(tmp_path), "--json"]) == 1
    found = document(capsys)
    assert list(found) == ["format", "is_healthy", "runs", "sites"]
    assert (found["format"], found["is_healthy"], found["sites"]) == (1, False, None)
    assert [list(run) for run in found["runs"]] == [RUN_FIELDS] * 2
    assert [field.name for field in dataclasses.fields(ListedRun)] == RUN_FIELDS
    fedavg, fedrand = sorted(found["runs"], key=lambda run: run["name"])
    assert fedavg == {
        "name": "fedavg", "folder": str(tmp_path / "fedavg"), "state": "completed", "is_healthy": True,
        "rounds_done": 3, "rounds": 3, "elapsed_seconds": 7322.0, "loss": pytest.approx(4.21 - 0.5 * 3**0.7),
        "loss_of": "test data", "flower_run": "77", "note": "",
    }  # fmt: skip
    assert (fedrand["state"], fedrand["is_healthy"]) == ("failed", False)
    assert "expected at least 2 accepted uploads" in fedrand["note"]
    words = " ".join(status.__doc__.split())
    for name in (*RUN_FIELDS, *SITE_FIELDS, *found):
        assert re.search(rf"\b{name}\b", words), name


def test_json_of_a_federation_has_its_sites(tmp_path, monkeypatch, capsys):
    calls = RefusedCalls(3, "yesterday", True)
    sites = [status._site("north", "registered", True, "", None), status._site("east", "invited", False, "why", calls)]
    monkeypatch.setattr(status, "list_sites", lambda folder: sites)
    assert main(["status", "--federation", str(tmp_path), "--json"]) == 1
    found = document(capsys)
    assert found["sites"] == [
        dict(zip(SITE_FIELDS, ["north", "registered", True, "", 0, False], strict=True)),
        dict(zip(SITE_FIELDS, ["east", "invited", False, f"why; {calls}", 3, True], strict=True)),
    ]
    assert found["is_healthy"] is False


def test_json_without_an_answer_of_the_server_has_the_runs(make_run, tmp_path, monkeypatch, capsys):
    make_run(method="fedavg")
    home = tmp_path / "pilot" / "server" / "flower"
    home.mkdir(parents=True)
    write_connection(home, "127.0.0.1:1", home.parent / "ca.crt")

    def nodes(self):
        raise ServerUnreachableError("nobody there")

    monkeypatch.setattr(FlowerCli, "nodes", nodes)
    assert main(["status", str(tmp_path), "--federation", str(tmp_path / "pilot"), "--json"]) == 2
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert ([run["name"] for run in found["runs"]], found["sites"]) == (["fedavg"], None)
    assert (found["is_healthy"], output.err) == (False, "error: nobody there\n")


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e400, "3", None])
def test_a_loss_that_is_no_number_is_null(make_run, tmp_path, capsys, loss):
    run = make_run(method="fedavg")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["scores"] = {"server": {"loss": loss}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["status", str(tmp_path), "--json"]) == 0
    (listed,) = document(capsys)["runs"]
    assert (listed["loss"], listed["loss_of"]) == (None, "")


@pytest.mark.parametrize(
    "started", ["", "yesterday", "2026-01-02T03:04:05", 3, None, "9999-12-31T23:59:59-12:00", "x" * 10**5]
)
def test_a_start_that_is_no_time_is_null(make_run, tmp_path, capsys, started):
    changed(make_run(method="fedavg"), "config.json", started=started)
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert document(capsys)["runs"][0]["elapsed_seconds"] is None


def test_elapsed_goes_on_while_a_run_runs_and_ends_with_its_last_word_if_it_died(make_run, tmp_path):
    run = make_run(method="fedavg", state="running")
    start = datetime.now(UTC).timestamp() - 100
    changed(run, "config.json", started=datetime.fromtimestamp(start, UTC).isoformat())
    (listed,) = run_list.list_runs(tmp_path, start + 500)
    assert (listed.state, listed.elapsed_seconds) == ("running", pytest.approx(500, abs=0.1))
    for file in run.iterdir():
        os.utime(file, (start + 60, start + 60))
    (listed,) = run_list.list_runs(tmp_path, start + 9000)
    assert (listed.state, listed.elapsed_seconds) == ("silent", pytest.approx(60, abs=0.1))


def test_what_a_run_folder_says_controls_no_terminal(make_run, tmp_path, capsys):
    run = changed(make_run(method="fedavg"), "status.json", state=HOSTILE, reason=HOSTILE, rounds=HOSTILE)
    (run / "flower-run").write_text("77; rm -r ~")
    for options in ([], ["--json"]):
        assert main(["status", str(tmp_path), *options]) == 1
        assert not set(HOSTILE) & set("\x1b\x07\u202e") & set(capsys.readouterr().out)
    (listed,) = run_list.list_runs(tmp_path)
    assert (listed.rounds, listed.flower_run) == (None, "")
    assert not set("\x1b\x07\u202e") & set(listed.state + listed.note)


def test_a_folder_that_is_not_there_is_refused_and_a_run_folder_is_one_run(make_run, tmp_path, capsys):
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert "expected a folder of runs, found none at" in capsys.readouterr().err
    assert main(["status", str(make_run(method="fedavg"))]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("fedavg ")
