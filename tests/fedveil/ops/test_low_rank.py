"""The smallest pair of factors of a matrix, and what has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.ops.low_rank import factor_pair


def matrix(b: int, d: int, rank: int, seed: int, noise: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right, more = (torch.randn(shape, generator=generator) for shape in ((b, rank), (rank, d), (b, d)))
    return left @ right + noise * more


def found(p, most, error):
    return factor_pair(p, most, error, torch.Generator().manual_seed(9))


@settings(max_examples=60, deadline=None)
@given(b=st.integers(1, 20), d=st.integers(1, 20), rank=st.integers(0, 6), seed=st.integers(0, 10**6))
def test_a_matrix_of_low_rank_is_its_pair_and_no_pair_is_wider(b, d, rank, seed):
    p = matrix(b, d, rank, seed)
    error = 1e-6 * float(p.norm())
    pair = found(p, rank, error)
    if pair is None:  # a singular value so small beside the others that fp32 cannot tell it from nothing
        pair = found(p.double(), rank, error)
    left, right = pair
    assert left.shape[1] == len(right) <= min(rank, b, d)
    assert float((p.double() - left.double() @ right.double()).norm()) <= 1.1 * error


def test_the_rank_is_the_smallest_that_keeps_the_error():
    p = torch.diag(torch.tensor([8.0, 4.0, 1.0, 0.5]))
    assert found(p, 4, 1e-4)[0].shape == (4, 4)
    assert found(p, 4, 1.2)[0].shape == (4, 3)  # half of the error is for what the sketch loses
    assert found(p, 4, 2.5)[0].shape == (4, 2)
    assert found(p, 1, 2.5) is None
    assert found(p, 4, 10.0)[0].shape == (4, 0)


@pytest.mark.parametrize("most", [0, 3, 11])
def test_a_matrix_of_full_rank_has_none(most):
    assert found(matrix(12, 15, 12, 1), most, 1e-3) is None
    assert found(matrix(12, 15, 2, 1, noise=0.1), most, 1e-3) is None


def test_nothing_has_a_pair_of_rank_0():
    left, right = found(torch.zeros(3, 5), 2, 0.0)
    assert (left.shape, right.shape) == ((3, 0), (0, 5))
