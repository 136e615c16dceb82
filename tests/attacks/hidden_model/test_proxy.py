from __future__ import annotations

import pytest
import torch

from fedveil import rng
from fedveil.attacks.base import View
from fedveil.attacks.hidden_model import proxy as attack
from fedveil.attacks.hidden_model.proxy import Proxy, Scored, average, filled, gap, proxies, similarity
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.spec import Place, TensorSpec
from fedveil.federation.exchange import Exchange
from fedveil.federation.inprocess import Federation
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedlpp import FedLPP
from fedveil.strategies.fedqsn import FedQSN
from fedveil.strategies.fedsp import FedSP
from fedveil.wire.tap import Tap
from tests.conftest import ToyTrainer

ROWS = torch.tensor([[True], [False]])


def test_similarity_by_hand():
    """Server (3, 4 | 5, 0) in two rows. The proxy's first row is missing, its second doubled; a further tensor is 0."""
    server = {"w": torch.tensor([[3.0, 4.0], [5.0, 0.0]]), "v": torch.zeros(2)}
    found = Proxy({"w": torch.tensor([[0.0, 0.0], [8.0, 6.0]]), "v": torch.zeros(2)}, {"w": ROWS}, 2.0)
    seen = similarity(found, server, ["w", "v"])
    assert seen.whole == pytest.approx(40 / (10 * 50**0.5))
    assert seen.visible == pytest.approx(20 / (5 * 5))
    assert seen.mean == pytest.approx(seen.whole / 2)


def test_similarity_to_the_public_base_by_hand():
    """W_t - W_0 = (1, 0), proxy - W_0 = (1, 1); and a proxy that is W_0 knows nothing of the difference."""
    base, server = {"w": torch.tensor([10.0, 10.0])}, {"w": torch.tensor([11.0, 10.0])}
    seen = similarity(Proxy({"w": torch.tensor([11.0, 11.0])}, {}), server, ["w"], base)
    assert seen.whole == seen.visible == pytest.approx(0.5**0.5)
    assert similarity(Proxy(base, {}), server, ["w"]).whole > 0.99
    assert similarity(Proxy(base, {}), server, ["w"], base).whole == 0.0


def test_average_by_hand():
    """The scale is undone; the first row is shown by one of two, the second by both. Then by none."""
    one = Proxy({"w": torch.tensor([[0.0, 0.0], [2.0, 4.0]])}, {"w": ROWS}, 2.0)
    two = Proxy({"w": torch.tensor([[2.0, 4.0], [6.0, 8.0]])}, {"w": torch.zeros(2, 1, dtype=torch.bool)}, 2.0)
    both = average([one, two])
    assert both.weights["w"].tolist() == [[1.0, 2.0], [2.0, 3.0]]
    assert both.missing == {}
    again = average([one, one])
    assert again.missing["w"].flatten().tolist() == [True, False]
    assert filled(again, {"w": torch.full((2, 2), 7.0)}).weights["w"].tolist() == [[7.0, 7.0], [1.0, 2.0]]
    assert filled(one, {"w": torch.full((2, 2), 7.0)}).weights["w"].tolist() == [[7.0, 7.0], [1.0, 2.0]]
    with pytest.raises(ValueError, match="at least one"):
        average([])


def test_gap_is_between_the_models_of_least_validation_loss():
    server = [Scored(2.0, {"bleu": 60.0}), Scored(1.0, {"bleu": 50.0})]
    clients = [Scored(1.5, {"bleu": 20.0}), Scored(1.8, {"bleu": 45.0})]
    assert gap(server, clients, "bleu") == 30.0


SPEC = {"w": TensorSpec((600, 40), place=Place("linear", "w", 0, closes=True)), "b": TensorSpec((7,))}


def run(method, tmp_path, rounds=6):
    exchange = Exchange(method, "fedqsn", SPEC)
    generator = torch.Generator().manual_seed(1)
    start = {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}
    config = parse({"run.deterministic": True, "run.rounds": rounds})
    still = lambda site, ctx: ToyTrainer(SPEC, step=0.0)  # noqa: E731
    state = method.init(SPEC, start, rng.initial(0, "x"))
    federation = Federation(exchange, config, still, ["a", "b"], state, tap=Tap(tmp_path))
    federation.run()
    return federation, start


