"""What an addition costs: a method, a task and a command in a copy of this repository turn no other test red.

Each is one file, as docs/extend has it. Their own tests stand on the pages; here those are run that go over everything:
the contract suite, pages and their tables, the command line, and what the bundle and the project file list.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

COMMAND = '''"""`fedveil count`: prints how many methods there are."""

from __future__ import annotations

import argparse

from fedveil import strategies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the number."""
    print(len(strategies.list_methods()))
    return 0
'''
GO_OVER_EVERYTHING = (
    "tests/contract", "tests/strategies/test_partial_uploads.py", "tests/test_rules.py",
    "tests/test_project_files.py", "tests/test_architecture_page.py", "tests/test_commands_shown.py",
    "tests/test_claims_in_texts.py", "tests/fedveil/console/commands/test_methods.py",
    "tests/fedveil/console/commands/test_completion.py", "tests/fedveil/console/commands/test_explain.py",
    "tests/fedveil/test_plugins.py", "tests/tools",
)  # fmt: skip
LEFT_OUT = re.compile(r"(runs|build|dist|\.git|\.venv.*|\..*_cache|\.whl)$")


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """A copy of this repository with three files more."""
    root = tmp_path_factory.mktemp("copy") / "fedveil"

    def ignored(folder: str, names: list[str]) -> set[str]:
        at_top = Path(folder) == ROOT
        return {n for n in names if n == "__pycache__" or (at_top and LEFT_OUT.match(n))}

    shutil.copytree(ROOT, root, symlinks=True, ignore=ignored)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)  # some tests ask it for the files
    for page, file in (("method", "strategies/damped.py"), ("task", "fedveil/tasks/vital_signs.py")):
        text = (root / "docs" / "extend" / f"{page}.md").read_text()
        match = re.search(rf"^```python\n# {Path(file).name}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (root / file).write_text(match[1])
    (root / "fedveil" / "console" / "commands" / "getting_started" / "count.py").write_text(COMMAND)
    return root


def in_copy(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(root), "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=root, env=env, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_tests_that_go_over_everything_stay_green_and_have_the_new_ones(copied):
    done = in_copy(copied, "pytest", "-p", "no:cacheprovider", "-v", "-m", "not slow and not long", *GO_OVER_EVERYTHING)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "[damped] PASSED" in done.stdout


@pytest.mark.long
def test_the_command_line_has_all_three(copied):
    ours = in_copy(copied, "fedveil.console.main", "count")
    assert ours.returncode == 0, ours.stderr
    methods = in_copy(copied, "fedveil.console.main", "methods", "damped")
    assert "Damped averaging" in methods.stdout
    refused = in_copy(copied, "fedveil.console.main", "explain", "--set", "task.name=vital-sign")
    assert "vital-signs" in refused.stdout + refused.stderr
