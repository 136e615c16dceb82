"""The commits that results name: none is dirty or unknown, and their distance to the present is counted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools import result_provenance
from tools.pages import results as pages

RESULTS = ROOT / "benchmarks" / "results"


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, **files: str) -> str:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a change")
    return git(root, "rev-parse", "--short=12", "HEAD")


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "--quiet")
    files = {
        "fedveil/__init__.py": "",
        "fedveil/used.py": "def load():\n    from . import inner\n",
        "fedveil/inner.py": "",
        "fedveil/other.py": "",
        "benchmarks/fedveil_bench/__init__.py": "",
        "benchmarks/fedveil_bench/runs.py": "from fedveil.used import load\n",
        "benchmarks/presets/a/b.toml": 'runner = "runs"\n',
        "benchmarks/presets/a/c.toml": 'like = "a/b"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def write_result(root: Path, name: str, commit_: str) -> None:
    (root / "benchmarks" / "results").mkdir(exist_ok=True)
    (root / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps({"preset": "a/c", "commit": commit_}))


def test_commits_that_touch_what_the_runner_imports_lie_between(repository):
    first = commit(repository)
    files = result_provenance.list_measured(repository, "a/c")
    assert {"fedveil/inner.py", "fedveil/used.py", "benchmarks/presets/a/b.toml", "strategies"} <= set(files)
    assert "fedveil/other.py" not in files
    commit(repository, fedveil__other="1")  # a file of no importance
    commit(repository, **{"fedveil__inner.py": "X = 1"})
    last = commit(repository, **{"strategies__new.py": ""})
    write_result(repository, "old", first)
    write_result(repository, "changed", f"{first}+")
    write_result(repository, "new", last)
    write_result(repository, "gone", "0123456789ab+")
    found = {each.name: each for each in result_provenance.read_provenance(repository)}
    assert {name: each.behind for name, each in found.items()} == {"old": 2, "changed": 2, "new": 0, "gone": None}
    assert {name: each.state for name, each in found.items()} == {
        "old": "clean", "changed": "dirty", "new": "clean", "gone": "dirty and unknown",
    }  # fmt: skip


def test_no_result_is_added_that_measured_changes_without_a_commit():
    dirty = {name for name, result in pages.read_results().items() if result["commit"].endswith("+")}
    assert dirty == result_provenance.DIRTY


def test_no_result_is_added_of_a_commit_that_the_history_lacks():
    if result_provenance.run_git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs a clone with its whole history")
    found = result_provenance.read_provenance(ROOT, with_distance=False)
    assert {each.name for each in found if not each.is_known} == result_provenance.UNKNOWN


def test_the_index_says_whose_code_cannot_be_checked_out():
    read = pages.read_results()
    index = pages.render_index(read)
    count = len(result_provenance.DIRTY)
    assert f"Of {len(read)} results, {count} were measured with changes" in index
    rows = {line.split("](")[1].split(".md")[0]: line for line in index.splitlines() if line.startswith("| [")}
    assert "| changed, not in history |" in rows["core_faults"]
    assert "| not in history |" in rows["core_memory"]
    assert sum("| clean |" in row for row in rows.values()) == len(read) - len(
        result_provenance.DIRTY | result_provenance.UNKNOWN
    )
