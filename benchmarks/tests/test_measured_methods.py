"""The column "measured" of `fedveil methods --table` has exactly the committed figures."""

from __future__ import annotations

import json
import re

import pytest

from fedveil import strategies
from fedveil.console.commands.getting_started import methods
from fedveil.console.main import main
from fedveil.errors import StateError
from fedveil_bench import folders, measured_methods
from tests.conftest import ROOT


def measured() -> dict[str, str]:
    """The column's cells by a method's name."""
    columns = {"measured": measured_methods.read_column()[0]}
    facts = {name: methods.method_facts(name, columns) for name in strategies.list_methods()}
    return {name: one.columns.get("measured", "-") for name, one in facts.items()}


def test_measured_figures_are_the_committed_ones_and_no_others():
    result = json.loads((ROOT / "benchmarks" / "results" / "lora_attacks.json").read_text())
    rows = {row["name"]: row["metrics"] for row in result["rows"]}
    found = measured()
    names = {name for name, cell in found.items() if cell != "-"}
    others = {name for name, cell in found.items() if "/" in cell}
    assert len(names - others) == sum(name.endswith(" server") for name in rows)
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
    found = measured()
    for name in ("random_binary", "fixed_position"):
        assert re.search(r"APRIL reads 0\.00 .*, (without masks|where it is trained) 1\.00 \[", found[name])
        assert "random_binary/adaptive --small: an attacker who knows " in found[name]
    assert "attack at epsilon 8 0.54 [0.51, 0.57], on FedOTP's prompts, undefended, 0.66 [" in found["dp_fpl"]
    assert " by noise only " in found["dp_fpl"]
    bounds = [float(x) for x in re.findall(r"reads [\d.]+ \[(-?[\d.]+), ([\d.]+)\]", found["fixed_position"])[-1]]
    assert bounds == [0.62, 0.97]  # exact, of twenty searches


def test_without_a_checkout_nothing_is_measured_and_a_file_that_is_no_result_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(folders, "results_folder", lambda: None)
    assert set(measured().values()) == {"-"}
    assert main(["methods", "--table"]) == 0
    assert "docs/results.md" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(folders, "results_folder", lambda: tmp_path)
    assert measured_methods.read_column()[0] == {}
    for text in ("{", "[]", "{}", '{"rows": [3]}', '{"rows": [{"name": "round 0", "metrics": {}}]}'):
        (tmp_path / "lora_attacks.json").write_text(text)
        with pytest.raises(StateError, match="result of fedveil bench lora/attacks"):
            measured_methods.read_column()
