from __future__ import annotations

import pytest
import torch

from fedveil.config import TrainConfig, parse
from fedveil.errors import ConfigError
from fedveil.training import optimizers

EIGHT = TrainConfig(optimizer="adamw-8bit", learning_rate=1e-2)


def weights(*counts: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in counts]


def stepped(optimiser, parameters, steps: int = 2) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimiser.step()
        optimiser.zero_grad()
        assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_the_plain_one_but_for_rounding(dtype, transposed):
    """Of a matrix, a number and nothing. A transposed matrix, whose gradients lie in another order, is not fused."""
    starts = [torch.ones(s, dtype=dtype) for s in ((7, 5), (), (0,))]
    starts[0] = starts[0].mT if transposed else starts[0]
    mine, plain = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimiser = optimizers.create(mine, TrainConfig(learning_rate=1e-2, weight_decay=0.3))
    assert bool(optimiser.param_groups[0]["fused"]) != transposed
    stepped(optimiser, mine, 20)
    stepped(torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.3, foreach=False, fused=False), plain, 20)
    for p, theirs in zip(mine, plain, strict=True):
        assert torch.allclose(p, theirs, rtol=0, atol=100 * torch.finfo(dtype).eps)
    assert all(float((p.detach() - 1).abs().max()) > 1e-2 for p in mine if p.numel())


def test_pieces_of_a_tensor_move_as_the_whole_does_bit_for_bit():
    whole, cut = (weights((1 << 20) + 100, 5000, 7) for _ in range(2))
    stepped(optimizers._eight_bit(whole, EIGHT), whole)
    stepped(optimizers.create(cut, EIGHT), cut)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights((1 << 20) + 100, 5000, 7), cut, strict=True))


def test_no_piece_is_too_small_for_states_of_8_bits():
    for count in (1, 4095, 4096, 1 << 20, (1 << 20) + 4095, (1 << 20) + 4096, (3 << 20) + 1):
        sizes = [len(part) for part in optimizers._split(torch.empty(count))]
        assert sum(sizes) == count
        assert all(size % 256 == 0 for size in sizes[:-1])
        assert len(sizes) == 1 or sizes[-1] >= 4096


def test_states_are_a_quarter_and_steps_are_close_to_adamws():
    """The first two steps of AdamW follow the sign of the gradient where the two agree; 8 bits keep that."""
    exact, coarse = weights(1 << 20), weights(1 << 20)
    stepped(optimizers.create(exact, TrainConfig(learning_rate=1e-2)), exact)
    optimiser = optimizers.create(coarse, EIGHT)
    stepped(optimiser, coarse)
    states = [v for s in optimiser._inner.state.values() for k, v in s.items() if k in ("state1", "state2")]
    assert {state.dtype for state in states} == {torch.uint8}
    assert sum(state.nbytes for state in states) == 2 << 20
    moved = exact[0].detach() - weights(1 << 20)[0].detach()
    error = (coarse[0] - exact[0]).detach().norm() / moved.norm()
    assert 0 < error < 0.05


def test_an_unknown_optimiser_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"train.optimizer: .*'adamw', 'adamw-8bit' or 'paged-adamw-8bit'.*found 'sgd'"
    ):
        parse({"train.optimizer": "sgd"})


PAGED = TrainConfig(optimizer="paged-adamw-8bit", learning_rate=1e-2, weight_decay=0.25)


def test_pages_on_a_cpu_are_refused_with_what_to_take_instead():
    expected = r"train\.optimizer: .* requires a GPU .* this site trains on its CPU; set \"adamw-8bit\""
    with pytest.raises(ConfigError, match=expected):
        optimizers.create(weights(7), PAGED)


def test_pages_are_bitsandbytes_own_with_our_rates(monkeypatch):
    class OnGpu:
        is_cuda = True

    seen = []
    monkeypatch.setattr("bitsandbytes.optim.PagedAdamW8bit", lambda given, **keys: seen.append((given, keys)))
    parameters = [OnGpu()]
    optimizers.create.__wrapped__(parameters, PAGED)  # without the check of annotations
    assert seen == [(parameters, {"lr": 1e-2, "weight_decay": 0.25})]


@pytest.mark.gpu
def test_pages_step_as_the_unpaged_do_on_a_gpu(gpu):
    """On a CPU: the same steps by the unpaged, for there are no pages; that it refuses them is tested above."""
    paged, plain = ([torch.nn.Parameter(p.detach().to(gpu)) for p in weights(1 << 17, 7)] for _ in range(2))
    unpaged = PAGED.model_copy(update={"optimizer": "adamw-8bit"})
    for parameters, train in ((paged, PAGED if gpu == "cuda" else unpaged), (plain, unpaged)):
        optimiser = optimizers.create(parameters, train)
        for _ in range(2):
            for p in parameters:
                p.grad = torch.sin(torch.arange(p.numel(), device=gpu).float()).reshape(p.shape)
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(paged, plain, strict=True))
