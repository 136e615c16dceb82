"""The row split of lora/property: the attack's true answer is known, and no row belongs to two parts."""

from __future__ import annotations

import re

import pytest

from fedveil.contract.task import Example
from fedveil.errors import ConfigError
from fedveil_bench import runner
from fedveil_bench.lora import property as benchmark
from fedveil_bench.lora.property import _Cut, _has
from fedveil_bench.runner import BenchOptions

SETTINGS = runner.read_preset("lora/property", "full")["settings"] | {"clients": 5, "rows_a_site": 20, "rows_known": 8}
KINDS = ("name[A], area[riverside]", "name[B], area[city centre]", "name[C]")
ROWS = Example.from_columns([{"mr": KINDS[i % 3], "ref": f"row {i}"} for i in range(600)])


@pytest.mark.parametrize("meaningless", [False, True])
def test_sites_have_their_shares_and_no_row_is_twice_anywhere(meaningless):
    cut = _Cut.of(ROWS, SETTINGS, 0, meaningless)
    assert sorted(cut.shares.values()) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for site, rows in cut.sites.items():
        assert sum(_has(row, SETTINGS, meaningless) for row in rows) == round(20 * cut.shares[site])
    assert all(_has(row, SETTINGS, meaningless) for row in cut.having)
    assert not any(_has(row, SETTINGS, meaningless) for row in cut.lacking)
    everyone = [row.values["ref"] for rows in (*cut.sites.values(), cut.having, cut.lacking) for row in rows]
    assert len(everyone) == len(set(everyone)) == 5 * 20 + 2 * 8
    assert all(re.search("area", row.values["mr"]) for rows in cut.sites.values() for row in rows)


def test_the_meaningless_property_has_nothing_to_do_with_the_other():
    having = [row for row in ROWS if _has(row, SETTINGS, True)]
    real = sum(_has(row, SETTINGS, False) for row in having) / len(having)
    assert 0.4 * len(ROWS) < len(having) < 0.6 * len(ROWS)
    assert abs(real - 1 / 3) < 0.08


def test_another_seed_gives_the_shares_to_other_sites():
    assert _Cut.of(ROWS, SETTINGS, 0, False).shares != _Cut.of(ROWS, SETTINGS, 1, False).shares


def test_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match="rows_a_site: expected 20 for each of 5 sites"):
        _Cut.of(ROWS[:60], SETTINGS, 0, False)


def judged(monkeypatch, row: str, value: float) -> str:
    """The word of the preset's claim on concordance of that row beside 0.5, over five seeds that differ by little."""
    rows = runner.read_preset("lora/property", "full")["settings"]["rows"]
    at = dict.fromkeys(rows, 0.8) | {row: value}
    offs = (-0.02, -0.01, 0.0, 0.01, 0.02)
    answers = [{name: {"concordance": at[name] + off, "members": 0.9 + off} for name in rows} for off in offs]
    monkeypatch.setattr(benchmark.seeds, "run_seeds", lambda *_: answers)
    said = benchmark.run_benchmark(runner.read_preset("lora/property", "full")["settings"], BenchOptions()).verdicts
    (sentence,) = [s for s in said if s.startswith(f"concordance of {row} less 0.5: ")]
    return sentence.rpartition(": ")[2]


@pytest.mark.parametrize(
    ("value", "word"),
    [(0.5, "holds here."), (0.3, "holds here."), (0.64, "not decided."), (0.8, "does not hold here.")],
)
def test_the_control_of_the_meaningless_property_can_fail(value, word, monkeypatch):
    """An attack that orders sites by it reads something else off the uploads."""
    assert judged(monkeypatch, "FedAvg, meaningless property", value) == word


@pytest.mark.parametrize(
    ("value", "word"), [(0.8, "holds here."), (0.51, "not decided."), (0.4, "does not hold here.")]
)
def test_the_control_that_the_attack_must_win_can_fail(value, word, monkeypatch):
    assert judged(monkeypatch, "FedAvg", value) == word
