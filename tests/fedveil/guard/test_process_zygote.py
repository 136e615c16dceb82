"""The process that client processes are forked from, in a Python of its own: pytest has threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types

import pytest

from fedveil.console.flower.site_process import write_guard
from fedveil.guard import process_zygote
from fedveil.guard.poll_backoff import PollBackoff
from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux does")

HEAD = """
import ctypes, json, os, random, signal, socket, sys, time
sys.path.append({root!r})
from fedveil.guard import process_zygote

def say(what):
    os.write(1, (json.dumps(what) + "\\n").encode())  # in one piece: several processes say something

def late():
    # What Flower's client and the bundle have to import in a copy that the resident might have.
    before = set(sys.modules)
    import grpc, httpx, xxhash
    httpx.Client().close()
    grpc.insecure_channel("localhost:1").close()
    return sorted(name for name in set(sys.modules) - before if not name.startswith("encodings."))

def traceable():
    return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)

def load(*arguments):
    global before
    loads(*arguments)
    before = traceable()

loads, process_zygote._load = process_zygote._load, load
here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if (pid := os.fork()) == 0:
    here.close()
    process_zygote._reside(there, guarded={guarded}, require_policy=True)
    runtime = sys.modules["flwr.supernode.runtime.run_clientapp"]
    names = [open(f"/proc/{{number}}/comm").read().strip() for number in (os.getpid(), os.getppid())]
    say({{
        "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "names": names,
        "random": [random.random(), float(sys.modules["numpy"].random.random())],
        "socket": there.fileno(), "traceable": [traceable(), before],
        "hooked": type(getattr(runtime.pull_task_input, "__self__", None)).__name__,
        "loaded": [name for name in ("torch", "transformers") if name in sys.modules],
        "late": late(),
    }})
    os._exit(0)
there.close()
one = process_zygote.ProcessZygote(here, pid)
"""


def ran(code: str, guarded: bool = True) -> list[dict]:
    """What the copies print, a line each; `code` has `one`, the resident."""
    text = HEAD.format(root=str(ROOT), guarded=guarded) + code
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def copies():
    code = "say([one.start(['--token', 'a']), one.start(['--token', 'b']), pid])\ntime.sleep(2)"
    lines = ran(code)
    child_records = sorted((line for line in lines if isinstance(line, dict)), key=lambda line: str(line["argv"]))
    return next(line for line in lines if isinstance(line, list)), child_records


@pytest.mark.long
def test_each_message_has_a_copy_of_its_own_with_its_arguments(copies):
    (*started, pid), (one, other) = copies
    assert sorted(started) == sorted(line["pid"] for line in (one, other))
    assert [line["argv"] for line in (one, other)] == [["flwr-clientapp", "--token", x] for x in "ab"]
    assert one["pid"] != other["pid"]
    assert {one["parent"], other["parent"]} == {pid}
    assert one["names"] == ["flwr-clientapp", "flwr-clientapps"]


@pytest.mark.long
def test_a_copy_has_the_guard_and_no_torch(copies):
    assert [line["hooked"] for line in copies[1]] == ["MessageGuard", "MessageGuard"]
    assert copies[1][0]["loaded"] == []
    unguarded = [line for line in ran("one.start([])\ntime.sleep(1)", guarded=False) if isinstance(line, dict)]
    assert (unguarded[0]["hooked"], unguarded[0]["late"]) == ("NoneType", [])


@pytest.mark.long
def test_a_copy_need_not_import_what_every_message_needs(copies):
    """Forty modules of Flower's HTTP client were imported anew for each."""
    assert copies[1][0]["late"] == []


@pytest.mark.long
def test_two_copies_draw_other_numbers(copies):
    one, other = (line["random"] for line in copies[1])
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_a_copy_reaches_neither_the_residents_socket_nor_its_memory(copies):
    for line in copies[1]:
        assert line["socket"] == -1
        assert line["traceable"] == [1, 0]


@pytest.mark.long
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_resident_that_is_gone_or_hangs_is_ended_and_asked_no_more(number):
    code = f"""
say(one.start([]) > 1)
here.settimeout(0.5)
os.kill(pid, signal.{number})
say([one.start([]), one.lost, one.start([])])
try:
    os.kill(pid, 0)
    say("alive")
except ProcessLookupError:
    say("gone")
"""
    lines = [line for line in ran(code) if not isinstance(line, dict)]
    assert lines == [True, [0, True, 0], "gone"]


