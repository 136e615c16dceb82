from __future__ import annotations

import pytest
import torch

from fedveil.config import TrainConfig, parse
from fedveil.errors import ConfigError
from fedveil.training import optimisers

EIGHT = TrainConfig(optimiser="adamw-8bit", learning_rate=1e-2)


def weights(*counts: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in counts]


def stepped(optimiser, parameters, steps: int = 2) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimiser.step()
        optimiser.zero_grad()
        assert all(p.grad is None for p in parameters)


def test_pieces_of_a_tensor_move_as_the_whole_does_bit_for_bit():
    whole, cut = (weights((1 << 20) + 100, 5000, 7) for _ in range(2))
    stepped(optimisers._eight_bit(whole, EIGHT), whole)
    stepped(optimisers.create(cut, EIGHT), cut)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights((1 << 20) + 100, 5000, 7), cut, strict=True))


def test_no_piece_is_too_small_for_states_of_8_bits():
    for count in (1, 4095, 4096, 1 << 20, (1 << 20) + 4095, (1 << 20) + 4096, (3 << 20) + 1):
        sizes = [len(part) for part in optimisers._split(torch.empty(count))]
        assert sum(sizes) == count
        assert all(size % 256 == 0 for size in sizes[:-1])
        assert len(sizes) == 1 or sizes[-1] >= 4096


def test_states_are_a_quarter_and_steps_are_close_to_adamws():
    """The first two steps of AdamW follow the sign of the gradient where the two agree; 8 bits keep that."""
    exact, coarse = weights(1 << 20), weights(1 << 20)
    stepped(optimisers.create(exact, TrainConfig(learning_rate=1e-2)), exact)
    optimiser = optimisers.create(coarse, EIGHT)
    stepped(optimiser, coarse)
    states = [v for s in optimiser._inner.state.values() for k, v in s.items() if k in ("state1", "state2")]
    assert {state.dtype for state in states} == {torch.uint8}
    assert sum(state.nbytes for state in states) == 2 << 20
    moved = exact[0].detach() - weights(1 << 20)[0].detach()
    error = (coarse[0] - exact[0]).detach().norm() / moved.norm()
    assert 0 < error < 0.05


def test_an_unknown_optimiser_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"train.optimiser: .*'adamw' or 'adamw-8bit'.*found 'sgd'"):
        parse({"train.optimiser": "sgd"})