def test_waiting_and_collusion_win_back_the_client_masks_and_never_the_server_s(tmp_path):
    """W stands still, p_1 = p_2 = 0.2: shown 0.64, after 6 rounds 0.8, two colluders sooner; the similarity follows."""
    method = FedQSN(0.2, 0.2, quantiser="none")
    federation, start = run(method, tmp_path)
    view = View.client(federation.tap, federation.exchange, "a")
    all_of_a = list(proxies(view, scale=method.scale))
    assert len(all_of_a) == 6
    shown = lambda p: 1 - float(p.missing["w"].float().mean()) if p.missing else 1.0  # noqa: E731
    assert shown(all_of_a[0]) == pytest.approx(0.64, abs=0.06)
    waited = average(all_of_a)
    assert shown(waited) == pytest.approx(0.8, abs=0.05)
    torch.testing.assert_close(waited.weights["w"], torch.where(waited.missing["w"], 0.0, start["w"]))
    every = list(proxies(View.server(federation.tap, federation.exchange), ["a", "b"], method.scale))
    assert shown(all_of_a[0]) < shown(average(every[:2])) <= shown(average(every)) < 0.86
    scores = [similarity(p, start, ["w"]).whole for p in (all_of_a[0], waited, filled(waited, start))]
    assert scores[0] < scores[1] < scores[2] == pytest.approx(1.0)
    assert scores[0] == pytest.approx(0.8, abs=0.04)  # the root of what is shown
    assert similarity(all_of_a[0], start, ["w"]).visible == pytest.approx(1.0)


@pytest.mark.parametrize(
    "quantiser,bits,rates,expected",
    [("nf_sym", 2, 0.0, 0.929), ("nf_sym", 2, 0.1, 0.83), ("absmax", 2, 0.0, 0.70), ("absmax", 2, 0.1, 0.64)],
)
def test_similarity_of_gaussian_weights(quantiser, bits, rates, expected):
    """What numerics elsewhere gave for the code's quantiser and for Eq. 4."""
    spec = {"w": TensorSpec((1500, 256), place=Place("linear", "w", 0, closes=True))}
    w = {"w": torch.randn(1500, 256, generator=torch.Generator().manual_seed(3))}
    method = FedQSN(rates, rates, quantiser=quantiser, bits=bits)
    state = method.init(spec, w, rng.initial(0, "x"))
    down = method.broadcast(state, RoundContext(0, "a", True, bytes(32)))
    assert similarity(attack.read(method, spec, down, method.scale), w, ["w"]).whole == pytest.approx(
        expected, abs=0.015
    )


def test_proxies_of_other_methods(lora_spec, lora_weights):
    """Under FedAvg the proxy is the model itself: the undefended control. Under FedLPP nothing is missing."""
    for method in (FedAvg(), FedLPP()):
        state = method.init(lora_spec, lora_weights, rng.initial(0, "x"))
        found = attack.read(method, lora_spec, method.broadcast(state, RoundContext(0, "a", True, bytes(32))))
        names = [n for n in lora_spec if n.endswith("A")]
        seen = similarity(found, lora_weights, names).whole
        assert found.missing == {}
        assert (seen == pytest.approx(1.0)) == isinstance(method, FedAvg)


def test_fine_tuning_trains_the_proxy_without_holding_anything():
    local = ToyTrainer(SPEC)
    found = Proxy({n: torch.zeros(t.shape) for n, t in SPEC.items()}, {"w": torch.ones(1, 1, dtype=torch.bool)})
    tuned = attack.fine_tuned(found, local)
    assert all(bool((w == 0.5).all()) for w in tuned.weights.values())
    assert tuned.missing == {}


def test_later_messages_of_fedsp_are_read_with_what_came_before(tmp_path):
    """The proxy is sent to a newcomer, then its prefix alone; the rest stays as it was sent."""
    method = FedSP(distil_steps=0)
    exchange = Exchange(method, "fedsp", dict(method.adapter.example_spec()))
    generator = torch.Generator().manual_seed(1)
    start = {n: torch.randn(t.shape, generator=generator) for n, t in exchange.spec.items()}
    config = parse({"run.deterministic": True, "run.rounds": 3})
    state = method.init(exchange.spec, start, rng.initial(0, "x"))
    step = lambda site, ctx: ToyTrainer(exchange.spec, step=0.5)  # noqa: E731
    federation = Federation(exchange, config, step, ["a", "b"], state, tap=Tap(tmp_path))
    federation.run()
    seen = list(proxies(View.client(federation.tap, exchange, "a")))
    assert [len(s.payload.fields) > 1 for s in View.client(federation.tap, exchange, "a").broadcasts()] == [
        True,
        False,
        False,
    ]
    for proxy in seen:
        assert proxy.weights.keys() == start.keys()
        assert all(torch.equal(proxy.weights[n], start[n]) for n in start if n != "prefix")
    assert not torch.equal(seen[0].weights["prefix"], seen[2].weights["prefix"])
