"""docs/extend: what a page shows works as a package of somebody else's: its module, its test, its entry point."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from fedveil import rng
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import param_specs_of
from fedveil.ops.running_sums import RunningSums
from tests.conftest import ROOT

PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def install(page: Path, folder: Path) -> list[str]:
    """The page's files in a folder, and its entry points as pip would leave them; returns the names of the files."""
    names = []
    for text in blocks(page, "python"):
        names.append(re.match(r"# (\w+\.py)\n", text)[1])
        (folder / names[-1]).write_text(text)
    (project,) = blocks(page, "toml")
    points = tomllib.loads(project)["project"]["entry-points"]
    about = folder / "somebody-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    lines = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items())
    (about / "entry_points.txt").write_text("".join(lines))
    return names


def pytest_on(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_there_is_a_page_for_an_attack_a_command_a_method_and_a_task():
    assert [page.stem for page in PAGES] == ["attack", "command", "method", "task"]
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(f"extend/{page.stem}" in index for page in PAGES)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_the_page_shows_passes_its_own_test(page, tmp_path):
    module, test = install(page, tmp_path)
    done = pytest_on(tmp_path, "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(tmp_path / test))
    assert test == f"test_{module}"
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^[3-9] passed", done.stdout, re.MULTILINE)


def test_the_server_optimizer_of_the_page_is_momentum():
    """Two rounds by hand, with a mean of 1 in both: w is 0 + 1, then 1 + (0.5 * 1 + 0)."""
    (page,) = (page for page in PAGES if page.stem == "method")
    section = page.read_text().partition("\n## A server optimizer\n")[2].partition("\n## ")[0]
    members = "".join(re.findall(r"^(?:    .*)?\n", section, re.MULTILINE))
    code = f"{blocks(page, 'python')[0]}\nimport torch\n\n@dataclass(frozen=True)\nclass Momentum(Damped):\n{members}"
    names = {"__name__": "momentum"}
    exec(compile(code, "momentum.py", "exec", dont_inherit=True), names)
    method, context = names["Momentum"](beta=0.5), RoundContext(0, "north", True, bytes(32))
    start = {"w": torch.zeros(1)}
    spec = param_specs_of(start)
    state = method.init(spec, start, rng.initial_stream(0, "weights"))
    models = []
    for _ in range(2):
        assert list(method.broadcast(state, context).fields) == ["w"]
        sums = RunningSums()
        sums.add("north", 1, method.contributions(Payload({"w": torch.ones(1)}), 1, spec, context))
        state = method.server_update(state, sums, context)
        models.append(method.models(state)["server"]["w"].item())
    assert models == [1.0, 1.5]


@pytest.mark.slow
def test_the_pages_method_passes_the_contract_suite(tmp_path):
    (page,) = (page for page in PAGES if page.stem == "method")
    install(page, tmp_path)
    done = pytest_on(tmp_path, "tests/contract/test_contract.py", "-k", "damped")
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)[1]) > 10
