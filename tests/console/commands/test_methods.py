"""`fedveil methods --table`: every method, in its own words and by its own layout."""

from __future__ import annotations

import importlib
import inspect
import itertools

import pytest

from fedveil import strategies
from fedveil.console.commands.trying import methods
from fedveil.console.main import main
from fedveil.console.terminal import markdown


def cells(column: int) -> dict[str, str]:
    table = methods._compared()
    names, found = (list(table.columns[i].cells) for i in (0, column))
    return dict(zip(names, found, strict=True))


def test_every_method_says_what_the_server_learns():
    learns = cells(1)
    assert set(learns) == set(strategies.names())
    assert "see its page" not in learns.values()
    assert learns["fedavg"] == "each client's trained weights, in full"


def test_bytes_are_of_the_largest_message_by_the_layout():
    """FedRand sends one factor: of the example's layers A has 5 + 7 + 3 of 29 columns, and B fewer."""
    down, up = cells(3), cells(4)
    assert (down["fedavg"], up["fedavg"], down["fedrand"]) == ("100 %", "100 %", "100 %")
    assert up["fedrand"] == "52 %"  # A's 5 + 7 + 3 of 29
    assert up["random_binary"] == "varies"


def test_only_what_makes_a_claim_has_a_guarantee(capsys, monkeypatch):
    assert {name for name, word in cells(2).items() if word.startswith("epsilon")} == {"dp_fpl"}
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["methods", "--table"]) == 0
    assert "fedveil methods NAME" in capsys.readouterr().out


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
    said = shown(monkeypatch, capsys, ("FORCE_COLOR", "1"), ("TERM", "dumb"))
    assert "|---" not in said
    assert "| rho |" not in said
    assert "\nThe server learns: " in said  # a paragraph of its own
    formula = next(line for line in said.splitlines() if "u^(k) ~ U(0, 1)" in line)
    assert "start =" not in formula  # a line of its own


def test_a_pipe_gets_the_docstring_as_it_stands(monkeypatch, capsys):
    said = shown(monkeypatch, capsys)
    assert "| rho | `rho` | probability of sharing A |" in said
    assert max(map(len, said.splitlines()[:30])) > 100


def test_every_methods_rows_and_formulas_survive_as_markdown():
    for name in strategies.names():
        words = inspect.getdoc(importlib.import_module(strategies.load(name).__module__))
        lines = markdown(words).splitlines()
        for before, line in itertools.pairwise(lines):
            if line.startswith("|"):
                assert line.endswith("|"), (name, line)
                assert before.startswith("|") or not before, (name, line)
            if line.startswith("    ") and not before.startswith(" "):
                assert not before, (name, line)
