"""`fedveil watch` and `fedveil status`: what became of a run, as an exit code and in words."""

from __future__ import annotations

import json
import os
import re
import shlex
import time

import pytest

from fedveil.console.commands.runs import status
from fedveil.console.flower.flwr_cli import FlowerCli, write_connection
from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.console.main import main
from fedveil.console.provisioning.online_status import why_absent
from fedveil.console.runs import run_reader as folders
from fedveil.console.runs.progress_bar import RunProgress, round_stage
from fedveil.console.runs.run_follower import closing_lines, until_ended
from fedveil.console.runs.run_reader import load_run
from fedveil.console.terminal import make_console
from fedveil.console.web.report import run_page
from fedveil.records import process_exit
from fedveil.server_app import completion


def ended(states, said=(), timeout=0.0, printed=""):
    """until_ended on a clock that goes as it sleeps; the last of `states` and of `said` stays."""
    now = [0.0]
    states, said, asked = list(states), list(said) or [""], []

    def read():
        return states.pop(0) if len(states) > 1 else states[0]

    def ask():
        asked.append(now[0])
        return said.pop(0) if len(said) > 1 else said[0]

    def sleep(seconds):
        now[0] += seconds
        assert now[0] < 1000

    code, why = until_ended(read, ask, timeout, lambda: printed, lambda: now[0], sleep)
    return code, why, asked


RUNNING, DONE, FAILED = {"state": "running"}, {"state": "completed"}, {"state": "failed", "reason": "round 1: too few"}
LONG = {"state": "failed", "reason": "x" * 900 + "resume it: fedveil submit"}
STOPPED = {"state": "stopped", "reason": "its ServerApp was told to end; resume it: fedveil submit"}
DIED = {"state": "died", "reason": "killed by the kernel"}


@pytest.mark.parametrize(
    "states,said,code,words",
    [
        ([RUNNING, DONE], [], 0, "completed"),
        ([RUNNING, FAILED], [], 1, "failed: round 1: too few"),
        ([LONG], [], 1, "resume it: fedveil submit"),
        ([RUNNING], ["running", "finished:failed"], 1, "failed, as reported by Flower"),
        ([RUNNING], ["running", "finished:stopped"], 3, "stopped, as reported by Flower"),
        ([RUNNING, STOPPED], ["running"], 3, "stopped: its ServerApp was told to end; resume it: fedveil submit"),
        ([FAILED], ["finished:stopped"], 1, "failed: round 1: too few"),
        ([RUNNING], ["finished:completed"], 1, "does not report it as completed"),
        ([{}], ["running", "finished:completed"], 0, "completed, as reported by Flower"),
        ([{}], ["finished:failed"], 1, "failed, as reported by Flower"),
        ([RUNNING], ["finished:what-is-this"], 1, "what-is-this"),
        ([RUNNING, DONE], ["finished:completed"], 0, "completed"),
        ([RUNNING, DIED], ["running"], 1, "died: killed by the kernel"),
        ([DIED], [], 1, "died: killed by the kernel"),
        ([DIED], ["finished:failed"], 1, "died: killed by the kernel"),
        ([DIED], ["finished:completed"], 1, "died: killed by the kernel"),
        ([DIED], ["finished:stopped"], 3, "stopped, as reported by Flower"),
    ],
)
def test_the_exit_code_is_what_became_of_the_run(states, said, code, words):
    exit_code, why, _ = ended(states, said)
    assert (exit_code, words in why) == (code, True), why


def test_the_cause_that_a_run_printed_is_said_where_it_failed_and_nowhere_else():
    printed = "x\nfedveil.errors.ConfigError: run.dir: cannot\nthe end\n"
    assert ended([{}], ["finished:failed"], printed=printed)[:2] == (1, "failed: run.dir: cannot")
    assert ended([{}], ["finished:completed"], printed=printed)[:2] == (0, "completed, as reported by Flower")
    assert ended([{}], ["finished:stopped"], printed=printed)[:2] == (3, "stopped, as reported by Flower")


def test_flower_is_asked_seldom_and_time_may_run_out():
    code, why, asked = ended([RUNNING], ["running"], timeout=35.0)
    assert code == 4
    assert why == "still running after 35 s: before round 1 of ?"
    assert asked == [0.0, 10.0, 20.0, 30.0]


