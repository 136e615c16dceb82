"""Direct inversion: a closed form that recovers an image even from an unmodified ViT.

The position embedding is added to the output of the patch embedding. With one image, A[1:] = dL/dE_pos[1:]
is therefore also the gradient at that output. With X the flattened patches (S x C P^2):

    dL/dE = A[1:]^T X        D x C P^2

The layers after the embedding, including layer norms and residuals, do not matter. Solve for X by least
squares.

| case | result |
|---|---|
| batch 1, D >= S and A[1:] of rank S | exact |
| D < S | the minimum-norm patches |
| batch above 1 | fails: A and dL/dE are sums over the batch, and the product of sums is not the sum of products |
| a mask on the gradient | fails: the zeros are treated as data (see `gradient_matching`) |
| dL/dE_pos withheld (zeros) | the zero image |
"""

from __future__ import annotations

from torch import nn

from fedveil.attacks.reconstruction.april import (
    PATCH_WEIGHT,
    POSITION,
    Named,
    assemble_patches,
    find_tensor,
    least_squares,
    to_double,
)
from fedveil.attacks.reconstruction.image_metrics import Image

__all__ = ["direct_inversion"]


def direct_inversion(gradients: Named, model: nn.Module, low: float = -1.0, high: float = 1.0) -> Image:
    """Return the image that gives these gradients, clipped to [low, high]. Only the sizes in `model` are used.

    Raises:
        ValueError: a gradient is missing.
    """
    a = to_double(find_tensor(gradients, POSITION)).flatten(0, -2)[1:]
    kernel = to_double(find_tensor(gradients, PATCH_WEIGHT)).flatten(1)
    return assemble_patches(least_squares(a.T, kernel), model).clamp(low, high)
