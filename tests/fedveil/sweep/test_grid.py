"""The cells of a grid."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import ConfigError
from fedveil.sweep.grid import MAX_RUNS, Cell, Grid


def test_every_combination_once():
    grid = Grid.from_texts(["train.learning-rate=1e-3,3e-3", "method.name=fedavg,ffa_lora"], seeds=3)
    assert [cell.values for cell in grid.cells()] == [
        {"train.learning-rate": rate, "method.name": name} for rate in (1e-3, 3e-3) for name in ("fedavg", "ffa_lora")
    ]
    assert [cell.number for cell in grid.cells()] == [1, 2, 3, 4]
    assert Cell(1, {"train.epochs": 2}).label == "train.epochs=2"
    assert [cell.label for cell in Grid({}, 3).cells()] == ["the config"]


def test_values_with_commas_are_a_list():
    text = "method.params=['rho = 0.3', 'adapter = {rank = 4, alpha = 8}']"
    assert Grid.from_texts([text]).values == {"method.params": ["rho = 0.3", "adapter = {rank = 4, alpha = 8}"]}


@given(st.lists(st.integers(1, 4), max_size=4))
def test_the_count_is_the_product(sizes):
    grid = Grid({f"key.{i}": list(range(size)) for i, size in enumerate(sizes)})
    cells = list(grid.cells())
    assert len(cells) == math.prod(sizes)
    assert len({cell.label for cell in cells}) == len(cells)
    combinations = itertools.product(*map(range, sizes))
    assert [tuple(cell.values.values()) for cell in cells] == list(combinations)


@pytest.mark.parametrize(
    ("texts", "seeds", "words"),
    [(["train.epochs"], 1, "expected KEY=VALUE"), (["=1"], 1, "KEY=VALUE"), (["train.epochs="], 1, "KEY=VALUE"),
     (["train.epochs=1", "train.epochs=2"], 1, "each key once"), (["train.epochs=1,1"], 1, "must differ"),
     (["run.seed=1,2"], 1, "the sweep itself sets"), (["run.name=a,b"], 1, "the sweep itself sets"),
     (["train.epochs=[1,"], 1, "expected a TOML list"), (["train.epochs=[]"], 1, "must differ"),
     (["train.epochs=1"], 0, "--seeds: expected 1 to"), (["train.epochs=1"], 101, "--seeds: expected 1 to")],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(texts, seeds, words):
    with pytest.raises(ConfigError, match=words):
        Grid.from_texts(texts, seeds)


def test_a_grid_is_bounded():
    Grid({"train.epochs": list(range(MAX_RUNS // 10))}, 10)
    with pytest.raises(ConfigError, match="expected at most 1000 runs, found 1010"):
        Grid({"train.epochs": list(range(101))}, 10)
