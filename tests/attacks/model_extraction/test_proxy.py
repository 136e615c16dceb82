from __future__ import annotations

import pytest
import torch

from fedveil import rng
from fedveil.attacks.base import AdversaryView
from fedveil.attacks.model_extraction import proxy as attack
from fedveil.attacks.model_extraction.proxy import (
    ProxyModel,
    average_proxies,
    fill_from_base,
    list_proxies,
    proxy_similarity,
)
from fedveil.config import parse
from fedveil.contract.method import RoundContext
from fedveil.contract.param_spec import ParamLocation, ParamSpec
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedlpp import FedLPP
from fedveil.strategies.fedqsn import FedQSN
from fedveil.strategies.fedsp import FedSP
from fedveil.wire.capture import MessageCapture
from tests.conftest import ToyTrainer

ROWS = torch.tensor([[True], [False]])


def test_similarity_by_hand():
    """Server (3, 4 | 5, 0) in two rows. The proxy's first row is missing, its second doubled; a further tensor is 0."""
    server = {"w": torch.tensor([[3.0, 4.0], [5.0, 0.0]]), "v": torch.zeros(2)}
    proxy = ProxyModel({"w": torch.tensor([[0.0, 0.0], [8.0, 6.0]]), "v": torch.zeros(2)}, {"w": ROWS}, 2.0)
    seen = proxy_similarity(proxy, server, ["w", "v"])
    assert seen.whole == pytest.approx(40 / (10 * 50**0.5))
    assert seen.visible == pytest.approx(20 / (5 * 5))
    assert seen.mean == pytest.approx(seen.whole / 2)


def test_similarity_to_the_public_base_by_hand():
    """W_t - W_0 = (1, 0), proxy - W_0 = (1, 1); and a proxy that is W_0 knows nothing of the difference."""
    base, server = {"w": torch.tensor([10.0, 10.0])}, {"w": torch.tensor([11.0, 10.0])}
    seen = proxy_similarity(ProxyModel({"w": torch.tensor([11.0, 11.0])}, {}), server, ["w"], base)
    assert seen.whole == seen.visible == pytest.approx(0.5**0.5)
    assert proxy_similarity(ProxyModel(base, {}), server, ["w"]).whole > 0.99
    assert proxy_similarity(ProxyModel(base, {}), server, ["w"], base).whole == 0.0


def test_average_by_hand():
    """The scale is undone; the first row is shown by one of two, the second by both. Then by none."""
    one = ProxyModel({"w": torch.tensor([[0.0, 0.0], [2.0, 4.0]])}, {"w": ROWS}, 2.0)
    two = ProxyModel({"w": torch.tensor([[2.0, 4.0], [6.0, 8.0]])}, {"w": torch.zeros(2, 1, dtype=torch.bool)}, 2.0)
    both = average_proxies([one, two])
    assert both.weights["w"].tolist() == [[1.0, 2.0], [2.0, 3.0]]
    assert both.missing == {}
    again = average_proxies([one, one])
    assert again.missing["w"].flatten().tolist() == [True, False]
    assert fill_from_base(again, {"w": torch.full((2, 2), 7.0)}).weights["w"].tolist() == [[7.0, 7.0], [1.0, 2.0]]
    assert fill_from_base(one, {"w": torch.full((2, 2), 7.0)}).weights["w"].tolist() == [[7.0, 7.0], [1.0, 2.0]]
    with pytest.raises(ValueError, match="the view contains none"):
        average_proxies([])


SPEC = {"w": ParamSpec((600, 40), place=ParamLocation("linear", "w", 0, closes=True)), "b": ParamSpec((7,))}


def run(method, tmp_path, rounds=6):
    exchange = MessageExchange(method, "fedqsn", SPEC)
    generator = torch.Generator().manual_seed(1)
    start = {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}
    config = parse({"run.deterministic": True, "run.rounds": rounds})
    still = lambda site, ctx: ToyTrainer(SPEC, step=0.0)  # noqa: E731
    state = method.init(SPEC, start, rng.initial_stream(0, "x"))
    federation = InProcessFederation(exchange, config, still, ["a", "b"], state, tap=MessageCapture(tmp_path))
    federation.run()
    return federation, start


