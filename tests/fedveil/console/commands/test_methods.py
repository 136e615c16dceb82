"""`fedveil methods --table`: every method, in its own words and by its own layout."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys

import pytest

from fedveil import strategies
from fedveil.console.commands.getting_started import methods
from fedveil.console.main import main
from fedveil.console.terminal import render_markdown
from fedveil.errors import ConfigError
from tests.conftest import ROOT
from tests.own_entry_points import write_distribution


def cells(column: str) -> dict[str, str]:
    table = methods._compared({})
    columns = {str(each.header): list(each.cells) for each in table.columns}
    return dict(zip(columns["method"], columns[column], strict=True))


def test_every_method_says_what_the_server_learns():
    learns = cells("the server learns")
    assert set(learns) == set(strategies.list_methods())
    assert "see its page" not in learns.values()
    assert learns["fedavg"] == "each client's trained weights, in full"


def test_bytes_are_of_the_largest_message_by_the_layout():
    """FedRand sends one factor: of the example's layers A has 5 + 7 + 3 of 29 columns, and B fewer."""
    down, up = cells("down"), cells("up")
    assert (down["fedavg"], up["fedavg"], down["fedrand"]) == ("100 %", "100 %", "100 %")
    assert up["fedrand"] == "52 %"  # A's 5 + 7 + 3 of 29
    assert up["random_binary"] == "varies"


def test_only_what_makes_a_claim_has_a_guarantee(capsys, monkeypatch):
    assert {name for name, word in cells("guarantee").items() if word.startswith("epsilon")} == {"dp_fpl"}
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["methods", "--table"]) == 0
    assert "fedveil methods NAME" in capsys.readouterr().out


def test_what_a_client_shares_and_keeps_is_what_the_page_of_methods_says():
    rows = re.findall(
        r"^\| [^|]*`(\w+)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE
    )
    told = {name: f"{shares} / {stays}" for name, shares, stays in rows if name in strategies.list_methods()}
    assert told
    shown = cells("a client shares / keeps")
    assert {name: shown[name] for name in told} == told


COLUMN = """
def read_column():
    return {"FedAvg": "seen", "No Such Method": "never"}, "seen: of a test"
"""


@pytest.fixture
def column(tmp_path, monkeypatch):
    """Installs a package with a column, in the place of every other package with one."""
    (tmp_path / "ward_column.py").write_text(COLUMN)

    def install(package: str, value: str = "ward_column") -> None:
        write_distribution(tmp_path, package, "1.0", {methods._COLUMNS: {"ward": value}})

    monkeypatch.setattr(methods, "_COLUMNS", "fedveil.method_columns.tested")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    yield install
    sys.modules.pop("ward_column", None)


def test_without_a_package_of_figures_the_table_says_so_in_a_line(column, capsys):
    assert main(["methods", "--table"]) == 0
    said = capsys.readouterr().out
    assert 'no column "measured", because fedveil-bench is not installed' in said
    assert "measured ┃" not in said


def test_a_column_of_another_package_is_shown_with_its_caption(column, capsys):
    column("ward")
    assert main(["methods", "--table"]) == 0
    said = capsys.readouterr().out
    assert "seen: of a test" in said
    assert "not installed" not in said
    cells = {name: dict(zip(("FedAvg",), ("seen",), strict=True)) for name in ("ward",)}
    (shown,) = (each for each in methods._compared(cells).columns if each.header == "ward")
    assert sorted(set(shown.cells)) == ["-", "seen"]


def test_two_packages_with_one_column_and_one_that_does_not_fit_are_refused(column, capsys):
    column("ward")
    column("other-ward", "json")
    assert main(["methods", "--table"]) == 2
    assert 'column: expected one package that provides "ward", found ' in capsys.readouterr().err


def test_a_column_without_its_function_is_refused(column):
    column("ward", "json")
    with pytest.raises(
        ConfigError, match=r"of the package ward must be a module with read_column, but is <module 'json'"
    ):
        methods._installed_columns()


@pytest.mark.parametrize(
    "words,found",
    [("x. The server learns: a, b. More.", "a, b"), ("The server learns: all.", "all"), ("", "see its page")],
)
def test_the_sentence_ends_at_its_full_stop(words, found):
    assert methods._sentence(words, "The server learns: ") == found


def shown(monkeypatch, capsys, *environment: tuple[str, str]) -> str:
    for name, value in (("COLUMNS", "100"), *environment):
        monkeypatch.setenv(name, value)
    assert main(["methods", "fedrand"]) == 0
    return capsys.readouterr().out


def test_a_terminal_gets_tables_and_formulas_and_no_bars_of_markdown(monkeypatch, capsys):
    stdout = shown(monkeypatch, capsys, ("FORCE_COLOR", "1"), ("TERM", "dumb"))
    assert "|---" not in stdout
    assert "| rho |" not in stdout
    assert "\nThe server learns: " in stdout  # a paragraph of its own
    formula = next(line for line in stdout.splitlines() if "u^(k) ~ U(0, 1)" in line)
    assert "start =" not in formula  # a line of its own


def test_a_pipe_gets_the_docstring_as_it_stands(monkeypatch, capsys):
    stdout = shown(monkeypatch, capsys)
    assert "| rho | `rho` | probability of sharing A |" in stdout
    assert max(map(len, stdout.splitlines()[:30])) > 100


def test_every_methods_rows_and_formulas_survive_as_markdown():
    for name in strategies.list_methods():
        words = inspect.getdoc(importlib.import_module(strategies.load_method(name).__module__))
        lines = render_markdown(words).splitlines()
        for before, line in itertools.pairwise(lines):
            if line.startswith("|"):
                assert line.endswith("|"), (name, line)
                assert before.startswith("|") or not before, (name, line)
            if line.startswith("    ") and not before.startswith(" "):
                assert not before, (name, line)
