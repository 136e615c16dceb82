from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.strategies.fixed_position import FixedPosition
from fedveil.strategies.random_binary import RandomBinary
from tests.conftest import aggregated

POSITION = "vit.embeddings.position_embeddings"
SPEC = {POSITION: ParamSpec((1, 5, 4)), "vit.embeddings.cls_token": ParamSpec((1, 1, 4)), "fc.bias": ParamSpec((3,))}


class Given:
    """A client whose gradient is drawn by site and round; training is one step along it with rate 1."""

    spec = SPEC

    def __init__(self, seed: int, num_examples: int) -> None:
        self.g, self.num_examples = random(seed), num_examples

    def gradient(self, weights) -> TrainingResult:
        return TrainingResult(dict(self.g), {})

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        return TrainingResult({n: w - self.g[n] for n, w in weights.items()}, {})


def random(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}


def run(method, name, rounds=4) -> tuple[FederatedState, list[bytes]]:
    exchange = MessageExchange(method, name, SPEC)
    server, sent = method.init(SPEC, random(0), rng.initial_stream(0, "method init")), []
    for round_ in range(rounds):
        uploads = []
        for i, site in enumerate("xyz"):
            ctx = RoundContext(round_, site, False, bytes(32))
            _, up = exchange.participate(exchange.broadcast(server, ctx), None, Given(10 * round_ + i + 1, 2 + i), ctx)
            sent.append(b"".join(up))
            message = exchange.receive(sent[-1], round_)
            uploads.append(AcceptedUpload(message.payload, message.num_examples, ctx))
        server = aggregated(method, server, iter(uploads))
    return server, sent


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("exchange", ["batch", "epoch"])
def test_the_position_embedding_never_leaves_and_never_moves(exchange, optimiser):
    method = FixedPosition(exchange=exchange, optimiser=optimiser, learning_rate=0.5)
    server, sent = run(method, "fixed_position")
    assert torch.equal(server.tensors[POSITION], random(0)[POSITION])
    if optimiser == "adam":
        assert not server.tensors[f"adam.first.{POSITION}"].any()
        assert not server.tensors[f"adam.steps.{POSITION}"].any()
    for name in SPEC:
        if name != POSITION:
            assert not torch.equal(server.tensors[name], random(0)[name])
    secret = Given(1, 2).g[POSITION] if exchange == "batch" else random(0)[POSITION] - Given(1, 2).g[POSITION]
    assert all(v.numpy().tobytes() not in sent[0] for v in secret.flatten())
    control = "fc.bias"  # the same search finds the sent entries
    if exchange == "batch":
        assert Given(1, 2).g[control].numpy().tobytes() in sent[0]


def test_by_hand():
    """fc.bias: 1 - 0.5 (2 + 6) / 2 = -1; with examples 3 and 1: 1 - 0.5 (3 * 2 + 6) / 4 = -0.5."""
    for weighted, expected in ((False, -1.0), (True, -0.5)):
        method = FixedPosition(hidden="pos", learning_rate=0.5, weighted=weighted)
        server = FederatedState({"pos": torch.ones(2), "b": torch.ones(2)})
        uploads = []
        for n, g in ((3, 2.0), (1, 6.0)):
            local = Given(0, n)
            local.spec = {"pos": ParamSpec((2,)), "b": ParamSpec((2,))}
            local.g = {"pos": torch.full((2,), 99.0), "b": torch.full((2,), g)}
            ctx = RoundContext(0, "x", True, bytes(32))
            private, up = method.client(None, method.broadcast(server, ctx), local, ctx)
            assert private is None
            assert set(up.fields) == {"b"}
            uploads.append(AcceptedUpload(up, n, ctx))
        new = aggregated(method, server, iter(uploads)).tensors
        assert new["b"].tolist() == [expected, expected]
        assert new["pos"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fields", [{}, {"optimiser": "adam"}, {"exchange": "epoch"}, {"weighted": True}])
def test_it_is_random_binary_with_r_1_there_and_r_0_elsewhere_bit_for_bit(fields):
    fixed, sent = run(FixedPosition(**fields), "fixed_position")
    binary, also = run(RandomBinary(rate={"position_embeddings|pos_embed": 1.0}, **fields), "random_binary")
    assert set(fixed.tensors) == set(binary.tensors)
    assert all(torch.equal(fixed.tensors[n], binary.tensors[n]) for n in fixed.tensors)
    assert abs(len(sent[0]) - len(also[0])) < 16


def test_a_pattern_that_hides_nothing_is_refused_at_the_start():
    with pytest.raises(ConfigError, match='hidden: "wpe" matches none of the 3 tensors'):
        FixedPosition(hidden="wpe").init(SPEC, random(0), rng.initial_stream(0, "x"))
    with pytest.raises(ConfigError, match="hidden: expected a regular expression, found"):
        strategies.create_method("fixed_position", 'hidden = "("')


def test_hiding_everything_changes_nothing():
    server, sent = run(FixedPosition(hidden=".", learning_rate=1.0), "fixed_position")
    assert all(torch.equal(server.tensors[n], w) for n, w in random(0).items())
    assert len(sent[0]) < 500


@pytest.mark.parametrize("method", [FixedPosition, RandomBinary])
def test_half_precision_which_makes_zeros_that_count_is_refused(method):
    with pytest.raises(ConfigError, match='wire_dtype: expected "float32" or "bfloat16" for gradients'):
        method(wire_dtype="float16")
    assert float(torch.tensor(2e-8).half()) == 0.0 != float(torch.tensor(2e-8).bfloat16())
