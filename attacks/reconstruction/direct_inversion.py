"""Direct inversion: the closed form that also reads an image off an unmodified ViT.

The position embedding is added to the output of the patch embedding, so with one image
A[1:] = dL/dE_pos[1:] is also the gradient at that output, and with X the flattened patches (S x C P^2):

    dL/dE = A[1:]^T X        D x C P^2

Whatever comes after the embedding, layer norms and residuals too, plays no part. Solve it for X by least squares.

| case | result |
|---|---|
| batch 1, D >= S and A[1:] of rank S | exact |
| D < S | the patches of least norm |
| batch above 1 | fails: A and dL/dE are sums over the batch, and the product of sums is not the sum of products |
| a mask on the gradient | fails: the zeros are taken as data (see `gradient_match`) |
| dL/dE_pos withheld (zeros) | the zero image |
"""

from __future__ import annotations

from torch import nn

from fedveil.attacks.reconstruction.april import PATCH_WEIGHT, POSITION, Named, assemble, double, least_squares, named
from fedveil.attacks.reconstruction.images import Image


def direct_inversion(gradients: Named, model: nn.Module, low: float = -1.0, high: float = 1.0) -> Image:
    """The image whose gradients these are, clipped to [low, high]. Of the model only the sizes are used.

    Raises:
        ValueError: a gradient that is missing.
    """
    a = double(named(gradients, POSITION)).flatten(0, -2)[1:]
    kernel = double(named(gradients, PATCH_WEIGHT)).flatten(1)
    return assemble(least_squares(a.T, kernel), model).clamp(low, high)
