"""A notebook's page has all its cells in order, and the site's links lead to the page."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.conftest import ROOT
from tools import reference
from tools.pages import notebooks

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What `make docs` gives to sphinx, without the pages that follow from the code."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "pages", lambda: {"reference/x.md": "[a](../notebooks/federation.ipynb)"})
        patch.setattr(sys, "argv", ["reference", str(folder)])
        reference.main()
    return folder


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_is_in_its_page_in_order(notebook, site):
    page, at = (site / "notebooks" / f"{notebook.stem}.md").read_text(), 0
    cells = json.loads(notebook.read_text())["cells"]
    assert len(cells) > 1
    for cell in cells:
        text = "".join(cell["source"])
        cell_text = f"```python\n{text}\n```\n" if cell["cell_type"] == "code" else f"{text}\n"
        position = page.find(cell_text, at)
        assert position >= 0, text
        at = position + len(cell_text)
    assert page.startswith("# ")
    assert f"]({notebook.name})" in page[at:]  # the file itself can be had
    assert f"\nnotebooks/{notebook.stem}\n" in (DOCS / "index.md").read_text()


def test_every_link_to_a_notebook_goes_to_its_page(site):
    before = [link for file in DOCS.rglob("*.md") for link in re.findall(r"\]\((\S+\.ipynb)\)", file.read_text())]
    assert len(before) > 1
    pages = [file for file in site.rglob("*.md") if file.parent != site / "notebooks"]
    assert not [file for file in pages if ".ipynb" in file.read_text()]
    assert (site / "reference" / "x.md").read_text() == "[a](../notebooks/federation.md)"
    text = (site / "index.md").read_text()
    assert "](notebooks/federation.md)" in text
    assert text.replace(".md)", ".ipynb)").count("](notebooks/federation.ipynb)") == 1
    assert (DOCS / "index.md").read_text().count(".ipynb") == 1  # the repository's own page stays


def test_backticks_in_code_end_no_fence_and_a_cell_of_another_kind_is_refused(tmp_path):
    def written(kind: str, source: object) -> str:
        cells = [{"cell_type": kind, "source": source}]
        file = tmp_path / "x.ipynb"
        file.write_text(json.dumps({"metadata": {"language_info": {"name": "python"}}, "cells": cells}))
        return notebooks.page(file)

    assert written("code", ["a = '''```\n", "'''"]).startswith("````python\na = '''```\n'''\n````\n")
    assert written("markdown", "as it is").startswith("as it is\n\n")
    with pytest.raises(ValueError, match="x.ipynb, cell 0: expected markdown or code, found 'raw'"):
        written("raw", "")
