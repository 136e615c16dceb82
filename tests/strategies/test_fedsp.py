from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies, tasks
from fedveil.adapters.prefix import PrefixAdapter
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.task import Example
from fedveil.errors import ConfigError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.server_app.distillation import ServerDistillation
from fedveil.strategies.fedsp import FedSP
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import EnvelopeStamp, unpack_message
from tests.conftest import ToyTrainer, aggregated

CTX = RoundContext(0, "a", True, bytes(32))
LATER = RoundContext(1, "a", False, bytes(32))
E2E = [
    Example({"mr": "name[Blue Spice], food[Thai]", "ref": "Blue Spice serves Thai food."}),
    Example({"mr": "name[Aromi]", "ref": "Aromi."}),
]


@pytest.fixture(scope="module")
def config():
    return parse({"train.learning-rate": 1e-3, "train.max-steps": 2, "train.batch-size": 2, "run.deterministic": True})


@pytest.fixture(scope="module")
def proxy(config):
    return tasks.load_task(config, PrefixAdapter(5, cells=1), "cpu")


@pytest.fixture(scope="module")
def model(config):
    return tasks.load_task(config, PrefixAdapter(5), "cpu")


def stated(method=None):
    method = method or FedSP(adapter=PrefixAdapter(3, cells=1))
    spec = method.adapter.example_spec()
    weights = {n: torch.randn(t.shape, generator=torch.Generator().manual_seed(7)) for n, t in spec.items()}
    return method, spec, method.init(spec, weights, rng.initial_stream(0, "x"))


def test_update_by_hand():
    """Prefixes (4, 0) of 1 row and (0, 8) of 3: (1, 6). The proxy stays as it was."""
    server = FederatedState({"prefix": torch.zeros(2), "w": torch.tensor([5.0])})
    sent = [AcceptedUpload(Payload({"prefix": torch.tensor(p)}), n, CTX) for p, n in (([4.0, 0.0], 1), ([0.0, 8.0], 3))]
    new = aggregated(FedSP(), server, iter(sent)).tensors
    assert new["prefix"].tolist() == [1.0, 6.0]
    assert new["w"] is server.tensors["w"]


def test_the_proxy_goes_to_newcomers_and_never_back():
    method, spec, server = stated()
    exchange, local = MessageExchange(method, "fedsp", spec), ToyTrainer(spec)
    first = exchange.broadcast(server, CTX)
    private, up = exchange.participate(first, None, local, CTX)
    assert set(exchange.receive(b"".join(up), 0).payload.fields) == {"prefix"}
    later = exchange.broadcast(server, LATER)
    stamp = EnvelopeStamp.from_exchange(method, "fedsp", 1, "down")
    assert set(unpack_message(later, exchange.layout, stamp).payload.fields) == {"prefix"}
    moved = server.tensors["wte.weight"] + 0.5
    torch.testing.assert_close(private.tensors["wte.weight"], moved)
    exchange.participate(later, private, local, LATER)
    torch.testing.assert_close(local.started_from[2]["wte.weight"], moved)
    torch.testing.assert_close(local.started_from[2]["prefix"], server.tensors["prefix"])
    with pytest.raises(StateError, match="earlier participation"):
        exchange.participate(later, None, local, LATER)


def test_proxy_first_then_prefix():
    """Alternating, the first training leaves the prefix, the second the proxy; else there is one training of both."""
    method, spec, server = stated()
    local = ToyTrainer(spec)
    private, _ = method.client(None, method.broadcast(server, CTX), local, CTX)
    one, two = local.started_from
    assert all(torch.equal(one[n], server.tensors[n]) for n in spec)
    assert torch.equal(two["prefix"], one["prefix"])
    assert not torch.equal(two["wte.weight"], one["wte.weight"])
    assert torch.equal(private.tensors["wte.weight"], two["wte.weight"])
    assert not torch.equal(private.tensors["prefix"], two["prefix"])
    together = ToyTrainer(spec)
    FedSP(adapter=method.adapter, alternate=False).client(None, method.broadcast(server, CTX), together, CTX)
    assert len(together.started_from) == 1


