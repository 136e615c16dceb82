"""docs/tasks: each page has an example that runs as shown, and keys with the defaults of the run config."""

from __future__ import annotations

import re

import pytest

from fedveil import tasks
from fedveil.config import parse
from tests.conftest import ROOT
from tests.deployment.test_tutorials import commands, printed

INDEX = ROOT / "docs" / "tasks.md"
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))


def shown_default(value: object) -> str:
    """Return a default as the tables of keys show it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return str(value)


def test_each_task_has_a_page_in_the_index_and_in_the_contents():
    assert [page.stem for page in PAGES] == sorted(tasks.list_tasks())
    index, contents = INDEX.read_text(), (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        assert f"(tasks/{page.name})" in index
        assert f"\ntasks/{page.stem}\n" in contents


@pytest.mark.parametrize("page", [INDEX, *PAGES], ids=lambda page: page.stem)
def test_the_keys_of_a_page_have_the_defaults_of_the_run_config(page):
    table = page.read_text().partition("| key | default | meaning |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| ([^|]+) \|", table, re.MULTILINE)
    defaults = parse({}).flat()
    assert rows
    assert {key: text for key, text in rows if text != shown_default(defaults[key])} == {}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_runs_as_shown(page, tmp_path):
    assert f'"task.name": "{page.stem}"' in commands(page)
    printed(commands(page), tmp_path, 500.0)
