"""The wheel of fedveil-bench contains presets and jobs, and a preset runs from any folder."""

from __future__ import annotations

import json
import subprocess
import zipfile

import pytest

from fedveil import paths
from tests.conftest import ROOT
from tests.deployment.test_wheel import Installed, built, installed, pip

__all__ = ["installed"]  # a fixture


@pytest.fixture(scope="module")
def benchmarks(installed: Installed, tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("bench")
    copy = paths.copy_checkout(folder / "source", ROOT / "benchmarks")
    (copy / "LICENSE").unlink()
    (copy / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    wheel = built(copy, folder / "dist")
    pip("--python", str(installed.bin / "python"), "install", "--no-index", "--no-deps", str(wheel))
    return Installed(wheel, installed.bin, installed.empty)


@pytest.mark.slow
def test_it_has_every_module_and_preset_that_git_has_and_no_result(benchmarks):
    command = ["git", "ls-files", "benchmarks/fedveil_bench/*.py", "benchmarks/presets", "benchmarks/*/stock_*"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    inside = {file.removeprefix("benchmarks/").replace("presets/", "fedveil_bench/presets/", 1) for file in files}
    names = set(zipfile.ZipFile(benchmarks.wheel).namelist())
    assert inside - {"fedveil_bench/presets"} - names == set()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"fedveil_bench"}
    assert not [name for name in names if "results/" in name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_a_preset_from_an_empty_folder(benchmarks):
    assert "core/aggregate" in benchmarks("fedveil", "bench", "--list").split()
    benchmarks("fedveil", "bench", "core/aggregate", "--quick", timeout=300)
    result = json.loads((benchmarks.empty / "results" / "core_aggregate.json").read_text())
    assert result["preset"] == "core/aggregate"
    assert "docs/results.md has the figures" in " ".join(benchmarks("fedveil", "methods", "--table").split())
