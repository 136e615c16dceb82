"""The sentences of core/training."""

from __future__ import annotations

import pytest
import torch

from fedveil_bench.core import training


@pytest.mark.parametrize("ours,word", [(971.0, "held"), (969.0, "NOT HELD")])
def test_the_bound_counts_on_a_gpu_in_the_words_that_make_gpu_counts(ours, word):
    measured = [(training._Measured(ours, 10), training._Measured(1000.0, 10))]
    rows = [training._row("default", measured, is_cuda=True)]
    assert training._verdicts(rows, torch.device("cuda"))[0].endswith(f"(asked: at least 0.97, {word}).")
    assert "held" not in training._verdicts(rows, torch.device("cpu"))[0].lower()
