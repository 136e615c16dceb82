"""Clipping limits how far one record can move a sum.

Formal guarantees, for `clipped_sum` and `clipped_outer_sum` with a finite bound C, over all the tensors
given together:
1. A record's part has a norm of at most C, whatever its gradient. So adding or removing a record moves the sum by at
   most C, and replacing a record moves it by at most 2 C (up to fp32 rounding of the sum).
2. The parts are summed, not averaged over the drawn examples: the caller divides by a number that is not
   secret.

`clipped_mean` clips like the published DP-FPL code. It gives neither guarantee: one record can move the mean by 2 C.

| case | `clipped_sum` |
|---|---|
| norm at most C | the gradient does not change |
| norm 0 | zeros; nothing is divided by 0 |
| a NaN or an infinity anywhere in a record's gradients | that record's part is zero, in all tensors |
| no examples (an empty Poisson batch) | zeros of the tensors' shapes |
| C not finite, or not above 0 | ValueError |
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

PerRow = Mapping[str, Tensor]  # each of shape (rows, *shape)


def per_example_norms(gradients: PerRow) -> Tensor:
    """Return each example's norm over all tensors, (rows,) in fp64, so that squares of fp32 numbers cannot overflow."""
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for g in gradients.values()]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return norms


def clipped_sum(gradients: PerRow, bound: float) -> dict[str, Tensor]:
    """Return the sum over examples of g_i min(1, bound / |g_i|), with |g_i| over all tensors, by tensor name."""
    _check(bound)
    norms = per_example_norms(gradients)
    finite = torch.isfinite(norms)
    factors = torch.where(finite, bound / norms.clamp(min=bound), 0.0)
    sums = {}
    for name, gradient in gradients.items():
        rows = gradient.flatten(1)
        if not bool(finite.all()):
            rows = torch.where(finite[:, None], rows, 0.0)
        sums[name] = (factors.to(rows.dtype) @ rows).reshape(gradient.shape[1:])
    return sums


def clipped_outer_sum(left: Tensor, right: Tensor, bound: float) -> Tensor:
    """Return `clipped_sum` of the outer products left_i right_i^T, (n, m), without forming them: |l r^T| = |l| |r|.

    With a third dimension for parts, record i is sum_j left_ij right_ij^T, and its norm is the norm of this sum:
    |sum_j l_j r_j^T|^2 = sum_jk <l_j, l_k> <r_j, r_k>.
    """
    _check(bound)
    if left.dim() == 2:
        norms = per_example_norms({"": left}) * per_example_norms({"": right})
    else:
        gram = [side.double() @ side.double().mT for side in (left, right)]
        norms = (gram[0] * gram[1]).sum((1, 2)).clamp(min=0.0).sqrt()  # rounding may go below 0; NaN stays NaN
    finite = torch.isfinite(norms)
    factors = torch.where(finite, bound / norms.clamp(min=bound), 0.0)
    each = (-1, *(1 for _ in left.shape[1:]))
    rows = [torch.where(finite.reshape(each), side, 0.0).double() for side in (left, right)]
    flat = [side.flatten(0, -2) for side in (rows[0] * factors.reshape(each), rows[1])]
    return (flat[0].T @ flat[1]).to(left.dtype)


def clipped_mean(gradient: Tensor, rows: int, bound: float) -> Tensor:
    """Clip by batch: return the mean (the sum divided by `rows`), scaled down to norm `bound` if it is larger."""
    _check(bound)
    mean = gradient.sum(0) / rows
    norm: Tensor = torch.linalg.vector_norm(mean, dtype=torch.float64)
    return mean * (bound / norm.clamp(min=bound)).to(mean.dtype)


def _check(bound: float) -> None:
    if not 0 < bound < math.inf:
        raise ValueError(f"bound: expected a finite number above 0, found {bound}")