def test_shared_proxies_are_averaged_too():
    method, spec, server = stated(FedSP("shared", adapter=PrefixAdapter(3, cells=1)))
    exchange = MessageExchange(method, "fedsp", spec)
    private, up = exchange.participate(exchange.broadcast(server, LATER), None, ToyTrainer(spec), LATER)
    assert private is None
    new = aggregated(
        method, server, iter([AcceptedUpload(exchange.receive(b"".join(up), 1).payload, 3, LATER)])
    ).tensors
    for name in spec:
        torch.testing.assert_close(new[name], server.tensors[name] + 0.5)


def test_distillation_brings_the_hidden_states_together(proxy, model):
    """Only the proxy moves, its prefix apart; with as many cells as layers there is nothing to learn."""
    weights = proxy.initial(rng.initial_stream(0, "w"))
    before = {n: p.detach().clone() for n, p in model.base.model.named_parameters()}
    rows = proxy.encode(E2E)
    teaching = ServerDistillation(proxy, model, rows, rng.initial_stream(0, "p"))
    batch = proxy.collate(rows)
    proxy.put(weights)
    first = teaching.loss(batch).item()
    distilled_weights = FedSP(distil_steps=12, distil_rate=1e-3, adapter=proxy.adapter).before_round_0(
        weights, teaching
    )
    proxy.put(distilled_weights)
    assert teaching.loss(batch).item() < 0.8 * first
    assert torch.equal(distilled_weights["prefix"], weights["prefix"])
    assert all(torch.equal(before[n], p) for n, p in model.base.model.named_parameters())
    whole = tasks.load_task(proxy.config, PrefixAdapter(5, cells=4), "cpu")
    whole.put(whole.initial(rng.initial_stream(0, "w")))
    assert ServerDistillation(whole, model, rows, rng.initial_stream(0, "p")).loss(batch).item() == 0.0
    with pytest.raises(ConfigError, match="without cells"):
        ServerDistillation(proxy, proxy, rows, rng.initial_stream(0, "p"))


def test_nothing_of_the_other_layers_leaves_the_server(config, proxy, model, tmp_path):
    method = FedSP(distil_steps=0, adapter=proxy.adapter)
    exchange = MessageExchange(method, "fedsp", proxy.spec)
    server = method.init(proxy.spec, proxy.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "x"))
    rows, tap = proxy.encode(E2E), MessageCapture(tmp_path)
    trainer_for = lambda site, ctx: proxy.trainer(rows, ctx.rng("batches"))  # noqa: E731
    federation = InProcessFederation(exchange, config, trainer_for, ["a", "b"], server, tap=tap)
    federation.round(0)
    federation.round(1)
    sent = b"".join(tap.read(m) for m in tap.messages() if m.direction == "down")
    layers = {n: p for n, p in model.base.model.named_parameters() if ".h." in n and p.ndim == 2}
    for name, p in layers.items():  # a row of each matrix is enough to find it
        assert (p[3].detach().numpy().tobytes() in sent) == (".h.0." in name), name
    assert federation.server.tensors["prefix"].ne(server.tensors["prefix"]).any()
    loss = model.evaluate({n: federation.models()["server"][n] for n in model.spec}, E2E, generate=False)["loss"]
    assert loss < model.evaluate({n: server.tensors[n] for n in model.spec}, E2E, generate=False)["loss"]


@pytest.mark.parametrize(
    "fields,named",
    [
        ('adapter = {kind = "prefix"}', "adapter.cells"),
        ('adapter = {kind = "prefix", cells = 1, length = 0}', "adapter.length"),
        ('adapter = {kind = "lora"}', "adapter"),
        ("distil_steps = -1", "distil_steps"),
        ("distil_rate = 0.0", "distil_rate"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("fedsp", fields)
