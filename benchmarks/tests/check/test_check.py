"""The committed results, recomputed without the benchmarks' code; a changed figure is detected."""

from __future__ import annotations

import ast
import copy
import json
import math

import pytest

from benchmarks.check import __main__ as command
from benchmarks.check import page, reference, result_file
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "results.md").read_text()


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_committed_results_and_the_page_are_what_their_values_give(capsys):
    assert command.main([]) == 0, capsys.readouterr().out
    table = capsys.readouterr().out
    for file in RESULTS.glob("*.json"):
        assert f"\n{file.stem} " in table


def test_nothing_of_fedveil_is_imported():
    """Else an error of the benchmarks would be repeated by the check."""
    imported = set()
    for file in (ROOT / "benchmarks" / "check").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Import(names=names):
                    imported |= {alias.name.partition(".")[0] for alias in names}
                case ast.ImportFrom(module=str(module)):
                    imported.add(module.partition(".")[0])
    assert {"benchmarks", "numpy", "scipy"} <= imported
    assert not imported & {"fedveil", "fedveil_bench", "tools", "tests"}


def set_metric(result: dict, row: str, metric: str, key: str, change: float) -> None:
    found = next(each for each in result["rows"] if each["name"] == row)["metrics"][metric]
    found[key] = [found[key][0] + change, *found[key][1:]] if key == "seeds" else found[key] + change


def replace_text(result: dict, old: str, new: str) -> None:
    assert any(old in sentence for sentence in result["verdicts"])
    result["verdicts"] = [sentence.replace(old, new) for sentence in result["verdicts"]]


# The changes: a row's metric to a number, or a text in a sentence to another text.
CHANGES = {
    "a seed": ("lora_viggo", ("FedRand", "loss", "seeds", 0.001)),
    "a mean": ("fedqsn_table2", ("w = 1 gap", "loss", "mean", 0.001)),
    "an interval over seeds": ("fedrand_e2e", ("FedAvg", "bleu", "low", -0.001)),
    "a narrow interval over rows": ("dp_fpl_table2", ("PromptFL", "local", "low", 9.0)),
    "a share": ("random_binary_adaptive", ("R = 0.2, batch 1", "read", "low", 0.01)),
    "a bootstrap of rows": ("random_binary_accuracy", ("scratch, plain", "accuracy", "high", 1.0)),
    "a difference": ("lora_quality", ("+0.062 [+0.053", "+0.061 [+0.053")),
    "an end of a difference": ("lora_quality", ("+0.062 [+0.053", "+0.062 [+0.052")),
    "a narrow difference": ("fedqsn_distributed", ("[+0.35, +0.67]", "[+0.45, +0.57]")),
    "a wide difference": ("fedrand_withheld", ("[-0.179, +0.048]", "[-0.979, +0.848]")),
    "a verdict that holds": ("fedqsn_table8", ("+0.667]: a gap", "+0.667]: no gap can be told")),
    "a verdict that is open": ("lora_dart", ("not decided.", "holds here.")),
    "the size of a family": ("lora_property", ("8 comparisons", "7 comparisons")),
    "a control": ("dp_fpl_mia_learns", ("0.45 to 0.55: held", "0.45 to 0.55: NOT HELD")),
    "an order": ("fedrand_table4", ("4 of 10 pairs hold, 3 are", "9 of 10 pairs hold, 1 are")),
    "what intervals cover": ("lora_viggo", ("over seeds, one test set;", "over rows and seeds;")),
    "what some intervals cover": ("fedqsn_table2", ("over rows and seeds;", "over seeds;")),
    "a ratio": ("lora_quality", ("HetLoRA: loss is", "FLoRA: loss is")),
    "a peer": ("peers_e2e", ("Flower FedAvg 44.04", "Flower FedAvg 45.04")),
    "bytes to a target": ("fedrand_quality", ("-3.19 [-10.6", "-3.29 [-10.6")),
    "killed points": ("core_faults", ("in 197 something", "in 200 something")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_figure_is_found(change):
    name, changed = CHANGES[change]
    result = copy.deepcopy(load(name))
    assert result_file.check_result(name, result, RESULTS).mismatches == []
    set_metric(result, *changed) if len(changed) == 4 else replace_text(result, *changed)
    assert result_file.check_result(name, result, RESULTS).mismatches != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`FedRand` bleu: 45.9", "`FedRand` bleu: 45.8"),
        ("+0.040 to +0.053 nats; 1.544 to 1.561", "+0.040 to +0.053 nats; 1.545 to 1.561"),
        ("+0.040 to +0.053 nats", "+0.041 to +0.053 nats"),
        ('| refuted (5 seeds) | +0.040', '| holds (5 seeds) | +0.040'),
        ("FedAvg: +0.047", "FedAvg: +0.048"),
    ],
)  # fmt: skip
def test_a_changed_figure_of_the_page_is_found(old, new):
    results = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    assert page.check_page(PAGE, results).mismatches == []
    assert old in PAGE
    assert page.check_page(PAGE.replace(old, new), results).mismatches != []


def test_the_command_ends_with_1_at_a_mismatch(tmp_path, capsys):
    result = load("lora_viggo")
    set_metric(result, "FedRand", "loss", "seeds", 0.001)
    (tmp_path / "lora_viggo.json").write_text(json.dumps(result))
    (page_file := tmp_path / "results.md").write_text(PAGE.partition("\n## ")[0])
    assert command.main(["--results", str(tmp_path), "--page", str(page_file)]) == 1
    assert "lora_viggo: FedRand, loss: the mean is" in capsys.readouterr().out


def test_the_statistics_are_those_of_their_tables():
    """Student's t of 4 degrees of freedom is 2.776; Holm by hand; a normal p-value; Clopper-Pearson of 12 of 12."""
    values = (1.0, 2.0, 3.0, 4.0, 5.0)
    half = reference.compute_half_width(values)
    assert half == pytest.approx(2.7764451 * math.sqrt(2.5 / 5))
    assert reference.compute_p_value(half, 0.0, values) == pytest.approx(0.05)
    assert reference.compute_p_value(half, 1e-9, values) == pytest.approx(0.05)
    assert reference.compute_p_value(2.0, 2.0, ()) == pytest.approx(0.05)
    assert reference.compute_p_value(math.hypot(half, 2.0), 2.0, values) == pytest.approx(0.05)
    assert reference.compute_p_value(9.0, 0.0, (1.0, 2.0)) == 1.0
    assert reference.correct_by_holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert reference.compute_share_interval(12, 12) == pytest.approx((0.7353515, 1.0))
    assert reference.compute_share_p_value(12, 12, 0.5) == pytest.approx(2 * 0.5**12)
