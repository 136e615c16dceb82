"""Packing of several short examples into one sequence, for training steps on the same examples with less padding.

Attention stays within an example. Positions restart at each example, and no mask is passed: for the model families in
FAMILIES, transformers derives the block mask from the positions. Tests compare the loss and gradient of packed and
unpacked examples. Each padding token is treated as a separate example that is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fedveil.data.batches import TokenBatch, TokenExample
from fedveil.errors import ConfigError

FAMILIES = ("gpt2", "llama")  # "model_type" in the model config


def check_packing(family: str, name: str) -> None:
    """Raise ConfigError unless models of this family keep packed examples separate; `name` is the model's name."""
    if family not in FAMILIES:
        raise ConfigError(
            "train.packing: attention is known to stay within one example only in the families "
            f'{", ".join(FAMILIES)}, not in "{family}" ({name}); set train.packing = false, or use train.bucketing'
        )


def fit_sequences(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack examples of these lengths, at most `room` each, into sequences of at most `room` tokens.

    Uses first-fit packing, longest example first.
    """
    sequences: list[list[int]] = []
    left: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((i for i, free in enumerate(left) if free >= lengths[row]), len(left))
        if at == len(left):
            sequences.append([])
            left.append(room)
        sequences[at].append(row)
        left[at] -= lengths[row]
    return sequences


def collate_packed(
    rows: Sequence[TokenExample],
    padding: int,
    room: int,
    whole: bool = False,
    width: Callable[[int], int] = lambda longest: longest,
) -> TokenBatch:
    """Return one batch of `rows`, packed into sequences of up to `room` tokens; otherwise like `batches.collate_batch`.

    The batch's `mask` is 1 except at padding. The model receives the positions ("position_ids" in `inputs`) instead.
    """
    sequences = [[rows[i] for i in chosen] for chosen in fit_sequences([row.length for row in rows], room)]
    length = width(max(sum(row.length for row in sequence) for sequence in sequences))
    ids, mask, places = (torch.full((len(sequences), length), value) for value in (padding, 0, 0))
    positions: list[int] = []
    wanted: list[int] = []
    for i, sequence in enumerate(sequences):
        at = 0
        for row in sequence:
            end, targets = at + row.length, row.targets(whole)
            ids[i, at:end], mask[i, at:end] = torch.tensor(row.ids), 1
            places[i, at:end] = torch.arange(row.length)
            positions.extend(i * length + at + target - 1 for target in targets)
            wanted.extend(row.ids[target] for target in targets)
            at = end
    # torch would create a float tensor from an empty list.
    where, target = (torch.tensor(values, dtype=torch.int64) for values in (positions, wanted))
    return TokenBatch(ids, mask, where, target, sum(row.length for row in rows), {"position_ids": places})
