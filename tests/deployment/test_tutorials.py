"""What the tutorials tell a reader to type works, from an empty folder, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def commands(page: Path) -> str:
    """The page's blocks of shell commands, behind one another."""
    return "".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def printed(script: str, folder: Path) -> str:
    """What a shell prints that runs a script in a folder, with this installation's commands; each has to end with 0."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_works(page, tmp_path):
    printed(commands(page), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_has_commands_and_stands_in_the_contents(page):
    assert "fedveil " in commands(page)
    assert f"tutorials/{page.stem}" in (ROOT / "docs" / "index.md").read_text()
