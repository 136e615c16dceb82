"""Fresh orthonormal factors of a matrix by one power iteration, and the gradient through them (DP-FPL, section 3.3).

u has orthonormal columns and v orthonormal rows, so u v is no approximation of p: all its singular values are 1. What is
meant to be p is u v + r with r = p - u v; the true rank-k part is u u^T p.

| case | result |
|---|---|
| p = 0, or of rank below k | QR completes the bases: orthonormal all the same, nothing is divided by 0 |
| k = b | `full_gradient` is the whole gradient, to rounding |
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Residual = bool | Literal["rank-k"]


def factorise(p: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration on p (b x d) from `start` (d x k): u (b x k) and v (k x d), both orthonormal."""
    u = _orthonormal(p @ start)
    return u, _orthonormal(p.T @ u).T


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram and Schmidt by QR, with their signs. Columns that add nothing become any that complete the basis."""
    q, r = torch.linalg.qr(columns)
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)
    signed: Tensor = q * signs
    return signed


def composed(p: Tensor, u: Tensor, v: Tensor, residual: Residual) -> Tensor:
    """What is forwarded for the private prompt: u v + r, which is p; u v; or u u^T p."""
    if residual == "rank-k":
        return u @ (u.T @ p)
    return u @ v + (p - u @ v) if residual else u @ v


def full_gradient(u: Tensor, v: Tensor, d_u: Tensor, d_v: Tensor) -> Tensor:
    """Eq. 4 (b x d): the projection of the gradient on col(u) + row(v), from the gradients of u and v."""
    return d_u @ v + u @ d_v - u @ (u.T @ d_u) @ v
