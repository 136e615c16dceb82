"""The table of large messages, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedveil_bench.core import large
from fedveil_bench.process_monitor.no_op import NoOpRun, _less


def way(seconds, cpu, payload=100_000_000):
    usage = SimpleNamespace(highs=lambda kind: [300.0, 200.0] if kind == "SuperLink" else [])
    return NoOpRun(list(seconds), list(cpu), usage, payload)


def test_a_row_has_the_seconds_the_rate_and_the_cpu_of_each_program():
    ours = way([10.0, 30.0], [{"SuperLink": 4.0}, {"SuperLink": 6.0, "worker": 2.0}])
    stock = way([20.0, 20.0], [{"SuperLink": 5.0, "other": 9.0}])
    found = large.build_outcome({"fedveil": ours, "flower": stock}, sites=2)
    first, second = (row["metrics"] for row in found.rows)
    assert [name for name in first if not name.startswith("MB ")] == [
        "seconds a round",
        "CPU s SuperLink",
        "CPU s worker",
    ]
    assert first["seconds a round"]["mean"] == 20.0
    assert first["MB a second"]["mean"] == pytest.approx((400 / 10 + 400 / 30) / 2)
    assert (first["CPU s SuperLink"]["mean"], first["CPU s worker"]["mean"]) == (5.0, 1.0)
    assert (first["MB SuperLink"]["mean"], first["MB worker"]["mean"]) == (300.0, 0.0)
    assert "CPU s other" not in second
    (said,) = found.verdicts
    assert said.startswith("100 MB each way, 2 sites: 20.0 s a round, 1.00 times stock Flower's 20.0; ")
    assert said.endswith("CPU seconds: SuperLink 5.0, worker 1.0.")


def test_the_cpu_of_a_round_is_what_came_since_the_round_before():
    assert _less({"a": 5.0, "b": 2.0}, {"a": 3.5}) == {"a": 1.5, "b": 2.0}


def test_a_message_s_process_is_the_client_s_whoever_forked_it():
    assert large._kind(["flwr-clientapps", "python"]) == large._kind(["flwr-clientapp"]) == "client process"
    assert large._kind(["flower-superlink"]) == "SuperLink"


def test_a_run_that_was_cut_is_beside_the_undisturbed_one_of_its_size():
    ours, stock = way([10.0], [{}]), way([20.0], [{}])
    found = {"fedveil": ours, "flower": stock, "fedveil, cut": way([14.0, 16.0], [{}])}
    _, said = large.build_outcome(found, sites=2).verdicts
    assert said == "fedveil, cut: 15.0 s a round, 1.50 times those of an undisturbed round."
