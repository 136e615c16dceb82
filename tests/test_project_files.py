"""What stands in two places of the project's own files is equal, and what should be pinned is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_pre_commit_has_the_ruff_of_the_constraints():
    pinned = re.findall(r"^(ruff==.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"ruff==[^\],]+", (ROOT / ".pre-commit-config.yaml").read_text())) == set(pinned)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_their_version_beside(path):
    uses = re.findall(r"uses: (.+)", path.read_text())
    assert uses
    assert [u for u in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", u)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = set(re.findall(r"run: make ([a-z-]+)", path.read_text()))
    assert run
    assert run <= targets


def test_ruff_reads_every_room():
    """A name in its list of exclusions leaves out each folder of that name, as `runs` did with console/runs."""
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    seen = set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())
    rooms = ("attacks", "benchmarks", "client_app", "fedveil", "server_app", "strategies", "tests")
    files = [str(file) for room in (*rooms, "tools") for file in (ROOT / room).rglob("*.py")]
    assert files
    assert [file for file in files if file not in seen] == []


def test_the_index_of_decisions_names_every_page():
    folder = ROOT / "docs" / "decisions"
    pages = {p.name for p in folder.glob("0*.md")}
    assert pages
    assert set(re.findall(r"\((0[^)]+\.md)\)", (folder / "README.md").read_text())) == pages


def test_every_path_of_the_guard_in_a_decision_is_there():
    guard_paths = {
        (page.relative_to(ROOT).as_posix(), path)
        for page in (ROOT / "docs" / "decisions").rglob("*.md")
        for path in re.findall(r"(?<![\w/])fedveil/guard/[\w./]*\w", page.read_text())
    }
    assert len(guard_paths) >= 8
    assert {(page, path) for page, path in guard_paths if not (ROOT / path).exists()} == set()


def test_a_release_has_each_heading_once_and_says_nothing_twice():
    """Two branches that both add to it can be joined so that both sides of what was moved stay."""
    for release in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        for items in (
            re.findall(r"^### .+$", release, re.MULTILINE),
            re.findall(r"^- (?:.+\n)+?(?=^- |^\n|\Z)", release, re.MULTILINE),
        ):
            assert [one for one in set(items) if items.count(one) > 1] == []


def test_the_index_of_the_documentation_says_nothing_twice():
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    assert [row for row in set(rows) if rows.count(row) > 1] == []


def test_the_contents_of_the_documentation_name_each_page_once():
    """Sphinx refuses the site otherwise, minutes later."""
    contents = re.findall(r"^[a-z][\w/-]*$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert "extend/command" in contents
    assert [page for page in set(contents) if contents.count(page) > 1] == []


def test_make_newest_installs_no_version_that_the_lock_or_its_caller_names(tmp_path):
    log, venv = tmp_path / "log", tmp_path / "venv"
    words = f'echo "$(basename $0) [${{PIP_CONSTRAINT:-free}}] $*" >> {log}\n'
    python, inner, demo = (tmp_path / name for name in ("python3.12", "inner", "fedveil"))
    for file, more in (
        (python, f"mkdir -p {venv}/bin; cp {inner} {venv}/bin/python; cp {demo} {venv}/bin\n"),
        (inner, ""),
        (demo, ""),
    ):
        file.write_text("#!/bin/sh\n" + words + more)
        file.chmod(0o700)
    (tmp_path / "old.txt").write_text("numpy==1.0\n")
    environment = {**os.environ, "PIP_CONSTRAINT": str(tmp_path / "old.txt"), "MAKEFLAGS": ""}
    command = ["make", "newest", f"NEWEST_PYTHON={python}", f"NEWEST_VENV={venv}", "TORCH_INDEX=https://index.example"]
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    lines = log.read_text().splitlines()
    installs = [line for line in lines if " install " in line]
    assert [line for line in installs if " [free] " not in line or "lock/" in line or "constraints" in line] == []
    assert [line.split()[-1] for line in installs] == ["setuptools", "torch", ".[test]"]
    tests_and_demo = [line for line in lines if " pytest " in line or line.startswith("fedveil ")]
    assert [line.split()[0] for line in tests_and_demo] == ["python", "fedveil"]


LOCK = {file.stem: file.read_text() for file in sorted((ROOT / "lock").glob("*.txt"))}
COMMANDS = [
    *(ROOT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md", ".ci/run", "docker/Dockerfile")),
    *WORKFLOWS, *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> set[tuple[str, str]]:
    """(package, version) of every line with ==; torch's build for the CPU counts as torch's own version."""
    matches = re.findall(r"^([\w.-]+)==([^\s;+]+)", text, re.MULTILINE)
    return {(canonical(name), version) for name, version in matches}


def test_the_lock_has_the_versions_of_the_constraints():
    """make lock after each change of constraints.txt."""
    locked = set().union(*(pins(text) for name, text in LOCK.items() if not name.startswith("flower-")))
    assert locked == pins((ROOT / "constraints.txt").read_text())


def test_the_lock_of_another_flower_has_the_versions_of_its_constraints_and_no_others():
    stems = {path.stem for path in ROOT.glob("constraints-flower-*.txt")}
    assert stems == {f"constraints-{name}" for name in LOCK if name.startswith("flower-")} != set()
    for name in stems:
        own = pins((ROOT / f"{name}.txt").read_text())
        assert own == pins(LOCK[name.removeprefix("constraints-")])
        assert not own & pins((ROOT / "constraints.txt").read_text())
        assert [f"flower-{version.rpartition('.')[0]}" for package, version in own if package == "flwr"] == [
            name.removeprefix("constraints-")
        ]


@pytest.mark.parametrize("name", LOCK)
def test_every_package_of_the_lock_has_a_hash(name):
    blocks = re.findall(r"^[\w.-]+==[^\\\n]*(?:\\\n[^\\\n]*)*", LOCK[name], re.MULTILINE)
    assert len(blocks) == len(pins(LOCK[name]))
    assert [block for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", block)] == []


def test_the_lock_has_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {stem: {name for name, _ in pins(text)} for stem, text in LOCK.items()}

    def asked(lines: list[str]) -> set[str]:
        return {canonical(re.split(r"[<>=!~ ;\[]", line)[0]) for line in lines}

    assert asked(project["dependencies"]) - names["run"] == {"torch"}
    assert pins(LOCK["cpu"]) == {pin for pin in pins(LOCK["cuda"]) if pin[0] == "torch"}
    for extra, lines in project["optional-dependencies"].items():
        assert asked(lines) <= names[extra] | names["run"], extra
    parts = {"tools", "cpu", "cuda", "run", "sbom", "docs", "check", *project["optional-dependencies"]}
    assert {name for name in LOCK if not name.startswith("flower-")} == parts


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_installed_without_a_hash(path):
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    if path.name == "Makefile":  # its one target that asks an index which versions there are, for a check of its own
        text, newest_recipes = re.subn(r"^newest: ##.*\n(?:\t.*\n)+", "", text, flags=re.MULTILINE)
        assert newest_recipes == 1
    commands = [line for line in text.splitlines() if re.search(r"\bpip\b[^|]*\b(install|wheel|download)\b", line)]
    assert [c for c in commands if not re.search(r"--require-hashes|\bLOCKED\b|--no-index", c)] == []
    assert not re.search(r"extra.index", text, re.IGNORECASE)  # a second index may hold a public name


def test_both_stages_of_the_image_are_of_the_base_that_the_builder_names():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}", "packages"}
    assert re.findall(r"^ARG BASE=(.+)", text, re.MULTILINE) == ["python:3.11-slim-bookworm"]


@pytest.mark.long
def test_a_tree_without_its_links_builds_no_distribution(tmp_path):
    """Its wheel would lack the methods and both apps; pip unpacks a zip archive so."""
    links = sorted(path.name for path in (ROOT / "fedveil").iterdir() if path.is_symlink())
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name in links:
        (tmp_path / "fedveil" / name).mkdir(parents=True)
    command = [sys.executable, "setup.py", "--name"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    for name in links:
        (tmp_path / "fedveil" / name).rmdir()
        (tmp_path / "fedveil" / name).write_text(f"../{name}")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"fedveil/{name}: expected a folder or a link to one" in done.stderr
        (tmp_path / "fedveil" / name).unlink()
        (tmp_path / "fedveil" / name).mkdir()
