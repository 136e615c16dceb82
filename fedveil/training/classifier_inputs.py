"""Inputs for a classifier that reads token IDs: right-padded batches, and single examples for their gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fedveil.data import token_limits
from fedveil.errors import TaskError
from fedveil.models.loaded_model import LoadedModel

__all__ = ["example_mask", "model_inputs", "pad_right", "report_truncated", "require_whole_attention"]

log = logging.getLogger("fedveil.data")


def report_truncated(kept: Sequence[int], whole: Sequence[int], given: int, context: int | None, model: str) -> None:
    """Log how many texts are truncated.

    Args:
        kept: the number of tokens of each text.
        whole: the number of tokens of each text before truncation.
        given: task.max-tokens.
        context: the maximum number of tokens that the base `model` reads; None if it sets no limit.

    Raises:
        TaskError: too many texts are truncated; see `token_limits.require_whole`.
    """
    if cut := sum(short < long for short, long in zip(kept, whole, strict=True)):
        lengths = np.array(whole)
        token_limits.require_whole(cut, lengths, given, context, model)
        remedy = token_limits.describe_remedy(lengths, max(kept), given, context, model)
        share = token_limits.describe_share(cut, len(kept))
        log.warning("task.max-tokens = %d: %s texts lose their end; %s", given, share, remedy)


def pad_right(rows: Sequence[Sequence[int]], padding: int) -> Int[Tensor, "rows length"]:
    """Return the rows as one tensor, right-padded with `padding`."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])


def model_inputs(ids: Tensor, mask: Tensor, types: Tensor | None) -> dict[str, Tensor]:
    """Return the arguments for the model's `forward`; `types` are token types, for a model that reads them."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs if types is None else {**inputs, "token_type_ids": types}


def example_mask(base: LoadedModel, ids: Int[Tensor, " length"], mask: Int[Tensor, " length"]) -> Tensor:
    """Return the attention mask for a batch of one example, in a form that torch.func supports.

    The library searches a two-dimensional mask for padding, which depends on values. A decoder needs no mask, because
    no token attends to the padding after it; an encoder uses a four-dimensional mask as is.
    """
    if base.is_causal:
        return torch.ones(1, len(ids), dtype=torch.long, device=ids.device)
    seen = mask.bool()[None, None, None, :].expand(1, 1, len(ids), len(ids))
    if base.model.config._attn_implementation == "eager":  # eager attention adds the mask
        return torch.zeros(seen.shape, device=ids.device).masked_fill(~seen, torch.finfo(torch.float32).min)
    return seen


def require_whole_attention(base: LoadedModel, name: str) -> None:
    """Raise TaskError for an encoder in which some layers attend only to nearby tokens, such as ModernBERT.

    Args:
        name: the value of task.model, for the error message.
    """
    layers = getattr(base.model.config, "layer_types", None) or ()
    if not base.is_causal and len(set(layers)) > 1:
        raise TaskError(
            "task.model: per-example gradients require an encoder in which each layer reads all tokens, but "
            f'"{name}" has layers of {" and ".join(sorted(set(layers)))}; use another base, or train without dp.*'
        )
