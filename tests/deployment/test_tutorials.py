"""What the tutorials tell a reader to type works, from an empty folder, in the order of the page."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def commands(page: Path) -> str:
    """The page's blocks of shell commands, behind one another."""
    return "".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def printed(script: str, folder: Path, seconds: float = 900.0) -> str:
    """What a shell prints that runs a script in a folder, with this installation's commands; each has to end with 0.

    Nothing of it is left when time is over: every command is asked to end, as by a Ctrl-C, and then ended.
    """
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        ["bash", "-euxo", "pipefail", "-c", script], cwd=folder, env=env, start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as shell:  # fmt: skip
        late = out = err = ""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                os.killpg(shell.pid, number)
            try:
                out, err = shell.communicate(timeout=seconds if number is None else 30.0)
                break
            except subprocess.TimeoutExpired:
                late = f"not done within {seconds:.0f} s; "
    assert shell.returncode == 0, f"{late}{out[-3000:]}\n{err[-3000:]}"
    return out


@pytest.mark.long
def test_commands_that_do_not_end_are_ended_and_shown(tmp_path):
    script = "sleep 987 & echo $! >pid; echo began; sleep 986"
    with pytest.raises(AssertionError, match=r"^not done within 2 s; began\n"):
        printed(script, tmp_path, 2.0)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(20)  # raises where it lives on


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_works(page, tmp_path):
    printed(commands(page), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_has_commands_and_stands_in_the_contents(page):
    assert "fedveil " in commands(page)
    assert f"tutorials/{page.stem}" in (ROOT / "docs" / "index.md").read_text()
