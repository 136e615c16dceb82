"""The kind of a process, and the resources that it uses."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from fedveil_bench.process_monitor.usage import HeldResources, ProcessUsage, classify_program


@pytest.mark.parametrize(
    "command,kind",
    [
        (["python", "/x/bin/flwr-serverapp", "--token", "a"], "ServerApp"),
        (["python", "-P", "-m", "fedveil.client_app.worker.worker_main", "--folder", "/x"], "worker"),
        (["python", "-I", "/x/flower-superlink", "--database"], "SuperLink"),
        (["sh", "-c", "true"], "other"),
    ],
)
def test_a_process_is_known_by_its_command(command, kind):
    assert classify_program(command) == kind


def test_cpu_seconds_are_those_since_the_block_began_by_kind():
    code = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\ninput()"
    children = [subprocess.Popen([sys.executable, "-c", code.format(s)], stdin=subprocess.PIPE) for s in (0.6, 0.1)]
    named = {child.pid: kind for child, kind in zip(children, ("long", "short"), strict=True)}
    found = [psutil.Process(pid) for pid in named]
    try:
        with ProcessUsage(
            lambda: found, lambda command: "long" if "0.6" in " ".join(command) else "short", 0.05
        ) as usage:
            deadline = time.monotonic() + 30
            while usage.cpu_seconds() < 0.6 and time.monotonic() < deadline:
                time.sleep(0.05)
        by_kind = usage.cpu_by_kind()
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert by_kind["long"] > by_kind["short"] >= 0
    assert usage.cpu_seconds() == pytest.approx(sum(by_kind.values()))


def test_open_files_and_threads_are_counted(tmp_path):
    before = HeldResources.of(psutil.Process())
    files = [(tmp_path / str(i)).open("w") for i in range(5)]
    after = HeldResources.of(psutil.Process())
    for file in files:
        file.close()
    assert after.files - before.files == 5
    assert 0 < after.pss_mb <= after.rss_mb
    assert after.threads >= 1


def test_shared_memory_is_divided_among_those_who_share_it():
    """Many processes of one program: their RSS adds up to more than their PSS."""
    code = "import time, json, urllib.request; time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    try:
        time.sleep(1.0)
        found = {}
        for shared in (False, True):
            with ProcessUsage(
                lambda: [psutil.Process(c.pid) for c in children], lambda c: "all", 0.05, shared
            ) as usage:
                time.sleep(0.3)
            found[shared] = max(mb["all"] for _, mb in usage.timeline)
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert 0 < found[True] < found[False]
