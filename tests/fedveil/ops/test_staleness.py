"""Late uploads against the formulas of Nguyen et al. 2022, entry by entry in plain Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.contract.contributions import ClientContributions, Contribution
from fedveil.ops.running_sums import RunningSums
from fedveil.ops.staleness import rebase_contributions, staleness_weight

NUMBER = st.floats(-8, 8, width=32)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def rebased(term: Contribution, staleness: int, kind, start, current, movable=("w",)) -> Contribution:
    terms = rebase_contributions(ClientContributions([term], {"a": 1.0}), staleness, kind, start, current, movable)
    assert terms.clear == {"a": 1.0}
    return next(iter(terms.tensors))


def test_the_weight_of_a_late_upload():
    assert [staleness_weight(tau) for tau in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
    with pytest.raises(ValueError, match="staleness: expected .* at least 0, found -1"):
        staleness_weight(-1)


def test_a_late_upload_by_hand():
    """Three steps late, s = 1/2: a site moved 1 to 3 while the server moved to 10, so it counts as 10 + 2 / 2."""
    start, current = {"w": tensor(1.0)}, {"w": tensor(10.0)}
    term = Contribution("w", tensor(3.0), 7.0)
    moved = rebased(term, 3, "weights", start, current)
    assert (moved.value.tolist(), moved.weight, moved.mask) == ([11.0], 7.0, None)
    for kind in ("gradients", "changes"):
        assert rebased(term, 3, kind, start, current).value.tolist() == [1.5]


def test_the_rounding_of_the_start_on_the_wire_is_no_change():
    """A site that receives 1 + 2^-10 in bf16 starts from 1; if training changes nothing, its upload changes nothing."""
    start, current = {"w": tensor(1 + 2**-10)}, {"w": tensor(10.0)}
    terms = ClientContributions([Contribution("w", torch.ones(1, dtype=torch.bfloat16), 1.0)])
    moved = rebase_contributions(terms, 3, "weights", start, current, ("w",), torch.bfloat16)
    assert next(iter(moved.tensors)).value.tolist() == [10.0]


def test_an_upload_for_the_current_state_is_the_same_object():
    terms = ClientContributions([Contribution("w", tensor(3.0), 1.0)])
    assert rebase_contributions(terms, 0, "weights", {}, {}, ()) is terms


def test_a_running_variance_is_mixed_and_stays_positive():
    """Moved like a weight, it would be 0.1 + (0.5 - 2) / 2 < 0."""
    term = Contribution("running_var", tensor(0.5), 1.0)
    moved = rebased(term, 3, "weights", {"running_var": tensor(2.0)}, {"running_var": tensor(0.1)})
    assert moved.value.tolist() == pytest.approx([0.3])


def test_a_mask_stays_and_half_precision_is_widened():
    mask = torch.tensor([True, False])
    term = Contribution("w", torch.tensor([3.0, 9.0], dtype=torch.bfloat16), 1.0, mask)
    moved = rebased(term, 3, "weights", {"w": tensor(1.0, 1.0)}, {"w": tensor(1.0, 1.0)})
    assert moved.mask is mask
    assert (moved.value.dtype, moved.value[0].item()) == (torch.float32, 2.0)


def test_a_term_that_the_state_does_not_have_is_refused():
    term = Contribution("other", tensor(3.0), 1.0)
    with pytest.raises(ValueError, match="other: the server's state has no such tensor"):
        rebased(term, 1, "weights", {"w": tensor(1.0)}, {"w": tensor(1.0)})


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), NUMBER), min_size=1, max_size=6),
    st.lists(NUMBER, min_size=6, max_size=6),
)
def test_the_mean_is_the_state_plus_the_mean_of_the_scaled_changes(uploads, states):
    """`states[tau]`: the server's weight tau steps ago. The twin adds n_k s_k Delta_k / sum n."""
    sums = RunningSums()
    for number, (tau, count, value) in enumerate(uploads):
        term = Contribution("w", tensor(value), float(count))
        terms = rebase_contributions(
            ClientContributions([term]), tau, "weights", {"w": tensor(states[tau])}, {"w": tensor(states[0])}, {"w"}
        )
        sums.add(f"site {number}", count, terms)
    total = sum(count for _, count, _ in uploads)
    steps = sum(count / math.sqrt(1 + tau) * (value - states[tau]) for tau, count, value in uploads)
    assert sums.mean("w").item() == pytest.approx(states[0] + steps / total, rel=1e-5, abs=1e-4)
