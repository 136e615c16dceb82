"""`fedveil methods --table`: every method, in its own words and by its own layout."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re

import pytest

from fedveil import strategies
from fedveil.console import measured
from fedveil.console.commands.trying import methods
from fedveil.console.main import main
from fedveil.console.terminal import markdown
from fedveil.errors import StateError
from tests.conftest import ROOT


def cells(column: str) -> dict[str, str]:
    table = methods._compared(measured.committed()[0])
    found = {str(each.header): list(each.cells) for each in table.columns}
    return dict(zip(found["method"], found[column], strict=True))


def test_every_method_says_what_the_server_learns():
    learns = cells("the server learns")
    assert set(learns) == set(strategies.names())
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


def test_what_a_client_shares_and_keeps_is_what_the_readme_says():
    rows = re.findall(r"^\| [^|]*`(\w+)` \| ([^|]+) \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = {name: f"{shares} / {stays}" for name, shares, stays in rows if name in strategies.names()}
    assert set(told) == set(strategies.names())
    assert cells("a client shares / stays with it") == told


def test_measured_figures_are_the_committed_ones_and_no_others():
    result = json.loads((ROOT / "benchmarks" / "results" / "lora_attacks.json").read_text())
    rows = {row["name"]: row["metrics"] for row in result["rows"]}
    found = cells("measured")
    names = {name for name, cell in found.items() if cell != "-"}
    others = {name for name, cell in found.items() if "/" in cell}
    assert len(names - others) == sum(name.endswith(" server") for name in rows)
    assert set(strategies.names()) == names
    loss, told = rows["FedRand server"]["Caltech test loss"], rows["FedRand client"]["Caltech alignment"]
    assert found["fedrand"] == (
        f"loss {loss['mean']:.2f} [{loss['low']:.2f}, {loss['high']:.2f}]; "
        f"attack {told['mean']:.2f} [{told['low']:.2f}, {told['high']:.2f}]"
    )
    assert "the base's: the server has no other; attack" in found["fedsa_lora"]
    assert found["rolora"].endswith(", 1.00]")  # an AUROC's interval ends there
    for name, preset, row, metric in (
        ("fedqsn", "fedqsn/table1", "FedQSN gap less control", "loss"),
        ("random_binary", "random_binary/adaptive", "R = 0.5, batch 1", "read"),
        ("dp_fpl", "dp_fpl/table3", "DP-FPL, epsilon 0.4", "local"),
    ):
        result = json.loads((ROOT / "benchmarks" / "results" / f"{preset.replace('/', '_')}.json").read_text())
        value = next(r for r in result["rows"] if r["name"] == row)["metrics"][metric]
        assert f"{preset} --small: " in found[name]
        assert f" {value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]" in found[name]
    assert "random_binary/accuracy: " in found["random_binary"]  # not a small one


def test_an_attack_stands_beside_the_undefended_and_the_one_that_knows():
    found = cells("measured")
    for name in ("random_binary", "fixed_position"):
        assert re.search(r"APRIL reads 0\.00 .*, (without masks|where it is trained) 1\.00 \[", found[name])
        assert "random_binary/adaptive --small: who knows " in found[name]
    assert "attack at epsilon 8 0.54 [0.51, 0.57], on FedOTP's prompts, undefended, 0.66 [" in found["dp_fpl"]
    assert " by noise alone " in found["dp_fpl"]
    bounds = [float(x) for x in re.findall(r"reads [\d.]+ \[(-?[\d.]+), ([\d.]+)\]", found["fixed_position"])[-1]]
    assert bounds == [0.62, 0.97]  # exact, of twenty searches


def test_without_a_checkout_nothing_is_measured_and_a_file_that_is_no_result_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measured.places, "checkout", lambda: None)
    assert set(cells("measured").values()) == {"-"}
    assert main(["methods", "--table"]) == 0
    assert "docs/results.md" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(measured.places, "checkout", lambda: tmp_path)
    assert measured.committed()[0] == {}
    file = tmp_path / "benchmarks" / "results" / "lora_attacks.json"
    file.parent.mkdir(parents=True)
    for text in ("{", "[]", "{}", '{"rows": [3]}', '{"rows": [{"name": "round 0", "metrics": {}}]}'):
        file.write_text(text)
        with pytest.raises(StateError, match="result of fedveil bench lora/attacks"):
            measured.committed()


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
