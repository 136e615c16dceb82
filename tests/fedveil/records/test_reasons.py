"""Reasons of many sites, for people."""

from __future__ import annotations

from fedveil.records.reasons import by_reason


def test_sites_with_one_reason_stand_before_it_in_their_order():
    assert by_reason({"east": "a", "north": "b", "west": "a"}) == ["east, west: a", "north: b"]
    assert by_reason({}) == []


def test_of_many_sites_and_many_reasons_the_rest_is_counted():
    assert by_reason({f"s{i}": "same" for i in range(4)}, most=2) == ["s0, s1, and 2 more: same"]
    assert by_reason({"a": "1", "b": "2", "c": "3", "d": "3"}, most=2) == ["a: 1", "b: 2", "and 2 more"]
