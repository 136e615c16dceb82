"""Sentences derived from the figures of a FedRand table."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil.errors import ConfigError
from fedveil_bench.common import resampling
from fedveil_bench.common.resampling import ResampledMetric
from fedveil_bench.fedrand.verdicts import list_verdicts


def around(value: float, width: float = 0.01) -> ResampledMetric:
    rng = np.random.default_rng(int(value * 1000))
    return ResampledMetric(value, value + width * rng.normal(size=resampling.REPLICATES), 10)


@pytest.mark.parametrize(
    ("row", "value", "said"),
    [
        ("overfitted FedAvg", 0.9, "expected above 0.55: held."),
        ("overfitted FedAvg", 0.56, "expected above 0.55: not decided."),
        ("overfitted FedAvg", 0.5, "expected above 0.55: NOT HELD."),
        ("round 0", 0.5, "expected within 0.45 to 0.55: held."),
        ("round 0", 0.54, "expected within 0.45 to 0.55: not decided."),
        ("round 0", 0.7, "expected within 0.45 to 0.55: NOT HELD."),
        ("other rows", 0.5, "expected within 0.45 to 0.55: held."),
        ("other rows", 0.46, "expected within 0.45 to 0.55: not decided."),
        ("other rows", 0.3, "expected within 0.45 to 0.55: NOT HELD."),
    ],
)
def test_controls_are_judged_by_their_margin(row, value, said):
    settings = {"methods": {}, "controls": ["loss"]}
    sentence, how = list_verdicts({row: {"loss": around(value), "other": around(0.1)}}, settings)
    assert sentence.startswith(f"Control {row}, loss: {value:.3f} [")
    assert sentence.endswith(said)
    assert how == "Verdicts on controls are corrected for 1 controls (Holm)."
    wide = {"methods": {}, "controls": ["loss"], "control_margin": 0.25}
    if row != "overfitted FedAvg":
        assert list_verdicts({row: {"loss": around(value)}}, wide)[0].endswith("expected within 0.25 to 0.75: held.")


def test_a_control_with_too_few_rows_is_not_decided():
    """0.5 lies in the interval, and so does 0.6: it was called held."""
    sentence, _ = list_verdicts({"round 0": {"loss": around(0.5, 0.05)}}, {"methods": {}, "controls": ["loss"]})
    assert sentence.endswith("not decided.")


def test_controls_of_a_table_are_corrected_together():
    """Each of twenty alone is held."""
    many = {"round 0": {f"m{i}": around(0.5, 0.02) for i in range(20)}}
    alone = list_verdicts(many, {"methods": {}, "controls": ["m0"]})
    together = list_verdicts(many, {"methods": {}, "controls": list(many["round 0"])})
    assert alone[0].endswith(": held.")
    assert all(said.endswith(": not decided.") for said in together[:20])


def test_a_control_on_which_all_rows_score_the_same_is_none():
    (sentence,) = list_verdicts(
        {"round 0": {"loss": resampling.from_constant(0.5)}}, {"methods": {}, "controls": ["loss"]}
    )
    assert sentence == "Control round 0, loss: all rows score the same, so it cannot fail: no control."
    apart, _ = list_verdicts(
        {"round 0": {"loss": resampling.from_constant(1.0)}}, {"methods": {}, "controls": ["loss"]}
    )
    assert apart.endswith("NOT HELD.")


def test_a_wrong_site_may_lie_below_but_not_above():
    below, near, above = (
        list_verdicts({"M client": {"alignment, wrong site": around(v)}}, {"methods": {}})[0] for v in (0.3, 0.54, 0.7)
    )
    assert below.endswith("expected below 0.55: held.")
    assert near.endswith("not decided.")
    assert above.endswith("NOT HELD.")


def test_lower_is_better_turns_the_order_round():
    rows = {"a server": {"loss": around(0.2)}, "b server": {"loss": around(0.4)}}
    order = {"metric": "loss", "view": "server", "better": "lower", "rows": ["a", "b"]}
    settings = {"methods": {"a": {}, "b": {}}, "orders": [order]}
    sentence, how = list_verdicts(rows, settings)
    assert sentence.endswith("holds in all 1 pairs.")
    assert "corrected for all pairs of an order (Holm)" in how
    settings["orders"] = [order | {"better": "higher"}]
    assert "1 are reversed" in list_verdicts(rows, settings)[0]
    settings["orders"] = [order | {"metric": "not measured"}]
    assert list_verdicts({k: {} for k in rows}, settings) == []


def test_a_control_to_win_does_so_over_the_seeds_and_one_to_lose_fails_by_its_rows():
    figure = resampling.over_seeds([around(v, 0.001) for v in (0.51, 0.7, 0.95)])
    settings = {"methods": {}, "controls": ["loss"]}
    won, lost, _ = list_verdicts({"overfitted FedAvg": {"loss": figure}, "round 0": {"loss": figure}}, settings)
    assert won.endswith("expected above 0.55: not decided.")
    assert lost.endswith("expected within 0.45 to 0.55: NOT HELD.")


@pytest.mark.parametrize(
    ("pair", "word"), [("xy", "is smaller than"), ("yx", "is larger than"), ("xz", "is not told from")]
)
def test_reconstruction_errors_are_compared(pair, word):
    values = {"x": 0.2, "y": 0.5, "z": 0.201}
    rows = {f"{name} client": {"reconstruction error": around(v)} for name, v in values.items()}
    (sentence,) = list_verdicts(rows, {"methods": {}, "errors": [list(pair)]})
    assert f"{pair[0]} {word} {pair[1]} (difference " in sentence


def seeded(*values: float, width: float = 0.001) -> ResampledMetric:
    return resampling.over_seeds([around(v, width) for v in values])


def claimed(mine: ResampledMetric, other: ResampledMetric, **more: object) -> str:
    claim = {"metric": "alignment", "row": "X client", "than": "Y client", "is": "not lower", "margin": 0.05} | more
    rows = {"X client": {"alignment": mine}, "Y client": {"alignment": other}}
    return list_verdicts(rows, {"methods": {}, "claims": [claim]})[0]


def test_a_claim_is_judged_by_its_margin_and_its_pairs():
    base = (0.7, 0.95, 0.8, 0.9, 0.75)
    near, far = (seeded(*(v - less for v in base)) for less in (0.01, 0.2))
    assert claimed(near, seeded(*base)).endswith("it not lower (within 0.05): holds here.")
    assert claimed(near, seeded(*base), margin=0.005).endswith("does not hold here.")
    assert claimed(far, seeded(*base)).endswith("does not hold here.")
    # Shuffled, the same values give five pairs with a large spread: no difference is found.
    assert claimed(seeded(*(v - 0.01 for v in reversed(base))), seeded(*base)).endswith("not decided.")
    assert claimed(seeded(*base[:2]), seeded(*base[:2])).endswith("not decided.")


def test_claims_of_a_table_are_corrected_together():
    rows = {
        "X client": {m: seeded(0.5, 0.53, 0.51, 0.52, 0.56) for m in "abcdefgh"},
        "Y client": {m: seeded(0.5, 0.51, 0.49, 0.5, 0.52) for m in "abcdefgh"},
    }
    claims = [{"metric": m, "row": "X client", "than": "Y client", "is": "higher"} for m in "abcdefgh"]
    alone = list_verdicts(rows, {"methods": {}, "claims": claims[:1]})[0]
    assert alone.endswith("holds here.")
    assert all("not decided" in said for said in list_verdicts(rows, {"methods": {}, "claims": claims})[:8])


def test_a_claim_about_what_is_not_measured_is_refused():
    with pytest.raises(ConfigError, match='claims: expected a row with that metric, found no "X client"'):
        claimed(seeded(0.5, 0.5, 0.5), seeded(0.5, 0.5, 0.5), metric="losses")


def test_the_wrong_site_of_every_part_is_a_control():
    said, _ = list_verdicts({"M client": {"CIFAR alignment, wrong site": around(0.7)}}, {"methods": {}})
    assert said.startswith("Control M client, CIFAR alignment, wrong site: ")
    assert said.endswith("NOT HELD.")
