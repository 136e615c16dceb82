"""Recover an example's tokens from the span of one LoRA gradient, by testing every token in the vocabulary.

After Petrov, Dimitrov, Baader, Müller, Vechev: DAGER: Exact Gradient Inversion for Large Language Models. NeurIPS 2024,
arXiv 2405.15586. We did not have the paper: its test of single tokens at the first layer is from memory, and this
version is for a pair of factors. It does not search whole sentences with deeper layers.

At an adapted layer that reads only the embeddings, y = W x + s B A x, with x_t (d) the input of token t at position t:

    dL/dA = s sum_t (B^T dL/dy_t) x_t^T        (r x d): all its rows lie in the span of the x_t
    T different x_t, T < r, B of full rank     the rows span all x_t if the errors are independent
    token v is at position p                   x(v, p) lies in the span: ||x - P x|| <= OUTSIDE ||x||

x(v, p) depends only on the public base, so the attack tests every vocabulary token at every position.

| case | result |
|---|---|
| one step of SGD, fewer different tokens than the rank | every token at its position |
| as many or more tokens than the rank | none: the span contains only combinations of them |
| B = 0, as before any training | none: dL/dA is 0 |
| several examples | all their tokens at each position, if they are fewer than the rank |
| AdamW | none: its first step is the gradient's sign, which spans a different space |
| A withheld, noise on the gradient (`dp.noise-multiplier`), another site's upload | none |

Adaptive note: the only protection is a rank below the number of tokens in a batch, not the method. A server that crafts
the pair avoids that limit (`imprint`).
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

OUTSIDE = 1e-3  # fraction of an input's norm that may lie outside the span: rounding in single precision
_ROWS = 4096  # tokens per forward pass of the base
_RANK = 1e-5  # singular values below this fraction of the largest are rounding


def gradient_span(moved: Tensor) -> Tensor:
    """Return orthonormal rows (rank, d) of the span of A's change or gradient; none if it is 0, not finite, or full.

    A span with as many directions as A has rows contains combinations of the inputs, and reveals no single input.
    """
    none = torch.zeros(0, moved.shape[1], dtype=torch.float64)
    if not moved.any() or not moved.isfinite().all():
        return none
    _, sizes, rows = torch.linalg.svd(moved.double(), full_matrices=False)
    basis: Tensor = rows[sizes > _RANK * sizes[0]]
    return basis if len(basis) < len(moved) else none


def read_tokens(moved: Tensor, places: Sequence[Tensor]) -> list[set[int]]:
    """Return, for each position, the tokens whose inputs lie in the span of `moved`.

    Args:
        moved: (r, d) change of the layer's A at the site, or its gradient.
        places: the `token_inputs` at each position. They depend only on the public base, so all uploads can share them.
    """
    basis = gradient_span(moved)
    if not len(basis):
        return [set() for _ in places]
    outside = [(x - x @ basis.T @ basis).norm(dim=1) / x.norm(dim=1) for x in places]
    return [set((part <= OUTSIDE).nonzero().flatten().tolist()) for part in outside]


def recovered_share(found: Sequence[set[int]], row: Sequence[int]) -> float:
    """Return the fraction of an example's tokens found at their positions. `row` must not be shorter than `found`."""
    return sum(token in at for at, token in zip(found, row, strict=False)) / len(found)


def token_inputs(task: AdaptedTask, weights: Weights, layer: str, position: int) -> Tensor:
    """Return the layer's input for each token at a position, shape (vocabulary, d). Earlier tokens do not matter."""
    vocabulary = int(task.base.model.config.vocab_size)
    rows = [[0] * position + [token] for token in range(vocabulary)]
    return torch.cat(
        [imprint.layer_inputs(task, weights, layer, rows[i : i + _ROWS])[:, -1] for i in range(0, vocabulary, _ROWS)]
    )


def first_layer(task: AdaptedTask, weights: Weights) -> str | None:
    """Return the first module with a pair that reads only each token's embedding, or None if no module does."""
    pairs = (name.removesuffix(".lora_A") for name in weights if name.endswith(".lora_A"))
    return next((layer for layer in pairs if reads_embeddings(task, weights, layer)), None)


def reads_embeddings(task: AdaptedTask, weights: Weights, layer: str) -> bool:
    """Return whether a layer's input for a token is independent of the preceding token."""
    one, other = (imprint.layer_inputs(task, weights, layer, [[before, 1]])[0, -1] for before in (0, 2))
    return torch.equal(one, other)
