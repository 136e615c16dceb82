"""The generated pages name every key, command, method and field, and their tables are consistent."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fedveil import strategies, tasks
from fedveil.config import RunConfig
from fedveil.console import main as console
from tests.conftest import ROOT
from tests.tools.all_pages import all_pages
from tools import reference


def test_every_key_of_the_run_config_has_its_default_and_a_sentence():
    row = r"^\| `([a-z]+\.[a-z0-9-]+)` \| `([^`]*)` \|.*\| ([^|]+) \|$"
    rows = re.findall(row, all_pages()["reference/run-config.md"], re.M)
    defaults = {key: default for key, default, _ in rows}
    assert [key for key, _, words in rows if len(words.split()) < 4] == []
    assert set(defaults) == set(RunConfig().flat())
    assert defaults["train.batch-size"] == "16"
    assert defaults["run.deterministic"] == "false"
    assert defaults["task.data"] == '""'


def test_bounds_and_choices_are_said():
    page = all_pages()["reference/run-config.md"]
    assert "| a number, above 0, at most 1 | fraction of the connected sites" in page
    assert "| `fp32`, `bf16` |" in page


def test_the_tutorial_of_own_data_names_every_column_and_each_score_of_pictures():
    page = (ROOT / "docs" / "tutorials" / "own-data.md").read_text()
    columns = [key for key in RunConfig().flat() if key.startswith("task.") and key.endswith("-column")]
    assert len(columns) > 5
    assert [key for key in columns if f"{key}=" not in page] == []
    of_captions = set(tasks.task_info("vision-language").metrics(RunConfig().task)) - {"loss", "bleu_2", "bleu_3"}
    assert {name for name in of_captions if f"`{name}`" not in page} == set()


def test_every_command_is_there_with_its_actions():
    page = all_pages()["reference/commands.md"]
    assert set(re.findall(r"^## fedveil (\w+)$", page, re.M)) == set(console.list_commands())
    assert "### fedveil members register" in page


@pytest.mark.parametrize("name", strategies.list_methods())
def test_every_field_of_a_method_says_what_it_means(name):
    page = all_pages()[f"reference/methods/{name}.md"].partition("## Fields")[2].partition("## On the wire")[0]
    field_names = re.findall(r"^\| `(\w+)` \| .* \| [^|]+ \|$", page, re.M)
    assert field_names == [field.name for field in dataclasses.fields(strategies.load_method(name))]
    assert f"({name}.md)" in all_pages()["reference/methods/index.md"]


def test_all_rows_of_a_table_have_as_many_cells():
    assert len(all_pages()) > 100
    assert [(name, line) for name, text in all_pages().items() for line in uneven_rows(text)] == []


def uneven_rows(text: str) -> list[str]:
    """The rows with another number of cells than the first of their table."""
    first, uneven = 0, []
    for line in re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        first = first if first and cells else cells
        uneven += [line] if cells != first else []
    return uneven


def test_an_uneven_row_is_seen():
    table = "| a | b |\n| - | - |\n| c \\| d | e |\n"
    assert uneven_rows(table) == []
    assert uneven_rows(table + "| f |\n\n| g |\n```\n| h | i |\n```\n") == ["| f |"]


def test_a_row_over_two_lines_becomes_one_and_a_table_stands_apart():
    assert (
        reference.render_markdown("words\n| a | b |\n|---|---|\n| c | d\n  e |")
        == "words\n\n| a | b |\n|---|---|\n| c | d e |"
    )


def test_a_bar_in_a_cell_is_no_border():
    assert reference.table(("a",), [("x | y",)]) == "| a |\n| --- |\n| x \\| y |\n"


def test_the_pages_are_not_in_the_repository():
    assert not (ROOT / "docs" / "reference").exists()
