"""`fedveil methods --table`: every method, in its own words and by its own layout."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import re
import sys

import pytest

from fedveil import strategies, tasks
from fedveil.console.commands.getting_started import methods
from fedveil.console.main import main
from fedveil.console.terminal import render_markdown
from fedveil.errors import ConfigError
from tests.conftest import ROOT
from tests.own_entry_points import write_distribution


@pytest.fixture(scope="module")
def facts() -> dict[str, methods.MethodFacts]:
    return {name: methods.method_facts(name) for name in strategies.list_methods()}


def test_every_method_says_what_the_server_learns(facts):
    assert "see its page" not in {one.server_learns for one in facts.values()}
    assert facts["fedavg"].server_learns == "each client's trained weights, in full"


def test_bytes_are_of_the_largest_message_by_the_layout(facts):
    """FedRand sends one factor: of the example's layers A has 5 + 7 + 3 of 29 columns, and B fewer."""
    assert (facts["fedavg"].down_percent, facts["fedavg"].up_percent, facts["fedrand"].down_percent) == (100, 100, 100)
    assert facts["fedrand"].up_percent == 52  # A's 5 + 7 + 3 of 29
    assert facts["random_binary"].up_percent is None


def test_only_what_makes_a_claim_has_a_guarantee(facts):
    assert {name for name, one in facts.items() if one.guarantee == "epsilon"} == {"dp_fpl"}


def test_what_a_client_shares_and_keeps_is_what_the_page_of_methods_says(facts):
    rows = re.findall(
        r"^\| [^|]*`(\w+)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE
    )
    told = {name: (shares, stays) for name, shares, stays in rows if name in facts}
    assert told
    assert {name: (facts[name].client_shares, facts[name].client_keeps) for name in told} == told


def test_the_table_has_one_line_a_method_in_eighty_columns(facts):
    head, *lines = methods.table_lines([*facts.values()])
    assert head.split() == ["method", "adapters", "tasks", "keeps", "guarantee", "down", "%", "up", "%"]
    assert [line.split()[0] for line in lines] == list(facts)
    assert max(map(len, [head, *lines])) <= 80
    (fedavg,) = (line for line in lines if line.startswith("fedavg "))
    assert fedavg.split() == ["fedavg", "lora", "(or", "4", "others)", "tio", "no", "none", "100", "100"]
    (binary,) = (line for line in lines if line.startswith("random_binary "))
    assert binary.split()[-1] == "varies"


@pytest.mark.parametrize(
    ("purpose", "inside", "outside"),
    [
        ("lora", {"fedavg", "fedrand", "ffa_lora"}, {"promptfl", "fedsp", "fedqsn"}),
        ("all", {"fedqsn", "fedavg"}, {"fedrand"}),
        ("images", {"promptfl", "dp_fpl", "fedavg", "fixed_position"}, {"fedsp"}),
        ("text", {"fedsp", "fedrand"}, {"promptfl", "dp_fpl"}),
        ("clip-prompt", {"promptfl", "fedavg"}, {"fedrand", "fedsp"}),
        ("own-model", {"fedavg"}, {"promptfl"}),
    ],
)
def test_a_filter_keeps_the_methods_that_can_do_it(purpose, inside, outside, capsys):
    names = set(methods.filter_methods(strategies.list_methods(), purpose))
    assert inside <= names
    assert not outside & names


def test_every_purpose_of_the_help_is_one_and_another_is_refused(capsys):
    for purpose in (*methods._FAMILIES, *tasks.list_tasks(), "residual-lora", "hadamard-lora", "prompt", "prefix"):
        assert methods.filter_methods(strategies.list_methods(), purpose), purpose
    assert set(methods._TEXT) | set(methods._IMAGES) | {"own-model"} == set(tasks.list_tasks())
    assert main(["methods", "--table", "--for", "lroa"]) == 2
    assert "error: --for: found 'lroa'; did you mean lora? expected one of all, " in capsys.readouterr().err


def test_the_list_can_be_filtered(capsys):
    assert main(["methods", "--for", "prefix"]) == 0
    stdout = capsys.readouterr().out
    assert "fedsp " in stdout
    assert "fedrand " not in stdout


def test_the_json_has_the_fields_of_the_help_and_no_others(column, capsys):
    column("ward")
    assert main(["methods", "--json", "--for", "lora"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["format", "methods"]
    fields = [field.name for field in dataclasses.fields(methods.MethodFacts)]
    assert all(list(one) == fields for one in found["methods"])
    fedavg = next(one for one in found["methods"] if one["name"] == "fedavg")
    assert (fedavg["down_percent"], fedavg["columns"], fedavg["adapters"][0]) == (100, {"ward": "seen"}, "lora")
    assert fedavg["guarantee"] == "none"
    for name in (*fields, *found):
        assert re.search(rf"\b{name}\b", methods.__doc__), name


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
    assert "figures: fedveil-bench is not installed" in capsys.readouterr().out


def test_a_column_of_another_package_is_shown_with_its_caption(column, capsys):
    column("ward")
    assert main(["methods", "--table"]) == 0
    said = capsys.readouterr().out
    assert "seen: of a test" in said
    assert "not installed" not in said
    assert "fedavg           seen" in said.splitlines()
    assert "never" not in said


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
