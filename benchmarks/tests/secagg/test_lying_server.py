"""The preset's runner: every control succeeds, the real code withstands, and the counts are reproducible."""

from __future__ import annotations

import json

from fedveil.testing.lying_server_search import RULE_REMOVALS
from fedveil_bench import folders, runner
from fedveil_bench.runner import BenchOptions
from fedveil_bench.secagg import lying_server

PRESET = runner.read_preset("secure/lying_server", "full")["settings"]
SMALL = PRESET | {"cases": [case for case in PRESET["cases"] if case["sites"] in (3, 5)], "games": 10}


def test_each_attack_wins_without_its_rule_and_loses_with_it():
    done = lying_server.run_benchmark(SMALL, BenchOptions())
    assert [row["name"] for row in done.rows] == [
        f"{attack}: {case}"
        for case in ("N = 3, q = t = 2, cohort 3, c = 0", "N = 5, q = t = 4, cohort 4, c = 1")
        for attack in ("two lists", "other message")
    ]
    for row, said in zip(done.rows, done.verdicts, strict=True):
        found = {name: metric["mean"] for name, metric in row["metrics"].items()}
        assert 0 < found["control"] < found["claim"]
        assert found["fewest"] == 0 or found["fewest"] >= found["claim"]
        assert "without the rule won, 1 honest" in said
        assert "with it lost, none below" in said
    assert any(row["metrics"]["fewest"]["mean"] for row in done.rows), "every game learned nothing: too weak a search"
    assert lying_server.run_benchmark(SMALL, BenchOptions()) == done


def test_a_code_without_the_rule_is_called_won():
    case = PRESET | {"sites": 5, "colluding": 1, "cohort": 4, "games": 60}
    with RULE_REMOVALS["one list a plan"].removed():
        found = lying_server.play_case("two lists", case)
    assert "with it WON, 1 honest" in lying_server.judge_case("x", found)
    assert "not won: the row says nothing" in lying_server.judge_case("x", found | {"control": 0})


def test_the_committed_result_is_what_the_preset_finds():
    file = folders.results_folder() / "secure_lying_server.json"
    committed = {row["name"]: row["metrics"] for row in json.loads(file.read_text())["rows"]}
    assert len(committed) == 2 * len(PRESET["cases"])
    for case in PRESET["cases"][:2]:
        for attack in lying_server.ATTACKS:
            found = lying_server.play_case(attack, PRESET | case)
            own = committed[lying_server.describe_case(attack, case)]
            assert {name: metric["mean"] for name, metric in own.items()} == found
