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
        ("other rows", 0.5, "expected 0.5 inside: held."),
        ("other rows", 0.3, "expected 0.5 inside: NOT HELD."),
    ],
)
def test_controls_are_judged_by_their_intervals(row, value, said):
    settings = {"methods": {}, "controls": ["loss"]}
    (sentence,) = verdicts({row: {"loss": around(value), "other": around(0.1)}}, settings)
    assert sentence.startswith(f"Control {row}, loss: {value:.3f} [")
    assert sentence.endswith(said)


def test_a_control_on_which_all_rows_score_the_same_is_none():
    (sentence,) = verdicts({"round 0": {"loss": resampling.fixed(0.5)}}, {"methods": {}, "controls": ["loss"]})
    assert sentence == "Control round 0, loss: all rows score the same, so it cannot fail: no control."
    (apart,) = verdicts({"round 0": {"loss": resampling.fixed(1.0)}}, {"methods": {}, "controls": ["loss"]})
    assert apart.endswith("NOT HELD.")


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
    sentence, how = verdicts(rows, settings)
    assert sentence.endswith("holds in all 1 pairs.")
    assert "corrected for all pairs of an order (Holm)" in how
    settings["orders"] = [order | {"better": "higher"}]
    assert "1 are reversed" in verdicts(rows, settings)[0]
    settings["orders"] = [order | {"metric": "not measured"}]
    assert verdicts({k: {} for k in rows}, settings) == []


def test_a_control_to_win_does_so_over_the_seeds_and_one_to_lose_fails_by_its_rows():
    figure = resampling.over_seeds([around(v, 0.001) for v in (0.51, 0.7, 0.95)])
    settings = {"methods": {}, "controls": ["loss"]}
    won, lost = verdicts({"overfitted FedAvg": {"loss": figure}, "round 0": {"loss": figure}}, settings)
    assert won.endswith("expected wholly above 0.5: NOT HELD.")
    assert lost.endswith("expected 0.5 inside: NOT HELD.")


@pytest.mark.parametrize(
    ("pair", "word"), [("xy", "is smaller than"), ("yx", "is larger than"), ("xz", "is not told from")]
)
def test_reconstruction_errors_are_compared(pair, word):
    values = {"x": 0.2, "y": 0.5, "z": 0.201}
    rows = {f"{name} client": {"reconstruction error": around(v)} for name, v in values.items()}
    (sentence,) = verdicts(rows, {"methods": {}, "errors": [list(pair)]})
    assert f"{pair[0]} {word} {pair[1]} (difference " in sentence