def test_waiting_and_collusion_win_back_the_client_masks_and_never_the_server_s(tmp_path):
    """W stands still, p_1 = p_2 = 0.2: shown 0.64, after 6 rounds 0.8, two colluders sooner; the similarity follows."""
    method = FedQSN(0.2, 0.2, quantiser="none")
    federation, start = run(method, tmp_path)
    view = AdversaryView.client(federation.tap, federation.exchange, "a")
    all_of_a = list(list_proxies(view, scale=method.scale))
    assert len(all_of_a) == 6
    visible_share = lambda p: 1 - float(p.missing["w"].float().mean()) if p.missing else 1.0  # noqa: E731
    assert visible_share(all_of_a[0]) == pytest.approx(0.64, abs=0.06)
    waited = average_proxies(all_of_a)
    assert visible_share(waited) == pytest.approx(0.8, abs=0.05)
    torch.testing.assert_close(waited.weights["w"], torch.where(waited.missing["w"], 0.0, start["w"]))
    every = list(list_proxies(AdversaryView.server(federation.tap, federation.exchange), ["a", "b"], method.scale))
    assert (
        visible_share(all_of_a[0])
        < visible_share(average_proxies(every[:2]))
        <= visible_share(average_proxies(every))
        < 0.86
    )
    scores = [proxy_similarity(p, start, ["w"]).whole for p in (all_of_a[0], waited, fill_from_base(waited, start))]
    assert scores[0] < scores[1] < scores[2] == pytest.approx(1.0)
    assert scores[0] == pytest.approx(0.8, abs=0.04)  # the root of what is shown
    assert proxy_similarity(all_of_a[0], start, ["w"]).visible == pytest.approx(1.0)


@pytest.mark.parametrize(
    "quantiser,bits,rates,expected",
    [("nf_sym", 2, 0.0, 0.929), ("nf_sym", 2, 0.1, 0.83), ("absmax", 2, 0.0, 0.70), ("absmax", 2, 0.1, 0.64)],
)
def test_similarity_of_gaussian_weights(quantiser, bits, rates, expected):
    """What numerics elsewhere gave for the code's quantiser and for Eq. 4."""
    spec = {"w": ParamSpec((1500, 256), place=ParamLocation("linear", "w", 0, closes=True))}
    w = {"w": torch.randn(1500, 256, generator=torch.Generator().manual_seed(3))}
    method = FedQSN(rates, rates, quantiser=quantiser, bits=bits)
    state = method.init(spec, w, rng.initial_stream(0, "x"))
    down = method.broadcast(state, RoundContext(0, "a", True, bytes(32)))
    assert proxy_similarity(attack.read_proxy(method, spec, down, method.scale), w, ["w"]).whole == pytest.approx(
        expected, abs=0.015
    )


def test_proxies_of_other_methods(lora_spec, lora_weights):
    """Under FedAvg the proxy is the model itself: the undefended control. Under FedLPP nothing is missing."""
    for method in (FedAvg(), FedLPP()):
        state = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
        proxy = attack.read_proxy(method, lora_spec, method.broadcast(state, RoundContext(0, "a", True, bytes(32))))
        names = [n for n in lora_spec if n.endswith("A")]
        seen = proxy_similarity(proxy, lora_weights, names).whole
        assert proxy.missing == {}
        assert (seen == pytest.approx(1.0)) == isinstance(method, FedAvg)


def test_fine_tuning_trains_the_proxy_without_holding_anything():
    local = ToyTrainer(SPEC)
    proxy = ProxyModel({n: torch.zeros(t.shape) for n, t in SPEC.items()}, {"w": torch.ones(1, 1, dtype=torch.bool)})
    tuned = attack.fine_tune_proxy(proxy, local)
    assert all(bool((w == 0.5).all()) for w in tuned.weights.values())
    assert tuned.missing == {}


def test_later_messages_of_fedsp_are_read_with_what_came_before(tmp_path):
    """The proxy is sent to a newcomer, then its prefix alone; the rest stays as it was sent."""
    method = FedSP(distil_steps=0)
    exchange = MessageExchange(method, "fedsp", dict(method.adapter.example_spec()))
    generator = torch.Generator().manual_seed(1)
    start = {n: torch.randn(t.shape, generator=generator) for n, t in exchange.spec.items()}
    config = parse({"run.deterministic": True, "run.rounds": 3})
    state = method.init(exchange.spec, start, rng.initial_stream(0, "x"))
    step = lambda site, ctx: ToyTrainer(exchange.spec, step=0.5)  # noqa: E731
    federation = InProcessFederation(exchange, config, step, ["a", "b"], state, tap=MessageCapture(tmp_path))
    federation.run()
    seen = list(list_proxies(AdversaryView.client(federation.tap, exchange, "a")))
    assert [len(s.payload.fields) > 1 for s in AdversaryView.client(federation.tap, exchange, "a").broadcasts()] == [
        True,
        False,
        False,
    ]
    for proxy in seen:
        assert proxy.weights.keys() == start.keys()
        assert all(torch.equal(proxy.weights[n], start[n]) for n in start if n != "prefix")
    assert not torch.equal(seen[0].weights["prefix"], seen[2].weights["prefix"])
