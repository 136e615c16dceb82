"""Records that share a history are charged together; the result is that of charging each by itself."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.contract.privacy import Adjacency, PrivacyBudget, Step
from fedveil.errors import BudgetError
from fedveil.privacy import accounting
from fedveil.privacy.ledger import PrivacyLedger

COUNTED = PrivacyBudget(math.inf, 1e-5, Adjacency.REPLACE_ONE)
STEPS = (Step("gaussian", 0, 0, 3.14159), Step("poisson", 50, 5, 2.71828))


def spent(path: Path) -> dict[str, dict]:
    groups = json.loads(path.read_text())["spent"]
    return {name: {Step(*step): count for step, count in history} for history, names in groups for name in names}


@settings(max_examples=10, deadline=None)
@given(
    charges=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abcdef"), max_size=8),
            st.dictionaries(st.sampled_from(STEPS), st.integers(1, 5), min_size=1),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_many_records_are_charged_as_each_by_itself(charges):
    naive: dict[str, Counter] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.json"
        for records, steps in charges:
            PrivacyLedger(path).charge(records, steps, COUNTED)
            for record in records:
                naive[record].update(steps)
        assert spent(path) == {record: dict(history) for record, history in naive.items()}


def test_the_file_does_not_grow_with_the_number_of_charges(tmp_path):
    ledger = PrivacyLedger(tmp_path / "s.json")
    names = ledger.names(("d", "train.jsonl", i) for i in range(500))
    sizes = []
    for _ in range(9):
        ledger.charge(names, {STEPS[1]: 1}, COUNTED)
        sizes.append((tmp_path / "s.json").stat().st_size)
    assert set(sizes) == {sizes[0]}
    assert sizes[0] / len(names) < 37


def test_a_budget_without_a_limit_is_counted_and_not_computed(tmp_path, monkeypatch):
    """A composition of sampled steps takes seconds. A limit beside it is still kept."""
    ledger, asked = PrivacyLedger(tmp_path / "s.json"), []

    def epsilon(charges, delta, neighbours) -> float:
        asked.append((dict(charges), delta))
        return 2.0

    monkeypatch.setattr(accounting, "compute_epsilon", epsilon)
    ledger.charge(["a"], {STEPS[1]: 3}, COUNTED)
    assert asked == []
    assert spent(tmp_path / "s.json") == {"a": {STEPS[1]: 3}}
    ledger.charge(["a"], {STEPS[1]: 3}, COUNTED, PrivacyBudget(2.0, 1e-6, Adjacency.REPLACE_ONE))
    assert asked == [({STEPS[1]: 6}, 1e-6)]
    with pytest.raises(BudgetError, match="expected at most epsilon 1.5"):
        ledger.charge(["a"], {STEPS[1]: 3}, COUNTED, PrivacyBudget(1.5, 1e-6, Adjacency.REPLACE_ONE))
    assert spent(tmp_path / "s.json") == {"a": {STEPS[1]: 6}}
