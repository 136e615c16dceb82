"""`fedveil site`: what a worker holds and does, as shown; and the worker that a container's entry point starts."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from fedveil.client_app.worker.connection import WorkerRecord
from fedveil.client_app.worker.owner import OwnerProcess
from fedveil.client_app.worker.registry import WorkerRegistry
from fedveil.console.main import main
from fedveil.console.runs import workers
from fedveil.console.runs.workers import WorkerStatus, describe_worker, follow_worker
from tests.conftest import ROOT

CARD = WorkerRecord("ab", 41, OwnerProcess(7, 1.0), "app", "key", 1_700_000_000.0)
RUN = {
    "run": "pilot",
    "round": 2,
    "rounds": 5,
    "method": "fedrand",
    "model": "tiny",
    "memory_mb": 1234,
    "device": "cpu",
}
TRAINING = RUN | {
    "state": "training",
    "step": 3,
    "steps": 16,
    "loss": 2.5,
    "tokens_per_second": 5210,
    "seconds_left": 12.4,
}
IDLE = RUN | {"state": "idle", "last": {"seconds": 4.25, "load_seconds": 0.001}}


def status(says: dict) -> WorkerStatus:
    return WorkerStatus("north", CARD, says)


def test_a_worker_is_described_with_what_it_holds_where_and_since_when():
    text = describe_worker(status(IDLE | {"device": "H200", "device_memory_mb": 20480}))
    assert "north: process 41 since 2023-11-14" in text
    assert "pilot (fedrand), round 3 of 5" in text
    assert "tiny on H200, 1,234 MB and 20,480 MB on the device" in text
    assert "last round 4.2 s, including 0.00 s of loading" in text


def test_a_spare_says_that_it_has_no_run():
    assert "no run yet" in describe_worker(status({"state": "spare", "memory_mb": 60}))
    after = describe_worker(status({"state": "spare", "memory_mb": 60, "last": {"seconds": 7.1, "load_seconds": 0.0}}))
    assert "no run now" in after  # it had one: the line below says what its last turn took
    assert "no model now on no device yet, 60 MB" in after


def followed(monkeypatch, states: list[list[WorkerStatus]], terminal: bool) -> str:
    remaining = iter(states)
    out, ticks = io.StringIO(), iter(range(len(states) + 1))
    monkeypatch.setattr(workers, "list_workers", lambda state_dir: next(remaining))
    monkeypatch.setattr(workers, "_POLL_SECONDS", 0.0)
    console = Console(file=out, force_terminal=terminal, width=160, highlight=False)
    follow_worker(console, ROOT, enough=lambda: next(ticks) == len(states))
    return out.getvalue()


def test_following_prints_a_line_whenever_something_changes(monkeypatch):
    later = TRAINING | {"step": 4, "loss": 2.25}
    output = followed(monkeypatch, [[status(s)] for s in (TRAINING, TRAINING, later, IDLE)] + [[]], terminal=False)
    assert output.splitlines() == [
        "north: training: pilot (fedrand), round 3 of 5  step 3/16  loss 2.5000, 5,210 tokens/s, "
        "about 12 s left  tiny on cpu, 1,234 MB",
        "north: training: pilot (fedrand), round 3 of 5  step 4/16  loss 2.2500, 5,210 tokens/s, "
        "about 12 s left  tiny on cpu, 1,234 MB",
        "north: idle: pilot (fedrand), round 3 of 5  last round 4.2 s, including 0.00 s of loading  "
        "tiny on cpu, 1,234 MB",
    ]


def test_on_a_terminal_there_is_a_bar_with_step_loss_speed_and_memory(monkeypatch):
    output = followed(monkeypatch, [[status(TRAINING)]], terminal=True)
    for text in ("north", "3/16 steps", "training", "loss 2.5000", "5,210 tokens/s", "1,234 MB", "━"):
        assert text in output


def test_how_far_trainings_are_in_one_line_for_the_demo(monkeypatch):
    workers_by_site = {"a": [status(TRAINING), status(IDLE)], "b": [status({"state": "does not answer (UNAVAILABLE)"})]}
    monkeypatch.setattr(workers, "list_workers", lambda state_dir: workers_by_site[state_dir.name])
    assert workers.worker_steps([Path("a"), Path("b")]) == "north step 3/16, loss 2.5000, about 12 s left"
    assert workers.worker_steps([]) == ""
    workers_by_site["a"] = [status(TRAINING)] * 11
    assert len(lines := workers.worker_steps([Path("a")]).splitlines()) == 9
    assert lines[-1] == "and 3 more"


def test_workers_are_asked_every_other_second_however_often_the_line_is_drawn(monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr(workers, "worker_steps", lambda folders: asked.append(folders) or f"said {len(asked)}")
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    get_steps = workers.steps_by_and_by([Path("a")])
    assert [get_steps(), get_steps()] == ["said 1", "said 1"]
    now[0] += 2.0
    assert [get_steps(), get_steps()] == ["said 2", "said 2"]
    assert asked == [[Path("a")]] * 2


def test_without_a_worker_it_says_why_there_may_be_none(tmp_path, capsys):
    assert main(["site", "status", "--state-dir", str(tmp_path)]) == 1
    assert f"no worker in {tmp_path}" in capsys.readouterr().out


def test_why_the_last_turn_failed_is_said_until_one_succeeds(tmp_path, capsys):
    folder = WorkerRegistry(tmp_path, "north")
    folder.path.mkdir(parents=True)
    assert workers.last_failures(tmp_path) == []
    folder.failed(
        {"run": "pilot\x1b[2J", "round": 2}, "worker 41: killed by the kernel because memory ran out: 900 of 1000 MB"
    )
    folder.failed({}, "worker: expected a client round of another run")
    with folder.turns.open("a") as file:
        file.write("{half a li")
    assert workers.last_failures(tmp_path)[0].endswith("worker: expected a client round of another run")
    folder.turns.write_text(folder.turns.read_text().splitlines()[0] + "\n")
    assert main(["site", "status", "--state-dir", str(tmp_path)]) == 1
    stdout = capsys.readouterr().out
    assert "north: the last client round, round 3 of pilot\\x1b[2J, failed at 20" in stdout
    assert ": worker 41: killed by the kernel because memory ran out: 900 of 1000 MB" in stdout
    with folder.turns.open("a") as file:
        file.write('{"time": 1.0, "run": "pilot", "round": 2, "seconds": 1.5}\n')
    assert workers.last_failures(tmp_path) == []


@pytest.mark.long
def test_a_worker_started_for_a_container_is_shown_and_ends_with_its_owner(tmp_path, capsys):
    with subprocess.Popen(["sleep", "100"]) as owner:
        assert main(["site", "warm", "--name", "north", "--state-dir", str(tmp_path), "--owner", str(owner.pid)]) == 0
        assert main(["site", "status", "--state-dir", str(tmp_path)]) == 0
        stdout = capsys.readouterr().out
        (card,) = WorkerRegistry(tmp_path, "north").living()
        assert f"north: process {card.pid} since" in stdout
        assert "spare" in stdout
        owner.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(card.pid).wait(5)
    assert WorkerRegistry(tmp_path, "north").living() == []


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["start", "--ca", "/nowhere/ca.crt", "--key", "k"], "--ca: expected a file, found none at /nowhere/ca.crt"),
        (["start", "--ca", __file__, "--key", "/nowhere/key"], "--key: expected a file, found none at /nowhere/key"),
        (
            ["start", "--ca", __file__, "--key", __file__, "--policy", "/nowhere/p"],
            "--policy: expected a file, found none",
        ),
        (
            ["start", "--ca", __file__, "--key", __file__, "--data", "/nowhere/d"],
            "--data: expected a file or folder .* /nowhere/d",
        ),
        (
            ["start", "--ca", __file__, "--key", __file__, "--signing-key", "/nowhere/signing.key"],
            "--signing-key: expected a file, found none at /nowhere/signing.key",
        ),
        (
            ["start", "--ca", __file__, "--key", __file__, "--signing-key", __file__],
            "signing-key: .* must be readable only by its owner, but has mode",
        ),
        (["start", "--ca", __file__, "--key", __file__, "--device", "tpu"], "node config: device: .* found 'tpu'"),
        (["start", "--ca", __file__, "--key", __file__, "--worker-memory-mb", "-1"], "worker-memory-mb: .* found -1"),
        (["start", "--ca", __file__, "--key", __file__], "--policy: expected a policy file or .*, found neither; "),
        (
            ["start", "--ca", __file__, "--key", __file__, "--policy", __file__, "--permit-everything"],
            "--policy: expected a policy file or .*, found both; ",
        ),
        (["warm", "--owner", "999999999"], "owner: expected a running process, found none with PID 999999999"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, reason, tmp_path, capsys):
    action, *rest = arguments
    rest += ["--superlink", "127.0.0.1:1"] if action == "start" else []
    assert main(["site", action, "--name", "north", "--state-dir", str(tmp_path), *rest]) == 2
    error = capsys.readouterr().err
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(error)
    assert error.count("\n") == 1


@pytest.mark.long
def test_a_sites_commands_start_without_torch():
    """`fedveil site start`, `warm` and `status` run on small machines, and torch takes five seconds to import."""
    code = "import sys, fedveil.console.commands.site.site; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