def test_watching_reads_a_long_record_once_and_follows_it(make_run, monkeypatch, capsys):
    """A thousand sites write hundreds of megabytes; none of it is read twice a second."""
    run = make_run()
    monkeypatch.setattr(folders, "json_lines", None)  # which reads a file as a whole
    with RunProgress(make_console(), run, "run", 2) as progress:
        for _ in range(3):
            progress.tick(folders.status_of(run))
        before = capsys.readouterr().out
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"round": 7, "resumed": true}\n{"round": ')
        progress.tick(folders.status_of(run))
        progress.tick(folders.status_of(run))
    assert before.count("round 1/2") == 1
    assert capsys.readouterr().out.split() == ["run:", "round", "8/2", "resumed", "here"]


def test_watching_a_folder_ends_with_its_status(make_run, capsys):
    folder = make_run(method="fedavg")
    assert main(["watch", str(folder)]) == 0
    folder = make_run(method="fedrand", state="failed")
    assert main(["watch", str(folder)]) == 1
    stdout = capsys.readouterr().out
    assert "failed: round 4: expected at least 2 accepted uploads" in stdout
    assert "site-1: ValueError: <no rows>" in stdout


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["12345"], "a number needs --federation or --flower-home"),
        (["no-such-folder"], "expected a run folder or a number"),
        (["12345", "--flower-home", "nowhere"], "expected config.toml in nowhere"),
    ],
)
def test_what_cannot_be_watched_is_refused(arguments, reason, capsys):
    assert main(["watch", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_status_names_each_run_and_why_it_failed(make_run, tmp_path, capsys):
    assert status.runs_table(tmp_path) == ([f"no runs in {tmp_path}"], True)
    make_run(method="fedavg")
    assert main(["status", str(tmp_path)]) == 0
    make_run(method="fedrand", state="failed")
    assert main(["status", str(tmp_path)]) == 1
    stdout = capsys.readouterr().out
    assert re.search(r"^fedavg +completed +3/3 ", stdout, re.MULTILINE)
    assert "round 4: expected at least 2 accepted uploads" in stdout


def test_status_of_a_federation_names_it_in_the_command_that_resumes_a_run(make_run, tmp_path, capsys, monkeypatch):
    reason = "killed; resume it: fedveil submit --federation FOLDER --config r.toml"
    status_json = json.dumps({"state": "failed", "round": 0, "rounds": 5, "reason": reason})
    (make_run(method="fedavg") / "status.json").write_text(status_json)
    monkeypatch.setattr(status, "list_sites", lambda _: [])
    assert main(["status", str(tmp_path), "--federation", str(tmp_path / "a b")]) == 1
    assert f"fedveil submit --federation '{tmp_path}/a b' --config r.toml" in capsys.readouterr().out
    assert main(["status", str(tmp_path)]) == 1
    assert "--federation FOLDER --config" in capsys.readouterr().out


def test_a_run_that_was_told_to_end_is_stopped_for_everybody_and_no_failure(make_run, tmp_path, capsys):
    folder = make_run(method="fedavg", state="running")
    (folder / "checkpoint.safetensors").touch()
    failed = {"state": "failed", "round": 3, "rounds": 5, "reason": completion.failure_reason(SystemExit(0), folder)}
    (folder / "status.json").write_text(json.dumps(failed))  # as run_folder.py's `failed` writes it
    words = (
        f"its ServerApp was told to end; resume it: fedveil submit --federation FOLDER --config {folder}/resume.toml"
    )
    (line,), well = status.runs_table(tmp_path)
    assert well
    assert re.fullmatch(rf"fedavg +stopped +3/5 +\d+ d \d+ h +3\.1312  {re.escape(words)}", line)
    assert main(["watch", str(folder)]) == 3
    assert f"stopped: {words}" in capsys.readouterr().out
    page = run_page.run_page_html([load_run(folder)])
    assert f"fedavg was stopped, 3 of 5 rounds done: {words}" in page
    assert '<span class="tag stopped">stopped</span>' in page


@pytest.mark.parametrize(
    "reason", ["round 1: interrupted: its ServerApp was told to end", "interrupted: else", "", None, 3]
)
def test_a_run_that_failed_of_something_else_has_failed(make_run, tmp_path, reason):
    folder = make_run(method="fedavg", state="failed")
    run_status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(run_status | {"reason": reason}))
    assert folders.status_of(folder)["state"] == "failed"


def test_where_time_runs_out_the_round_is_counted_from_1_and_what_is_under_way_is_said(make_run, tmp_path, capsys):
    folder = make_run(method="fedavg", state="running")
    now = {"round": 3, "phase": "round", "since": time.time(), "deadline_seconds": 600.0, "asked": 4, "accepted": 1,
           "failed": 0, "waiting": ["south"]}  # fmt: skip
    (folder / "progress.json").write_text(json.dumps(now))
    assert main(["watch", str(folder), "--timeout", "0.1"]) == 4
    stdout = capsys.readouterr().out
    assert "still running after 0.1 s: round 3 of 5; 1 of 4 have answered, waiting for south and 2 more (" in stdout
    assert "{" not in stdout


@pytest.mark.parametrize(
    "said,words",
    [
        ({}, "no status written yet"),
        ({"round": -1, "rounds": 5}, "before round 1 of 5"),
        ({"round": 0, "rounds": 5}, "round 1 of 5"),
        ({"round": "\x1b[2J", "rounds": "\x1b[2J"}, r"before round 1 of \x1b[2J"),
        ({"round": 10**400}, "round 1000"),
    ],
)
def test_the_stage_of_a_run_is_in_words_whatever_its_status_says(said, words):
    assert round_stage(said).startswith(words)


def killed(folder):
    """The folder of a run whose ServerApp was killed when it had most of its memory."""
    os.close(process_exit.lock_folder(folder))
    run_status = json.loads((folder / "status.json").read_text())
    noted = process_exit.note_memory() | {"peak_mb": 980, "limit_mb": 1000, "oom_kills": -1}
    (folder / "status.json").write_text(json.dumps(run_status | {"process": noted}))
    return folder


@pytest.mark.long
def test_everybody_is_told_that_a_run_died_of_what_and_how_it_goes_on(make_run, tmp_path, capsys):
    folder = killed(make_run(method="fedavg", state="running"))
    words = (
        "its ServerApp ended without a message: killed, probably because memory ran out: 980 of 1000 MB at its "
        "last report"
    )
    lower, resume = (
        "or lower evaluate.eval-examples",
        f"fedveil submit --federation FOLDER --config {folder}/resume.toml",
    )
    assert main(["watch", str(folder)]) == 1
    assert main(["status", str(tmp_path)]) == 1
    stdout = capsys.readouterr().out
    assert re.search(r"^fedavg +died +3/5 ", stdout, re.MULTILINE)
    page = run_page.run_page_html([load_run(folder)])
    for text in (words, lower, resume):
        assert stdout.count(text) == 2
        assert text in page


def test_who_runs_a_federation_on_this_machine_is_told_of_what_its_run_died(make_run, tmp_path):
    """`fedveil demo`: status.json itself says nothing of it, and the log ends with the last good round."""
    folder = killed(make_run(method="fedavg", state="running"))
    federation = LocalDeployment([LocalSite("north")], tmp_path / "federation")
    federation._status_files[7] = (folder / "status.json", 0.0)
    ended = federation._ended(7, "finished:failed", 1.0)
    assert not ended.completed
    assert "killed, probably because memory ran out: 980 of 1000 MB" in ended.reason


def test_a_run_that_says_it_runs_and_writes_nothing_is_called_silent(make_run, tmp_path):
    folder = make_run(method="fedavg", state="running")
    assert "running" in status.runs_table(tmp_path)[0][0]
    assert status.runs_table(tmp_path)[1]
    lines, well = status.runs_table(tmp_path, now=time.time() + 7200)
    assert "silent" in lines[0]
    assert "no output for 120 minutes" in lines[0]
    assert not well
    (folder / "status.json").write_text("{")
    assert "cannot be read" in status.runs_table(tmp_path)[0][0]
    assert json.loads((folder / "config.json").read_text())
    assert os.listdir(tmp_path) == ["fedavg"]


@pytest.mark.parametrize(
    "state,flower,words",
    [
        ("invited", None, "not registered yet"),
        ("revoked", None, r"its key is revoked \(expiry date: 2026-05-01\).* --renew --renew-signing$"),
        ("expired", None, "its key is expired .* --renew$"),
        ("registered", "online", "^$"),
        ("registered", "offline", "stopped or disconnected"),
        ("registered", "registered", "never online with its registered key: it has not been started yet"),
        ("registered", None, "not known to Flower"),
    ],
)
def test_why_a_member_is_not_online(state, flower, words):
    entry = {"state": state} | ({} if state == "invited" else {"node": "7", "until": "2026-05-01T00:00:00+00:00"})
    assert re.search(words, why_absent(entry, {"7": flower} if flower else {"8": "online"}))


def test_an_operator_without_the_registry_sees_which_sites_are_online(tmp_path, monkeypatch, capsys):
    """The folder of `fedveil operators login` has a connection and no list of members."""
    home = tmp_path / "anna" / "server" / "flower"
    home.mkdir(parents=True)
    write_connection(home, "127.0.0.1:1", home.parent / "ca.crt")
    monkeypatch.setattr(FlowerCli, "nodes", lambda self: {"7": "online", "8": "offline"})
    (tmp_path / "runs").mkdir()
    assert main(["status", str(tmp_path / "runs"), "--federation", str(tmp_path / "anna")]) == 1
    assert "1 of 2 registered sites are online" in (stdout := capsys.readouterr().out)
    assert re.search(r"node 8 +registered +offline", stdout)


def test_what_is_printed_to_be_pasted_is_quoted(make_run, tmp_path):
    parent = tmp_path / "my runs; x"
    folder = make_run(method="fedavg")
    (folder / "final").mkdir()
    parent.mkdir()
    *_, model, step = closing_lines(folder.rename(parent / "fedavg"))
    assert shlex.split(model) == ["model:", str(parent / "fedavg" / "final")]
    assert shlex.split(step) == ["next:", "fedveil", "report", str(parent / "fedavg")]
    assert shlex.split(process_exit.resume_command(parent))[-1] == str(parent / "resume.toml")
