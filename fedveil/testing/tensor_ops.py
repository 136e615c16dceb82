"""Tensor operations whose cost is measured: masks, factorization, and the aggregation gap of averaged factors.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.ops.lora_algebra import aggregation_gap
from fedveil.ops.low_rank import factorize_matrix
from fedveil.ops.random_masks import expand_mask, pack_masked, unpack_masked

__all__ = [
    "aggregation_gap",
    "expand_mask",
    "factorize_matrix",
    "pack_masked",
    "unpack_masked",
]
