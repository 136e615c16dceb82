"""`fedveil bench`, called by its entry point and as `python -m fedveil_bench`."""

from __future__ import annotations

import os
import subprocess
import sys

from fedveil.console import main
from tests.conftest import ROOT


def test_the_list_names_presets_and_wrong_arguments_are_errors(capsys):
    assert main.main(["bench", "--list"]) == 0
    assert "core/aggregate" in capsys.readouterr().out
    assert main.main(["bench"]) == 2
    for wrong in ("-1", "nan"):
        assert main.main(["bench", "random_binary/accuracy", "--minutes", wrong]) == 2
    assert "core/aggregate" in capsys.readouterr().err


def test_the_help_shows_the_command_among_those_to_try(capsys):
    shown = main.make_parser("").format_help()
    group = shown.partition("getting started:\n")[2].partition("\n\n")[0]
    assert "  bench      runs a benchmark and compares it with the numbers in its paper" in group.splitlines()


def test_by_pythonpath_alone_it_is_run_as_a_module():
    """As tools/gpu.py does on a machine where nothing is installed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    command = [sys.executable, "-m", "fedveil_bench"]
    done = subprocess.run([*command, "--list"], cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "core/aggregate" in done.stdout.split()
    done = subprocess.run([*command, "core/none"], cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: preset: expected one of ")
