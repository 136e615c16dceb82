"""A count sketch: a few numbers from which the norm of the difference between two tensors can later be estimated.

    s_b(x) = sum of sign_i x_i over the entries i in bucket b;   |s(x) - s(y)| estimates |x - y|

Charikar, Chen, Farach-Colton: Finding Frequent Items in Data Streams. 2002. A key determines each entry's bucket and
sign. Without the key, an adversary cannot construct a difference that the sketch misses.

| case | result |
|---|---|
| x = y | exactly 0 |
| x and y differ in many entries | the relative error is about 1 / sqrt(2 SIZE), 9 % |
| x and y differ in one entry | exact |
| a NaN or Inf | not finite |
"""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float64
from torch import Tensor

SIZE = 64  # number of buckets
_TABLE = 1 << 16  # entries with their own buckets and signs; beyond these, the table is rotated at random


def count_sketch(tensor: Tensor, key: bytes, name: str) -> Float64[Tensor, "64"]:
    """Return a tensor's sketch. The same key and name give each position the same bucket and sign."""
    out = torch.zeros(SIZE, dtype=torch.float64)
    flat = tensor.detach().flatten().cpu()
    digest = hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    n = min(len(flat), _TABLE)
    bucket = torch.randint(SIZE, (n,), generator=generator)
    sign = torch.randint(2, (n,), generator=generator).double() * 2 - 1
    for start in range(0, len(flat), _TABLE):
        part = flat[start : start + _TABLE].double()
        turn, flip = torch.randint(n, (2,), generator=generator).tolist()
        signs = sign.roll(turn)[: len(part)] * (1 - 2 * (flip % 2))
        out.index_add_(0, bucket.roll(turn)[: len(part)], part * signs)
    return out
