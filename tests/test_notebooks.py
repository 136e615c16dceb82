"""The notebooks of docs/: committed without outputs, and each runs from its first cell on.

Their code cells run here, in this process: no notebook server, and no kernel's packages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    content: dict[str, Any] = json.loads(notebook.read_text())
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_has_no_outputs_and_stands_in_the_contents(notebook):
    content = json.loads(notebook.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    for cell in content["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    for number, source in enumerate(cells(notebook)):
        compile(source, f"{notebook.name}[{number}]", "exec")
    assert f"notebooks/{notebook.name}" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(notebook, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(cells(notebook)):
        exec(compile(source, f"{notebook.name}[{number}]", "exec"), names)
    if notebook.stem == "federation":
        assert names["losses"][-1] < names["losses"][0]
        assert 0 < names["local"].federation.upload_bytes < names["local"].federation.download_bytes


def test_a_federation_is_fifteen_lines_as_its_title_says():
    first = cells(ROOT / "docs" / "notebooks" / "federation.ipynb")[0]
    assert "local.run(" in first
    assert len([line for line in first.splitlines() if line.strip()]) <= 15
