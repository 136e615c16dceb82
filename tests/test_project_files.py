"""What stands in two places of the project's own files is equal, and what should be pinned is."""

from __future__ import annotations

import re

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


def test_the_index_of_decisions_names_every_page():
    folder = ROOT / "docs" / "decisions"
    pages = {p.name for p in folder.glob("0*.md")}
    assert pages
    assert set(re.findall(r"\((0[^)]+\.md)\)", (folder / "README.md").read_text())) == pages
