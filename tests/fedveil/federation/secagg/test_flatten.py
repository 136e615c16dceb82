"""A method's terms as one vector: places by hand, what a site may not send, and what a sum may not be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import pytest
import torch

from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.secagg.fixed_point import FixedPointRing
from fedveil.federation.secagg.flatten import FixedPointSums, VectorLayout
from fedveil.strategies.fedavg import FedAvg

SPEC = {"b": ParamSpec((2, 3)), "a": ParamSpec((2,)), "c": ParamSpec(())}
RING = FixedPointRing(32, 3, 5, 2.0)
S = 71582788  # integers a unit, see test_fixed_point.py
MASK = torch.tensor([[True, False, True], [True, False, True]])  # by column


@final
@dataclass(frozen=True)
class Said:
    """A method that adds up what it is told."""

    terms_: tuple[Contribution, ...]
    shapes: dict
    clear: dict

    def aggregate_shapes(self, spec, round_):
        return self.shapes

    def layout(self, spec):
        return MessageLayout(())

    def contributions(self, payload, num_examples, spec, ctx):
        return ClientContributions(self.terms_, self.clear)


def exchange(*terms: Contribution, shapes=None, clear=None) -> MessageExchange:
    message_exchange = MessageExchange(FedAvg(), "said", SPEC)
    shapes = {"b": (1, 3), "a": (), "c": ()} if shapes is None else shapes
    object.__setattr__(message_exchange, "method", Said(terms, shapes, clear or {}))
    return message_exchange


def column(value: float = 1.0, weight: float = 2.0, mask=MASK, name: str = "b") -> Contribution:
    return Contribution(name, torch.full((2, 3), value), weight, mask)


def vector(ex: MessageExchange, examples: int = 2, scalars=None):
    payload = Payload({}, "", scalars or {})
    return VectorLayout.from_exchange(ex, 0).vector(ex, payload, examples, 0, RING)


def test_a_vector_by_hand():
    """Sorted: a (2 and 1 weight), b (6 and 3 weights, one a column), c (left out: 1 and 1), and the examples."""
    ex = exchange(column(0.5), Contribution("a", torch.tensor([1.0, -1.0]), 2.0))
    slots = VectorLayout.from_exchange(ex, 0)
    assert [(s.name, s.start, s.end) for s in slots.slots] == [("a", 0, 3), ("b", 3, 12), ("c", 12, 14)]
    assert slots.length == 15
    flat_vector, clipped = vector(ex)
    assert clipped == 0
    wanted = [2 * S, -2 * S, 2, S, 0, S, S, 0, S, 2, 0, 2, 0, 0, 2]
    assert flat_vector.view("<i4").tolist() == wanted


def test_examples_count_for_at_most_the_largest_weight():
    flat_vector, _ = vector(exchange(), 400)
    assert flat_vector.tolist() == [0] * 14 + [5]


def test_sums_by_hand():
    ex = exchange(column(0.5, 3.0), Contribution("a", torch.tensor([1.0, -1.0]), 3.0))
    other = exchange(Contribution("b", torch.full((2, 3), -1.0), 1.0), Contribution("a", torch.tensor([0.0, 1.0]), 1.0))
    total = vector(ex, 3)[0] + vector(other, 1)[0]
    sums = FixedPointSums(VectorLayout.from_exchange(ex, 0), RING, total, {"x": {}, "y": {}})
    assert (sums.examples, sums.weight("a"), "a" in sums, "c" in sums, "d" in sums) == (4, 4.0, True, False, False)
    assert sums.weight("d") == 0.0
    torch.testing.assert_close(sums.mean("a"), torch.tensor([0.75, -0.5]), atol=1e-8, rtol=0)
    wanted = torch.tensor([0.125, -1.0, 0.125]).expand(2, 3)
    torch.testing.assert_close(sums.mean("b"), wanted, atol=1e-8, rtol=0)
    torch.testing.assert_close(sums.take("b"), wanted, atol=1e-8, rtol=0)
    assert sums.moved("b").tolist() == [[True] * 3] * 2
    with pytest.raises(ValueError, match="several weights"):
        sums.weight("b")
    old = {"a": torch.zeros(2, dtype=torch.bfloat16), "c": torch.tensor(7.0)}
    means = sums.means(old)
    assert means["a"].dtype == torch.bfloat16
    assert means["c"] is old["c"]
    sums.check(1.3)
    with pytest.raises(WireError, match="a: expected a sum"):
        sums.check(0.4)


def test_an_entry_that_nobody_counts_has_no_mean():
    ex = exchange(column(0.5, 3.0))
    sums = FixedPointSums(VectorLayout.from_exchange(ex, 0), RING, vector(ex, 3)[0], {"x": {}})
    assert sums.mean("b").tolist() == [[0.5, 0.0, 0.5]] * 2
    assert sums.moved("b").tolist() == [[True, False, True]] * 2


@pytest.mark.parametrize(
    ("terms", "match"),
    [
        ([Contribution("d", torch.zeros(2), 1.0)], "d: expected a term"),
        ([Contribution("a", torch.zeros(3), 1.0)], "a: expected a term"),
        ([Contribution("a", torch.zeros(2), 1.0)] * 2, "a: expected a term"),
        ([Contribution("a", torch.zeros(2), 1.5)], "whole weight"),
        ([Contribution("a", torch.zeros(2), 6.0)], "a: weight"),
        ([Contribution("a", torch.tensor([0.0, float("nan")]), 1.0)], "a: the values contain NaN"),
        ([Contribution("a", torch.zeros(2), 1.0, torch.tensor([True, False]))], "a: its mask varies within an entry"),
        (
            [column(mask=~MASK.roll(1, 1) & torch.tensor([[True] * 3, [False] * 3]))],
            "b: its mask varies within an entry",
        ),
    ],
)
def test_a_term_that_is_not_as_declared(terms, match):
    with pytest.raises(ConfigError, match=match):
        vector(exchange(*terms))


def test_words_in_clear_are_the_payloads_own_or_the_method_is_refused():
    vector(exchange(clear={"round": "1"}), scalars={"round": "1"})
    for scalars in ({}, {"round": "2"}):
        with pytest.raises(ConfigError, match="said, which sends round of each site in the clear"):
            vector(exchange(clear={"round": "1"}), scalars=scalars)


def sums_of(total, sites: int) -> FixedPointSums:
    return FixedPointSums(
        VectorLayout.from_exchange(exchange(), 0), RING, np.array(total, "<u4"), {str(i): {} for i in range(sites)}
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({14: 1}, "examples"),
        ({14: 11}, "examples"),
        ({14: 2**32 - 1}, "examples"),
        ({2: 11}, "a: expected weights of at most 10"),
        ({9: 2**31}, "b: expected weights of at most 10"),
    ],
)
def test_weights_that_two_sites_cannot_have_sent(change, match):
    total = [0] * 14 + [4]
    sums_of(total, 2)
    for place, value in change.items():
        total[place] = value
    with pytest.raises(WireError, match=match):
        sums_of(total, 2)


@pytest.mark.parametrize("value", [2.001, -2.001, 6.0])
def test_a_sum_beyond_the_bound_is_judged(value):
    """One site lies: it sends more than the bound permits under the weight that it says. Rounding adds less than 1."""
    total = [0] * 14 + [4]
    total[0], total[2] = round(value * 2000 * S / 1000) % 2**32, 1
    sums = sums_of(total, 2)
    with pytest.raises(WireError, match="a: expected a sum of values within"):
        sums.check(1e9)


def test_values_without_any_weight_are_judged_too():
    total = [0] * 14 + [4]
    total[3] = 3 * S
    with pytest.raises(WireError, match="b: expected a sum"):
        sums_of(total, 2).check(1e9)
