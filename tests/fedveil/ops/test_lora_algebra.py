from __future__ import annotations

import pytest
import torch

from fedveil.errors import ConfigError
from fedveil.ops.lora_algebra import aggregation_gap, factor_modules, factor_name, factor_product, parse_factor_name


def pair(a, b):
    return {"m.lora_A": torch.tensor(a), "m.lora_B": torch.tensor(b)}


def test_gap_by_hand():
    """Clients (A, B) = (1, 1) and (3, 3), equal weights: mean(BA) = 5, mean(B) mean(A) = 4, gap = 1 / 5."""
    clients = [pair([[1.0]], [[1.0]]), pair([[3.0]], [[3.0]])]
    assert aggregation_gap(clients, [2, 2]) == pytest.approx(0.2, rel=1e-6)


def test_no_gap_where_one_factor_is_common_or_all_is_zero():
    common = [pair([[1.0, 2.0]], [[1.0], [0.5]]), pair([[1.0, 2.0]], [[-3.0], [4.0]])]
    assert aggregation_gap(common, [3, 5]) == pytest.approx(0.0, abs=1e-6)
    assert aggregation_gap([pair([[1.0]], [[0.0]])], [1]) == 0.0


def test_product_is_b_times_a():
    weights = pair([[1.0, 2.0, 3.0]], [[10.0], [20.0]])
    assert factor_product(weights, "m").tolist() == [[10.0, 20.0, 30.0], [20.0, 40.0, 60.0]]


def test_factors_by_name():
    weights = pair([[1.0]], [[2.0]])
    assert list(parse_factor_name(weights, "B")) == ["m.lora_B"]
    assert factor_name("h.lora_A") == "A"
    assert factor_modules(weights) == ["m"]
    with pytest.raises(ConfigError, match="expected a LoRA factor"):
        factor_name("lora_A.weight")
    with pytest.raises(ConfigError, match="m: expected both LoRA factors"):
        factor_modules(["m.lora_B"])
