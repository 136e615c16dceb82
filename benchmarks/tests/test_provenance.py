"""The commit that a result names, and results that `fedveil bench` refuses to write."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedveil.console.main import main
from fedveil.errors import ConfigError
from fedveil_bench import command, folders, provenance, requirements, runner


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, check=True)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout of main with one file of code and one result."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "a.json").write_text("{}")
    (tmp_path / "code.py").write_text("")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(folders, "checkout_folder", lambda: tmp_path)
    return tmp_path


def result(root: Path, name: str = "a.json") -> Path:
    return root / "benchmarks" / "results" / name


def test_a_clean_commit_of_main_may_be_measured_and_results_are_no_changes(root):
    provenance.require_provenance(result(root))
    result(root).write_text("changed by the run before")
    result(root, "b.pieces.jsonl").write_text("new")
    provenance.require_provenance(result(root))
    assert len(provenance.measured_commit()) == 12


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_changed_or_new_code_is_refused(root, name):
    (root / name).write_text("X = 1")
    with pytest.raises(ConfigError, match=f"found 1 changed files, such as {name}"):
        provenance.require_provenance(result(root))
    assert provenance.measured_commit().endswith("+")


def test_a_commit_beside_main_is_refused_until_it_is_merged(root):
    git(root, "checkout", "--quiet", "-b", "trial")
    provenance.require_provenance(result(root))  # as far as main
    (root / "code.py").write_text("X = 1")
    git(root, "commit", "--quiet", "--all", "--message", "second")
    with pytest.raises(ConfigError, match="in the history of main"):
        provenance.require_provenance(result(root))
    git(root, "branch", "--force", "main", "trial")
    provenance.require_provenance(result(root))


@pytest.mark.parametrize("name", ["benchmarks/results/quick/a.json", "benchmarks/results/gpu/a.json", "mine.json"])
def test_trials_and_files_elsewhere_may_have_any_code(root, name):
    (root / "code.py").write_text("X = 1")
    assert provenance.find_changes(root) == ["code.py"]
    provenance.require_provenance(root / name)  # raises for a result
    with pytest.raises(ConfigError, match="found 1 changed files"):
        provenance.require_provenance(result(root))


def test_without_git_no_commit_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "checkout_folder", lambda: tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.measured_commit() == ""
    with pytest.raises(ConfigError, match="expected a git checkout"):
        provenance.require_provenance(result(tmp_path))


@pytest.fixture
def quick_run(root, monkeypatch):
    """A preset that runs at once, into the checkout's results."""
    monkeypatch.setattr(command, "_results", lambda: root / "benchmarks" / "results")
    monkeypatch.setattr(requirements, "require_ready", lambda name, options: None)
    measured = []

    def run_benchmark(*_):
        measured.append(1)
        return runner.BenchOutcome([{"name": "x"}])

    monkeypatch.setattr(runner, "load_runner", lambda preset: SimpleNamespace(run_benchmark=run_benchmark))
    return measured


def test_the_command_refuses_before_it_measures(root, quick_run, capsys):
    assert main(["bench", "fedrand/quantised"]) == 0
    (root / "code.py").write_text("X = 1")
    assert main(["bench", "fedrand/quantised"]) == 2
    assert "commit them, or write elsewhere with --out" in capsys.readouterr().err
    assert len(quick_run) == 1
    assert main(["bench", "fedrand/quantised", "--out", str(root.parent / "mine.json")]) == 0


def test_code_that_changes_during_a_run_is_of_no_commit(root, monkeypatch):
    def run_benchmark(*_):
        (root / "code.py").write_text("X = 1")
        return runner.BenchOutcome([{"name": "x"}])

    monkeypatch.setattr(runner, "load_runner", lambda preset: SimpleNamespace(run_benchmark=run_benchmark))
    found, _ = runner.run_preset("fedrand/quantised", runner.BenchOptions())
    assert found["commit"].endswith("+")


def test_a_clone_without_main_is_told_so(root):
    git(root, "branch", "--move", "release")
    with pytest.raises(ConfigError, match="expected a clone with main, found none; write elsewhere with --out"):
        provenance.require_provenance(result(root))
    provenance.require_provenance(root / "elsewhere.json")


def test_without_a_git_program_no_commit_is_named(root, monkeypatch):
    monkeypatch.setenv("PATH", str(root))
    assert provenance.measured_commit() == ""
