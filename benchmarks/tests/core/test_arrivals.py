"""A simulated round: values by hand for one site, and the effect of each shared resource on many sites."""

from __future__ import annotations

import dataclasses

import pytest

from fedveil_bench.core.arrivals import ArrivalCosts, simulate_round

COSTS = ArrivalCosts(
    send=0.5, fold=2.0, relay=0.25, look=0.0, poll_seconds=0.0, train_seconds=(8.0, 8.0), megabytes=10.0,
    megabytes_a_second=10.0,
)  # fmt: skip


def test_one_site_by_hand():
    """0.5 sent, 0.75 handed out, 1.75 received, 9.75 trained, 10.75 uploaded, 11.0 there; seen at 11.0, folded 13.0.

    The ServerApp looks from 0.5 on, every 0.25 s.
    """
    found = simulate_round(1, COSTS)
    assert found.last_arrival == pytest.approx(11.0)
    assert found.seconds == pytest.approx(13.0)
    assert (found.most_waiting, found.most_polling) == (1, 1)
    assert found.busy["ServerApp"] == pytest.approx(2.5 / 13)
    assert found.busy["SuperLink"] == pytest.approx(0.5 / 13)
    assert found.busy["link"] == pytest.approx(1.0 / 13)


def test_the_link_carries_one_message_after_another():
    free = dataclasses.replace(COSTS, send=0.0, fold=0.0, relay=0.0)
    assert simulate_round(50, free).last_arrival == pytest.approx(50 + 8 + 1)  # down in turn; the way up is then spread


def test_a_slow_fold_makes_a_queue():
    slow = dataclasses.replace(COSTS, megabytes_a_second=1e9, relay=0.0, fold=2.0)
    found = simulate_round(20, slow)
    assert found.most_waiting == 20  # all train equally long, so all are there at once
    assert found.seconds == pytest.approx(0.5 * 20 + 8 + 20 * 2.0, abs=0.26)


def test_looks_at_what_is_not_there_hold_the_folding_up():
    looking = dataclasses.replace(COSTS, fold=0.0, look=0.1)
    assert simulate_round(30, looking).seconds > simulate_round(30, dataclasses.replace(looking, look=0.0)).seconds


def test_draws_repeat_and_seeds_differ():
    drawn = dataclasses.replace(COSTS, train_seconds=(1.0, 90.0), poll_seconds=3.0)
    assert simulate_round(10, drawn, 1) == simulate_round(10, drawn, 1) != simulate_round(10, drawn, 2)
