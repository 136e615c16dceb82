"""The control that trains without data."""

from __future__ import annotations

import pytest
import torch

from fedveil.adapters.prompt import PromptAdapter
from fedveil.contract.layout import Payload
from fedveil.contract.method import RoundContext
from fedveil.strategies.dp_fpl import DPFPL
from fedveil_bench.common import noise_only_trainer
from tests.prompt_toy import LENGTH, WIDTH, TextTask, local_of


@pytest.mark.parametrize("clipped", ["prompt", "texts"])
def test_noise_only_sees_no_row(clipped):
    """Two sites with other rows send the same bytes, where with their rows they do not."""
    method = DPFPL(rank=2, adapter=PromptAdapter(LENGTH), clipped=clipped)
    ctx = RoundContext(0, "x", True, bytes(32), seeded=True)
    down = Payload({"prompt": torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))})

    def sent(seed: int, dark: bool) -> torch.Tensor:
        local = local_of(12, seed, kind=TextTask)
        return method.client(None, down, noise_only_trainer.NoiseOnlyTrainer(local) if dark else local, ctx)[1].fields[
            "prompt"
        ]

    assert torch.equal(sent(1, True), sent(2, True))
    assert not torch.equal(sent(1, False), sent(2, False))
    assert float(sent(1, True).abs().max()) > 0
    with pytest.raises(NotImplementedError):
        noise_only_trainer.NoiseOnlyTrainer(local_of(12)).train({})
