"""APRIL: a closed form that reconstructs an image from the gradient of a ViT's first attention layer.

Lu, Zhang, Zhao, Gu, Cheng: APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers. CVPR 2022, section 4.

If the embedded tokens z0 feed only the attention of block 0, with d = dL/d(q, k, v), one image and S patches:

    A = dL/dE_pos = d W          (S + 1) x D     W: the stacked weights of q, k, v, 3D x D
    G = dL/dW     = d^T z0            3D x D
    A^T z0 = W^T G                               biases drop out

Solve it for z0 by least squares, subtract E_pos, drop the class token, subtract the bias b of the patch embedding, and
solve E X^T = (z - b)^T for the patches X. If the image is known to be X = T u, solve E (T u)^T = (z - b)^T for u,
by LSMR (Fong, Saunders: SIAM J. Sci. Comput. 33(5), 2011).

| case | result |
|---|---|
| block without layer norm and residual (`replace_first_block`), batch 1, D >= S + 1 and D >= C P^2 | exact |
| the same, D < C P^2 | the minimum-norm patches: blurred |
| the same, an image upsampled by a known map T | exact if the small image has fewer values than S D |
| the standard pre-norm block | fails undefended: z0 reaches the loss through the residual, W through the layer norm |
| batch above 1 | fails: A is a sum over the batch |
| a mask on the gradient | fails: zeros are treated as data; an adversary who knows the mask may succeed |
| dL/dE_pos withheld (zeros) | the image of z0 = 0, no information |

The paper on random binary weights for ViT, whose method this repository tests, took the attack from a public
implementation in which the "ViT-S for APRIL" has the modified block. A run on the standard block therefore proves
nothing unless its undefended control succeeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor, nn
from torch.nn import functional

from fedveil.attacks.reconstruction.image_metrics import Image, join_patches

__all__ = ["PATCH_WEIGHT", "POSITION", "AprilBlock", "ImageUpsampling", "april_closed_form", "replace_first_block"]

Named = Mapping[str, Tensor]

_EXACT, _MOST_STEPS = 1e-12, 2000  # LSMR's relative tolerance, and its maximum number of steps

POSITION = r"embeddings\.position_embeddings"
PATCH_WEIGHT = r"patch_embeddings\.projection\.weight"
_PATCH_BIAS = r"patch_embeddings\.projection\.bias"
# transformers 5 has both names: q_proj since the attention classes were merged, query before that.
_SPELLINGS = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
_QKV = [rf"layers?\.0\..*\b({new}|{old})\.weight" for new, old in _SPELLINGS]


@dataclass(frozen=True)
class ImageUpsampling:
    """A linear map T from a small image to the model's input, such as bilinear resizing.

    Attributes:
        apply: T, for input (1, channels, height, width) in double precision.
        shape: shape of the small image, (channels, height, width).
    """

    apply: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int]

    def input_of(self, kernel: Tensor, tokens: Tensor) -> Image:
        """Return T u for the u that minimizes ||E T u - tokens||: kernel (D, C, P, P), tokens (S, D) without bias."""

        def embedded(flat: Tensor) -> Tensor:
            patches = functional.conv2d(self.apply(flat.reshape(1, *self.shape)), kernel, stride=kernel.shape[-1])
            return patches[0].flatten(1).T.flatten()

        unknowns = math.prod(self.shape)
        # The map is linear, so its transpose is the same at every u.
        transposed = torch.func.vjp(embedded, torch.zeros(unknowns, dtype=torch.float64))[1]
        operator = LinearOperator(
            (tokens.numel(), unknowns),
            matvec=lambda u: embedded(torch.from_numpy(u.ravel())).numpy(),
            rmatvec=lambda r: transposed(torch.from_numpy(r.ravel()))[0].numpy(),
            dtype=float,
        )
        solution = lsmr(operator, tokens.flatten().numpy(), atol=_EXACT, btol=_EXACT, maxiter=_MOST_STEPS)[0]
        return self.apply(torch.from_numpy(solution).reshape(1, *self.shape))[0]


class AprilBlock(nn.Module):
    """Attention followed by an MLP, both from the replaced block, without layer norms and residual connections."""

    attention: nn.Module
    mlp: nn.Module

    def __init__(self, block: Any):
        super().__init__()
        self.attention = block.attention
        self.mlp = block.mlp

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the block's output (batch, tokens, width)."""
        attended, _ = self.attention(hidden_states, attention_mask, **kwargs)
        output: Tensor = self.mlp(attended)
        return output


def replace_first_block(model: nn.Module) -> nn.Module:
    """Replace block 0 of a transformers ViT with an `AprilBlock`, in place, so that z0 feeds only the attention.

    Public implementations of APRIL attack this modified model, which is not a ViT used in practice. Parameters keep
    their names and values; the block's two layer norms are removed.
    """
    layers: Any = next(m for n, m in model.named_modules() if n.endswith(("vit.layers", "encoder.layer")))
    layers[0] = AprilBlock(layers[0])
    return model


def april_closed_form(
    gradients: Named, model: nn.Module, low: float = -1.0, high: float = 1.0, enlargement: ImageUpsampling | None = None
) -> Image:
    """Return the image that gives these gradients, clipped to [low, high]. Masked zeros count as data.

    Args:
        gradients: the gradients by parameter name; the attack uses those of the position embedding and of q, k and v
            in block 0.
        model: the ViT with the weights at which the gradients were computed.
        enlargement: the map from a smaller image to the model's input, if the adversary knows it.

    Raises:
        ValueError: a gradient is missing.
    """
    weights = dict(model.named_parameters())
    a = to_double(find_tensor(gradients, POSITION)).flatten(0, -2)
    w = torch.cat([to_double(find_tensor(weights, each)) for each in _QKV])
    g = torch.cat([to_double(find_tensor(gradients, each)) for each in _QKV])
    z0 = least_squares(a.T, w.T @ g)
    z = (z0 - to_double(find_tensor(weights, POSITION)).flatten(0, -2))[1:]  # row 0 is the class token
    kernel = to_double(find_tensor(weights, PATCH_WEIGHT))  # D x C x P x P
    tokens = z - to_double(find_tensor(weights, _PATCH_BIAS))  # S x D
    if enlargement:
        return enlargement.input_of(kernel, tokens).clamp(low, high)
    return assemble_patches(least_squares(kernel.flatten(1), tokens.T).T, model).clamp(low, high)


def find_tensor(tensors: Named, pattern: str) -> Tensor:
    """Return the only tensor whose name ends in the regular expression `pattern`. Raises ValueError otherwise.

    A lookup by index would not work, because the modified block has fewer tensors.
    """
    matches = [n for n in tensors if re.search(rf"(^|\.){pattern}$", n)]
    if len(matches) != 1:
        raise ValueError(
            f"exactly one of the {len(tensors)} tensors must be named {pattern}, found {matches or 'none'}"
        )
    return tensors[matches[0]]


def least_squares(a: Tensor, b: Tensor) -> Tensor:
    """Return the minimum-norm X that minimizes ||A X - B||, by singular values (gelsd), for A of any rank."""
    solution: Tensor = torch.linalg.lstsq(a, b, driver="gelsd").solution
    return solution


def to_double(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU in double precision, as gelsd requires."""
    return tensor.detach().double().cpu()


def assemble_patches(patches: Tensor, model: nn.Module) -> Image:
    """Assemble the image from flattened patches, with the sizes in the model's configuration."""
    config: Any = model.config
    size, patch = (s if isinstance(s, int) else s[0] for s in (config.image_size, config.patch_size))
    return join_patches(patches, config.num_channels, size, size, patch)
