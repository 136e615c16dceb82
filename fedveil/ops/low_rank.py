"""Orthonormal factors of a matrix from one power iteration, and the gradient through them (DP-FPL, section 3.3).

u has orthonormal columns and v orthonormal rows, so all singular values of u v are 1, and u v does not approximate p.
The sum u v + r with r = p - u v is p; the true rank-k part is u u^T p.

| case | result |
|---|---|
| p = 0, or rank below k | QR completes the bases: the factors are still orthonormal, with no division by 0 |
| k = b | `full_gradient` is the whole gradient, up to rounding |

`factor_pair` uses a sketch to find the smallest pair of factors whose product is a given matrix (Halko, Martinsson,
Tropp 2011, algorithms 4.1 and 5.1), and measures the error; it returns None if there is no such pair.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

_MORE = 8  # extra sketch columns: without them, rounding would lose directions that the sketch barely covers
Residual = bool | Literal["rank-k"]


def factorize_matrix(p: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Run one power iteration on p (b x d) from `start` (d x k); return orthonormal u (b x k) and v (k x d)."""
    u = _orthonormal(p @ start)
    return u, _orthonormal(p.T @ u).T


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormalize by QR, with Gram-Schmidt's signs. Dependent columns are replaced to complete the basis."""
    q, r = torch.linalg.qr(columns)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)
    signed: Tensor = q * signs
    return signed


def compose_factors(p: Tensor, u: Tensor, v: Tensor, residual: Residual) -> Tensor:
    """Return the private prompt for the forward pass, by `residual`: u v + r = p (true), u v (false), u u^T p
    ("rank-k")."""
    if residual == "rank-k":
        return u @ (u.T @ p)
    return u @ v + (p - u @ v) if residual else u @ v


def full_gradient(u: Tensor, v: Tensor, d_u: Tensor, d_v: Tensor) -> Tensor:
    """Return eq. 4 (b x d): the gradient's projection onto col(u) + row(v), from the gradients of u and v."""
    return d_u @ v + u @ d_v - u @ (u.T @ d_u) @ v


def factor_pair(
    p: Float[Tensor, "b d"], most: int, error: float, generator: torch.Generator
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "k d"]] | None:
    """Find the pair with the smallest rank k <= `most` and |p - left right| <= `error` (Frobenius), using a sketch.

    k may be 0. Returns None if the sketch finds no such pair. Time: about 4 b d (`most` + 8) operations.
    """
    if float(torch.linalg.vector_norm(p)) <= error:
        return p[:, :0], p[:0]
    width = min(most + _MORE, *p.shape)
    basis = _orthonormal(p @ torch.randn(p.shape[1], width, generator=generator).to(p))
    u, s, right = torch.linalg.svd(basis.T @ p, full_matrices=False)
    lost = s.square().flip(0).cumsum(0).flip(0).sqrt()  # the error if the values from here on are dropped
    if (k := int((lost > error / 2).sum())) > most:
        return None
    left, right = basis @ (u[:, :k] * s[:k]), right[:k]
    return (left, right) if float(torch.linalg.vector_norm(p - left @ right)) <= error else None
