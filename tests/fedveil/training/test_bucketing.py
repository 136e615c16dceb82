"""Buckets: batches group rows by length, and contain every row once per epoch."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from fedveil.data import batches
from fedveil.data.batches import TokenExample
from fedveil.rng import RandomStream
from tests.fedveil.training.small import KEY, apart


def spread(count: int) -> list[TokenExample]:
    generator = torch.Generator().manual_seed(141421)
    lengths = torch.randint(8, 90, (count,), generator=generator).tolist()
    return [TokenExample([i] * length, 3) for i, length in enumerate(lengths)]


def padding(chosen: list[list[TokenExample]]) -> int:
    return sum(sum(max(len(r.ids) for r in batch) - len(row.ids) for row in batch) for batch in chosen)


def test_bucketing_pads_less_and_takes_every_row_once_an_epoch(configured):
    uneven = spread(531)  # 66 batches of 8 and one of 3; three windows, the last one short

    def epochs(key: bytes, **keys: object) -> list[list[list[TokenExample]]]:
        local = configured(train__batch_size=8, train__epochs=2, **keys).trainer(uneven, RandomStream(key))
        drawn = [list(batch) for batch in local._batches()]
        assert len(drawn) == 134
        return [drawn[:67], drawn[67:]]

    plain, bucketed = epochs(KEY), epochs(KEY, train__bucketing=True)
    for epoch in bucketed:
        assert Counter(row.ids[0] for batch in epoch for row in batch) == Counter(range(531))
        assert [len(batch) for batch in epoch] == [8] * 66 + [3]
        assert padding(epoch) < 0.2 * padding(plain[0])
        means = [sum(len(row.ids) for row in batch) / len(batch) for batch in epoch]
        assert 20 < sum(later < earlier for earlier, later in itertools.pairwise(means)) < 46  # no sorted epoch
    assert bucketed[0] != bucketed[1]
    assert epochs(KEY, train__bucketing=True) == bucketed
    assert epochs(bytes(32), train__bucketing=True) != bucketed


def test_bucketing_leaves_the_last_short_batch_to_chance():
    """Sorted rows would end with the longest ones of a window, and these would count most in a mean over batches."""
    uneven = spread(70)
    mean = sum(row.length for row in uneven) / 70
    short = [
        uneven[i].length
        for seed in range(60)
        for i in batches.epoch_order(uneven, 8, torch.Generator().manual_seed(seed), True)[64:]
    ]
    assert abs(sum(short) / len(short) - mean) < 5  # 360 draws, of a standard deviation of 24


def test_bucketing_and_accumulation_keep_batches_whole(configured):
    """A step's batches are those that were cut: rows of like length stay together."""
    local = configured(train__batch_size=4, train__gradient_accumulation_steps=3, train__bucketing=True).trainer(
        spread(62), RandomStream(KEY)
    )
    steps = [local._collated(rows) for rows in local._batches()]
    assert [[len(batch.ids) for batch in step] for step in steps] == [[4, 4, 4]] * 5 + [[2]]
    whole = [batch for step in steps for batch in step if len(batch.ids) == 4]
    apart = [int(batch.mask.sum(1).max() - batch.mask.sum(1).min()) for batch in whole]
    assert max(apart) < 25


@pytest.mark.parametrize("packing", [False, True])
def test_batches_padded_to_a_multiple_train_the_same_weights(configured, packing):
    """A batch is rounded up to it, but never beyond task.max-tokens; padding moves nothing."""
    rows = spread(12)
    widths, trained = [], []
    for multiple in (1, 64):
        task = configured(
            task__max_tokens=96,
            train__batch_size=4,
            train__packing=packing,
            train__received_loss_examples=0,
            train__pad_to_multiple_of=multiple,
        )
        widths.append([task.training_batch(rows[i : i + 4]).ids.shape[1] for i in (0, 4, 8)])
        start = task.initial(RandomStream(KEY))
        trained.append(task.trainer(rows, RandomStream(KEY)).train(start).weights)
    longest = task.config.task.max_tokens
    assert widths[1] == [min(-(-width // 64) * 64, longest) for width in widths[0]] != widths[0]
    assert apart(*trained, start) < 1e-3


@pytest.mark.parametrize(("length", "multiple", "limit", "width"), [
    (1, 1, 9, 1), (1, 8, 96, 8), (8, 8, 96, 8), (9, 8, 96, 16), (95, 64, 96, 96), (97, 8, 96, 97), (96, 8, 96, 96),
])  # fmt: skip
def test_a_length_is_rounded_up_to_a_multiple_and_not_beyond_the_limit(length, multiple, limit, width):
    assert batches.round_up(length, multiple, limit) == width