@pytest.mark.long
def test_the_resident_ends_with_its_socket():
    code = "one.start([])\nhere.close()\nsay(os.waitpid(pid, 0)[1])"
    assert [line for line in ran(code) if not isinstance(line, dict)] == [0]


def test_client_processes_alone_are_forked_and_no_other_program_is_started(monkeypatch):
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    asked, started, goes_on = [], [], [True]
    one = types.SimpleNamespace(start=lambda arguments: (asked.append(arguments), goes_on[0])[1])
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess)  # put back afterwards
    monkeypatch.setattr(
        process_zygote.subprocess, "Popen", lambda arguments, **options: started.append((arguments, options))
    )
    monkeypatch.setattr(process_zygote.task_claims, "TaskClaim", lambda send: types.SimpleNamespace())
    pace = PollBackoff({1.0: 0.1}, sleep=lambda seconds: None)
    for _ in range(100):
        pace.sleep(1.0)
    process_zygote._launch_from(one, pace)

    def launch(kind: TaskType, suppress: bool) -> None:
        spec = ExecutionSpec(
            task_type=kind, runtime_api_address="127.0.0.1:1", token="secret", insecure=True,
            root_certificates_path=None, runtime_dependency_install=False, parent_pid=os.getpid(),
            suppress_output=suppress, task_id=1, fab_hash=None,
        )  # fmt: skip
        subprocess_executor.SubprocessExecutor().launch(spec)

    launch(TaskType.CLIENT_APP, suppress=False)
    assert asked[0][1:] == ["127.0.0.1:1", "--token", "secret", "--insecure", "--parent-pid", str(os.getpid())]
    assert pace._waited == 0.0
    for kind in set(TaskType) - {TaskType.CLIENT_APP}:
        launch(kind, suppress=False)
        launch(kind, suppress=True)
    assert started == []
    launch(TaskType.CLIENT_APP, suppress=True)
    goes_on[0] = False
    launch(TaskType.CLIENT_APP, suppress=False)
    assert len(asked) == 2
    assert [arguments[0] for arguments, _ in started] == ["flwr-clientapp", "flwr-clientapp"]
    assert started[0][1] == {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    process_zygote._launch_from(one, pace, TaskType.SERVER_APP)  # of an image, at a server
    for kind in TaskType:
        launch(kind, suppress=False)
    assert [arguments[0] for arguments, _ in started[2:]] == ["flwr-serverapp"]
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("options", "environment", "permitted"),
    [
        ({}, {}, "flwr-clientapp"),
        ({}, {"FEDVEIL_BUNDLES": "x"}, "flwr-clientapp"),
        ({"guarded": False}, {}, "flwr-clientapp"),
        ({"is_image": True}, {}, "flwr-clientapp"),
        ({"is_image": True}, {"FEDVEIL_BUNDLES": "x"}, "flwr-serverapp"),
    ],
)
def test_the_program_restricts_both_what_is_asked_for_and_what_is_started(monkeypatch, options, environment, permitted):
    monkeypatch.delenv("FEDVEIL_INSTRUCTION_KEY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    called = []
    monkeypatch.setattr(process_zygote.os, "fork", lambda: 1)
    monkeypatch.setattr(process_zygote.superexec, "patch_superexec", called.append)
    monkeypatch.setattr(process_zygote, "_launch_from", lambda one, waits, task_type: called.append(task_type))
    monkeypatch.setattr(process_zygote.poll_backoff, "patch_superexec_polling", lambda: None)
    monkeypatch.setattr("flwr.supercore.cli.flower_superexec", lambda: called.append("started"))
    process_zygote.main(**options)
    assert called == [permitted, permitted, "started"]


@pytest.mark.long
def test_the_program_takes_flowers_arguments_and_ends_with_its_resident(tmp_path):
    write_guard(tmp_path)
    done = subprocess.run([tmp_path / "flower-superexec", "--help"], capture_output=True, text=True, timeout=60)
    assert "--superexec-auth-secret-file" in done.stdout
    for _ in range(50):
        left = [p for p in os.listdir("/proc") if p.isdigit() and str(tmp_path) in _line(p)]
        if not left:
            break
        signal.sigtimedwait([], 0.1)
    assert not left


def _line(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""
