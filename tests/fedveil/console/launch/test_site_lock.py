"""A site runs once from a folder: a second start, and what a killed one has left, are named before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from fedveil.console.flower.processes import ProcessGroup, find_marked_processes
from fedveil.console.launch import site_lock
from fedveil.errors import ConfigError

HOLD = """
import os, sys, time
from pathlib import Path
from fedveil.console.flower.processes import ProcessGroup
from fedveil.console.launch import site_lock
state = Path(sys.argv[1])
processes = ProcessGroup(state)
with site_lock.hold_site_lock(state, "north", processes):
    processes.start("north", [sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    print(processes.pid("north"), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def first(tmp_path):
    """A start of site north in another process, and the number of what it started."""
    state = tmp_path / "state"
    state.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(state)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        while not psutil.Process(child).environ():  # the kernel has not copied it yet
            time.sleep(0.01)
        yield state, holder, child
        holder.kill()
        with suppress(psutil.Error):
            psutil.Process(child).kill()


def test_a_second_start_and_the_orphans_of_a_killed_one_are_named(first):
    state, holder, child = first
    with (
        pytest.raises(
            ConfigError, match=rf"already running from .*: fedveil site start is process {holder.pid}, .*kill "
        ),
        site_lock.hold_site_lock(state, "north", ProcessGroup(state)),
    ):
        pass
    with site_lock.hold_site_lock(state, "south", ProcessGroup(state)):  # a state folder may be of several sites
        pass
    holder.kill()
    holder.wait()
    for _ in range(2):
        with (
            pytest.raises(ConfigError, match=rf"found {child}, .*stop them first: kill {child}$"),
            site_lock.hold_site_lock(state, "north", ProcessGroup(state)),
        ):
            pass
    os.kill(child, 15)
    deadline = time.monotonic() + 20
    while find_marked_processes(json.loads((state / "north.running").read_text())["token"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes = ProcessGroup(state)
    with site_lock.hold_site_lock(state, "north", processes):
        assert json.loads((state / "north.running").read_text()) == {"pid": os.getpid(), "token": processes.token}


@pytest.mark.parametrize("text", ["", "{half", "[1]", "[" * 4000, '{"pid": 1, "token": ""}'])
def test_what_the_file_says_is_not_trusted(tmp_path, text):
    (tmp_path / "north.running").write_text(text)
    with site_lock.hold_site_lock(tmp_path, "north", ProcessGroup(tmp_path)):
        assert json.loads((tmp_path / "north.running").read_text())["pid"] == os.getpid()


def test_what_a_permitted_program_wrote_there_is_no_command_to_type(tmp_path):
    with site_lock.hold_site_lock(tmp_path, "north", ProcessGroup(tmp_path)):
        (tmp_path / "north.running").write_text('{"pid": "1; rm -r ~", "token": ""}')
        with (
            pytest.raises(ConfigError, match=r"\(kill \?\)"),
            site_lock.hold_site_lock(tmp_path, "north", ProcessGroup(tmp_path)),
        ):
            pass
