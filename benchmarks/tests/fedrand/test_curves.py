"""Curves: when scores are taken, the cost of a quality by hand, and that scoring changes no federation."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fedrand import FedRand
from fedveil_bench.common import resampling
from fedveil_bench.fedrand import curves
from fedveil_bench.fedrand.curves import CurvePoint, SpentBytes
from tests.contract import test_contract as contract

TARGET = {"row": "FedAvg", "metric": "loss", "margin": 0.5}


def toy(rounds: int):
    exchange = MessageExchange(FedRand(), "fedrand", contract.spec_for(FedRand()))
    return contract.federation(exchange, rounds=rounds)


def norm(weights):
    """A score that touches what it is given, as a task that is shown weights might."""
    value = float(sum(w.square().sum() for w in weights.values()))
    torch.manual_seed(0)
    return {"norm": resampling.from_constant(value)}


def curve(*losses: float, upload: float = 1e6, every: int = 2) -> list[CurvePoint]:
    """A loss at each point; each round costs `upload` bytes up and two MB down."""
    at = [every * i for i in range(len(losses))]
    return [
        CurvePoint(r, upload * r, 2e6 * r, {"loss": resampling.from_constant(v)})
        for r, v in zip(at, losses, strict=True)
    ]


def test_the_start_each_kth_round_and_the_end_are_scored_once_each():
    told = []
    found = curves.run_and_score(toy(5), 2, norm, lambda of, round_: told.append(round_))
    assert [p.round for p in found.points] == [0, 2, 4, 5]
    assert [p.round for p in curves.run_and_score(toy(4), 2, norm).points] == [0, 2, 4]
    assert told == [0, 1, 2, 3, 4]
    assert found.seconds > 0


def test_a_point_has_the_server_s_model_and_the_bytes_of_that_round():
    long, short = toy(4), toy(2)
    found = curves.run_and_score(long, 2, norm).points
    assert found[0].figures["norm"].value == norm(toy(1).models()["server"])["norm"].value
    assert (found[0].upload_bytes, found[0].download_bytes) == (0, 0)
    short.run()
    assert (found[1].upload_bytes, found[1].download_bytes) == (short.upload_bytes, short.download_bytes)
    assert found[1].figures["norm"].value == norm(short.models()["server"])["norm"].value
    assert found[1].figures["norm"].value != found[2].figures["norm"].value


def test_a_curve_changes_nothing_and_without_one_nothing_is_scored():
    plain, followed = toy(4), toy(4)
    found = curves.run_and_score(plain, 0, lambda weights: pytest.fail("scored"))
    assert (found.points, found.seconds) == ([], 0.0)
    curves.run_and_score(followed, 1, norm)
    assert plain.upload_bytes == followed.upload_bytes > 0
    assert contract.equal(plain.models()["server"], followed.models()["server"])


def test_points_survive_the_way_between_processes():
    point = curve(3.0, 2.0)[1]
    back = CurvePoint.from_json(json.loads(json.dumps(point.to_json())))
    assert (back.round, back.upload_bytes, back.download_bytes) == (2, 2e6, 4e6)
    assert back.figures["loss"].value == 2.0
    assert (back.figures["loss"].replicates == point.figures["loss"].replicates).all()


def test_a_row_has_the_means_and_intervals_of_its_seeds():
    shown = curves.in_result([curve(3.0, 2.0), curve(3.0, 1.0, upload=3e6)])
    assert [p["round"] for p in shown] == [0, 2]
    assert (shown[1]["upload_bytes"], shown[1]["download_bytes"]) == (4_000_000, 4_000_000)
    assert shown[1]["metrics"]["loss"]["mean"] == 1.5
    assert shown[1]["metrics"]["loss"]["seeds"] == [2.0, 1.0]
    assert shown[1]["metrics"]["loss"]["low"] < 1.0


@pytest.mark.parametrize(
    ("losses", "at", "spent"),
    [
        ((4.0, 2.0, 1.0), 3.0, SpentBytes(1.0, 1e6, 2e6)),  # half-way down the first piece
        ((4.0, 2.0, 1.0), 1.25, SpentBytes(3.5, 3.5e6, 7e6)),
        ((4.0, 2.0, 1.0), 1.0, SpentBytes(4.0, 4e6, 8e6)),
        ((4.0, 2.0, 5.0, 1.0), 2.0, SpentBytes(2.0, 2e6, 4e6)),  # the first time counts, though it rises again
        ((4.0, 2.0), 4.0, SpentBytes(0.0, 0.0, 0.0)),
        ((4.0, 2.0), 1.9, None),
        ((math.nan, 2.0), 3.0, SpentBytes(2.0, 2e6, 4e6)),  # no line leads there
        ((4.0, math.nan, math.inf), 3.0, None),
    ],
)
def test_what_a_quality_costs_by_hand(losses, at, spent):
    assert curves.find_spent_bytes(curve(*losses), "loss", at) == spent


def test_half_of_the_bytes_for_the_same_curve_are_told_and_a_row_that_never_gets_there_is_named():
    """FedAvg ends at 1.0 and more: its target is 1.5 and more, half-way down its second piece."""
    shifts = (0.0, 0.1, 0.2)
    rows = {
        "FedAvg": [curve(4 + s, 2 + s, 1 + s) for s in shifts],
        "FedRand": [curve(4 + s, 2 + s, 1 + s, upload=5e5 + 1e4 * s) for s in shifts],
        "FedPer": [curve(4 + s, 3 + s, 2.9 + s) for s in shifts],
        "round 0": [[], [], []],
    }
    said = curves.compare_costs(rows, [TARGET])
    what = "a loss of 1.600"
    assert said[0] == f"The target, {what} in the mean, is that of FedAvg at the end plus 0.5, in each seed."
    assert f"Bytes to {what}: FedAvg: 3 [3, 3] MB up and 6 [6, 6] MB down, in 3 [3, 3] rounds." in said
    assert f"Bytes to {what}: FedPer: not reached in 3 of 3 seeds, in 4 rounds with 4 MB up." in said
    less = [each for each in said if each.startswith(f"Uploads to {what}, of FedRand less those of FedAvg: -1.5 ")]
    assert less[0].endswith("MB, 0.50 of them: fewer.")
    both = [each for each in said if each.startswith("Uploads and downloads")]
    assert len(both) == 1
    assert "MB, 0.83 of them: fewer." in both[0]
    assert not any("round 0" in each for each in said)


def test_two_seeds_tell_nothing_and_equal_rows_neither():
    two = {"FedAvg": [curve(4, 2, 1)] * 2, "FedRand": [curve(4, 2, 1, upload=5e5)] * 2}
    assert [s for s in curves.compare_costs(two, [TARGET]) if s.endswith(": not told apart.")]
    assert "2 seeds are too few to decide" in curves.compare_costs(two, [TARGET])[-1]
    equal = {"FedAvg": [curve(4, 2, 1)] * 3, "FedRand": [curve(4, 2, 1)] * 3}
    assert len([s for s in curves.compare_costs(equal, [TARGET]) if s.endswith(": not told apart.")]) == 2


@pytest.mark.parametrize("change", [{"row": "FedProx"}, {"metric": "bleu"}, {"margin": 0.0}, {"margin": math.nan}])
def test_a_target_that_no_row_can_have_is_refused(change):
    with pytest.raises(ConfigError, match="curve_targets: expected a row with"):
        curves.compare_costs({"FedAvg": [curve(4, 2, 1)]}, [TARGET | change])
