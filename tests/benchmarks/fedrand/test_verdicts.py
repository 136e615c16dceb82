"""Sentences from the figures of a FedRand table."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.benchmarks.common import resampling
from fedveil.benchmarks.common.resampling import Figure
from fedveil.benchmarks.fedrand.verdicts import verdicts


def around(value: float, width: float = 0.01) -> Figure:
    rng = np.random.default_rng(int(value * 1000))
    return Figure(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


@pytest.mark.parametrize(
    ("row", "value", "said"),
    [
        ("overfitted FedAvg", 0.9, "expected wholly above 0.5: held."),
        ("overfitted FedAvg", 0.5, "expected wholly above 0.5: NOT HELD."),
        ("round 0", 0.5, "expected 0.5 inside: held."),
        ("round 0", 0.7, "expected 0.5 inside: NOT HELD."),
    ],
)
def test_controls_are_judged_by_their_intervals(row, value, said):
    settings = {"methods": {}, "controls": ["loss"]}
    (sentence,) = verdicts({row: {"loss": around(value), "other": around(0.1)}}, settings)
    assert sentence.startswith(f"Control {row}, loss: {value:.3f} [")
    assert sentence.endswith(said)


def test_a_wrong_site_may_lie_below_but_not_above():
    below, above = (
        verdicts({"M client": {"alignment, wrong site": around(v)}}, {"methods": {}})[0] for v in (0.3, 0.7)
    )
    assert below.endswith("held.")
    assert above.endswith("NOT HELD.")


def test_lower_is_better_turns_the_order_round():
    rows = {"a server": {"loss": around(0.2)}, "b server": {"loss": around(0.4)}}
    order = {"metric": "loss", "view": "server", "better": "lower", "rows": ["a", "b"]}
    settings = {"methods": {"a": {}, "b": {}}, "orders": [order]}
    assert verdicts(rows, settings)[0].endswith("holds in all 1 pairs.")
    settings["orders"] = [order | {"better": "higher"}]
    assert "1 are reversed" in verdicts(rows, settings)[0]
    settings["orders"] = [order | {"metric": "not measured"}]
    assert verdicts({k: {} for k in rows}, settings) == []


def test_reconstruction_errors_are_compared():
    rows = {"x client": {"reconstruction error": around(0.2)}, "y client": {"reconstruction error": around(0.5)}}
    small, large = (verdicts(rows, {"methods": {}, "errors": [e]})[0] for e in (["x", "y"], ["y", "x"]))
    assert "x is smaller than y (difference 0.3)" in small
    assert "y is not smaller than x" in large
