"""The tokens of a row, read off the span of one LoRA gradient: which tokens of the vocabulary lie in it, by position.

After Petrov, Dimitrov, Baader, Müller, Vechev: DAGER: Exact Gradient Inversion for Large Language Models. NeurIPS 2024,
arXiv 2405.15586. The text was not at hand: its check of single tokens at the first layer is from memory, and what
follows is made for a pair of factors. Whole sentences, by deeper layers, are not searched.

At an adapted layer that reads the embeddings alone, y = W x + s B A x, with x_t (d) the input of token t at position t:

    dL/dA = s sum_t (B^T dL/dy_t) x_t^T        (r x d): all its rows lie in the span of the x_t
    T different x_t, T < r, B of full rank     the rows span all of it, if the errors are independent
    token v stands at position p               x(v, p) lies in the span: ||x - P x|| <= OUTSIDE ||x||

x(v, p) depends on the public base alone, so every token of the vocabulary is tried at every position.

| case | result |
|---|---|
| one step of SGD, fewer different tokens than the rank | every token at its place |
| as many or more tokens than the rank | none: the span holds combinations of them alone |
| B = 0, as before any training | none: dL/dA is 0 |
| several rows | the tokens of all of them at each position, while they are fewer than the rank |
| AdamW | none: its first step is the sign of the gradient, which spans another space |
| A withheld, noise on the gradient (`dp.noise-multiplier`), another site's upload | none |

Adaptive note: a rank below the number of tokens in a batch is what keeps this off, not the method; a server that makes
the pair itself gets around that (`imprint`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedveil.attacks.reconstruction import imprint
from fedveil.contract.param_spec import Weights
from fedveil.training.adapter_task import AdaptedTask

__all__ = [
    "OUTSIDE",
    "first_layer",
    "gradient_span",
    "read_tokens",
    "reads_embeddings",
    "recovered_share",
    "token_inputs",
]

OUTSIDE = 1e-3  # of an input's norm that may lie outside the span: rounding of single precision
_ROWS = 4096  # that a base is asked about at once
_RANK = 1e-5  # singular values below this part of the largest are rounding


def gradient_span(moved: Tensor) -> Tensor:
    """(rank, d) orthonormal rows of the span of a move or gradient of A; none where it is 0, not finite, or full.

    A span of as many directions as A has rows holds combinations of the inputs, and says nothing of one of them.
    """
    none = torch.zeros(0, moved.shape[1], dtype=torch.float64)
    if not moved.any() or not moved.isfinite().all():
        return none
    _, sizes, rows = torch.linalg.svd(moved.double(), full_matrices=False)
    basis: Tensor = rows[sizes > _RANK * sizes[0]]
    return basis if len(basis) < len(moved) else none


def read_tokens(moved: Tensor, places: Sequence[Tensor]) -> list[set[int]]:
    """Return the tokens that lie in the span, at each position.

    Args:
        moved: (r, d) where the site left the layer's A, less where it was; or a gradient of it.
        places: the `token_inputs` of each position. They depend on the public base alone, so they serve every upload.
    """
    basis = gradient_span(moved)
    if not len(basis):
        return [set() for _ in places]
    outside = [(x - x @ basis.T @ basis).norm(dim=1) / x.norm(dim=1) for x in places]
    return [set((part <= OUTSIDE).nonzero().flatten().tolist()) for part in outside]


def recovered_share(found: Sequence[set[int]], row: Sequence[int]) -> float:
    """The share of a row's tokens that were found at their places. `row` is of as many tokens, or more."""
    return sum(token in at for at, token in zip(found, row, strict=False)) / len(found)


def token_inputs(task: AdaptedTask, weights: Weights, layer: str, position: int) -> Tensor:
    """(vocabulary, d) what the layer gets for each token at a position. What stands before it does not matter."""
    vocabulary = int(task.base.model.config.vocab_size)
    rows = [[0] * position + [token] for token in range(vocabulary)]
    return torch.cat(
        [imprint.layer_inputs(task, weights, layer, rows[i : i + _ROWS])[:, -1] for i in range(0, vocabulary, _ROWS)]
    )


def first_layer(task: AdaptedTask, weights: Weights) -> str | None:
    """The first module with a pair whose input is each token's embedding alone; None where there is none."""
    pairs = (name.removesuffix(".lora_A") for name in weights if name.endswith(".lora_A"))
    return next((layer for layer in pairs if reads_embeddings(task, weights, layer)), None)


def reads_embeddings(task: AdaptedTask, weights: Weights, layer: str) -> bool:
    """Return whether a layer's input for a token is independent of the preceding token."""
    one, other = (imprint.layer_inputs(task, weights, layer, [[before, 1]])[0, -1] for before in (0, 2))
    return torch.equal(one, other)
