"""Operations of one participation, compared with values computed by hand."""

from __future__ import annotations

import pytest

from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.models.planning import flops
from tests.fedveil.models.planning.test_meta_model import EIGHT

N, ADAPTER, TOKENS = 8_030_261_248 - 525_336_576 - 65 * 4096, 20_971_520, 512
ATTENTION = 4 * 32 * TOKENS * 4096  # a token's scores with every other, and their sum: 2 products of t x w, 32 layers


@pytest.mark.parametrize(
    ("adapter", "checkpointing", "a_token"),
    [
        (AllWeightsAdapter(), False, 6 * N + 3 * ATTENTION),
        (AllWeightsAdapter(), True, 8 * N + 4 * ATTENTION),
        (LoraAdapter(), False, 4 * N + 6 * ADAPTER + 3 * ATTENTION),
        (LoraAdapter(), True, 6 * N + 8 * ADAPTER + 4 * ATTENTION),
    ],
)
def test_work_of_an_8_b_base(adapter, checkpointing, a_token):
    keys = {
        "task.max-tokens": TOKENS,
        "train.gradient-checkpointing": checkpointing,
        "train.received-loss-examples": 64,
        "train.epochs": 2,
    }
    estimate = flops.training_flops(EIGHT, parse(keys), adapter, rows=1000)
    forward = 2 * N + ATTENTION + (0 if adapter.trains_base else 2 * ADAPTER)
    assert (estimate.rows, estimate.training, estimate.scoring) == (
        2000,
        2000 * TOKENS * a_token,
        64 * TOKENS * forward,
    )
    assert estimate.seconds(1e15, gpus=4) == pytest.approx(
        estimate.training / 4e15 + estimate.scoring / 1e15
    )  # rank 0 scores
    assert estimate.seconds(1e15, gpus=4, is_split=True) == pytest.approx((estimate.training + estimate.scoring) / 4e15)


@pytest.mark.long
def test_steps_are_bounded_and_a_speed_is_measured_in_a_moment():
    keys = {
        "train.max-steps": 3,
        "train.batch-size": 2,
        "train.gradient-accumulation-steps": 4,
        "train.received-loss-examples": 0,
    }
    assert (estimate := flops.training_flops(EIGHT, parse(keys), LoraAdapter(), rows=1000)).rows == 24
    assert estimate.scoring == 0
    assert 1e9 < flops.measure_flops(bf16=False) < 1e16
