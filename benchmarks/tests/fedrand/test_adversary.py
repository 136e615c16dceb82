"""The attacks of a seed: the rows with which a model's members are compared."""

from __future__ import annotations

import numpy as np
import pytest

from fedveil_bench.fedrand import adversary


class _Fake:
    """A base whose scores are the rows themselves."""

    def scores(self, attacks, task, weights, rows, generated_rows=0):
        return {"loss": np.array(rows, dtype=float), "image 10%": np.zeros(len(rows))}


def test_an_attack_is_scored_against_the_right_non_members():
    others = adversary.NonMembers([1.0, 2.0], ["x", "y"], [9.0, 9.0, 9.0])
    settings = {"generated_rows": 0, "shifted": ["loss"], "rows": 100}
    made = adversary.FedRandAdversary(_Fake(), None, others, settings, 0)
    found = made.attacked(None, [adversary.AttackTarget((), {}, [3.0, 1.5, 1.5, 0.0])])
    assert found["loss"].value == pytest.approx((2 + 1 + 1 + 0) / 8)
    assert found["shifted loss"].value == 0.0
    assert found["image 10%"].value == 0.5
    assert set(found) == {"loss", "image 10%", "shifted loss"}
    capped = adversary.FedRandAdversary(_Fake(), None, others, settings | {"rows": 2}, 0)
    assert capped.attacked(None, [adversary.AttackTarget((), {}, [3.0, 3.0, 3.0])])["loss"].count == 2
