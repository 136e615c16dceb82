"""The pair that is exchanged, the private pair, and the server's model."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng
from fedveil.adapters.hadamard import HadamardLoraAdapter, weight_change
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.lora_algebra import drop_private_factors
from fedveil.strategies import create_method
from fedveil.strategies.fedpara import FedPara
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import describe_message
from tests.conftest import ToyTrainer, aggregated

SITES = ["a", "b", "c", "d"]
ADAPTERS = {form: HadamardLoraAdapter(rank=3, alpha=4.5, form=form) for form in ("plus-one", "product")}
SPEC = ADAPTERS["product"].example_spec()
PRIVATE = {n for n in SPEC if ".private_" in n}


def ctx(round_: int = 0, client: str = "k", secret: bytes = bytes(32), is_new: bool = False) -> RoundContext:
    return RoundContext(round_, client, is_new, secret)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}


def step_of(site: str, round_: int) -> float:
    return 0.5 + ord(site) / 100 + round_ / 7


def federation(method: FedPara, rounds: int = 6, tap: MessageCapture | None = None) -> InProcessFederation:
    config = parse({"run.deterministic": True, "run.seed": 3, "run.rounds": rounds, "cohort.fraction": 0.5})
    trainer_for = lambda site, c: ToyTrainer(SPEC, 2 + ord(site), step_of(site, c.round))  # noqa: E731
    state = method.init(SPEC, weights(7), rng.initial_stream(0, "method init"))
    return InProcessFederation(MessageExchange(method, "fedpara", SPEC), config, trainer_for, SITES, state, tap=tap)


def changes(adapter: HadamardLoraAdapter, w) -> dict[str, torch.Tensor]:
    """What the adapter adds to each frozen weight."""
    return {
        m: weight_change(
            *(w[f"{m}.{pair}_{side}"] for pair in ("lora", "private") for side in "AB"), adapter.form, adapter.scale
        )
        for m in (n.removesuffix(".lora_A") for n in w if n.endswith(".lora_A"))
    }


def test_aggregate_by_hand():
    """(1 * [1, 2] + 3 * [3, 8]) / 4 = [2.5, 6.5]."""
    state = FederatedState({"m.lora_A": torch.zeros(1, 2), "m.lora_B": torch.zeros(2, 1)})
    b = torch.tensor([[10.0], [20.0]])
    sent = [
        AcceptedUpload(Payload({"m.lora_A": torch.tensor([a]), "m.lora_B": b}), n, ctx(), {})
        for a, n in (([1.0, 2.0], 1), ([3.0, 8.0], 3))
    ]
    new = aggregated(FedPara(), state, iter(sent))
    assert new.tensors["m.lora_A"].tolist() == [[2.5, 6.5]]
    assert torch.equal(new.tensors["m.lora_B"], b)


@pytest.mark.parametrize("form", ADAPTERS)
def test_every_round_equals_a_naive_twin(form):
    run = federation(FedPara(ADAPTERS[form]), rounds=6)
    secret = rng.derive_secret("server", 3, True)
    model, own = {n: w for n, w in weights(7).items() if n not in PRIVATE}, {}

    def compare(running: InProcessFederation, round_: int) -> None:
        nonlocal model
        trained, counts = {}, {}
        for site in aggregation_rules.draw_cohort(SITES, 0.5, secret, round_):
            trained[site] = {n: w + step_of(site, round_) for n, w in model.items()}
            counts[site] = 2 + ord(site)
            now = {n: running.private[site].tensors[n] for n in PRIVATE}
            if site in own:
                for name in PRIVATE:
                    torch.testing.assert_close(now[name], own[site][name] + step_of(site, round_))
            own[site] = now
            for name, value in trained[site].items():
                torch.testing.assert_close(running.models(site)["client"][name], value)
        total = sum(counts.values())
        model = {n: sum(counts[s] / total * trained[s][n] for s in trained) for n in model}
        assert set(running.server.tensors) == set(model)
        for name, value in model.items():
            torch.testing.assert_close(running.server.tensors[name], value)

    run.run(compare)
    assert len(own) == len(SITES)


@pytest.mark.parametrize("form", ADAPTERS)
def test_the_server_s_model_is_the_base_plus_b_a(form):
    """Exactly: the neutral pair leaves not a bit of rounding behind."""
    adapter = ADAPTERS[form]
    run = federation(FedPara(adapter))
    run.run()
    view = run.models()["server"]
    assert set(view) == set(SPEC)
    for module, delta in changes(adapter, view).items():
        shared = view[f"{module}.lora_B"] @ view[f"{module}.lora_A"]
        assert torch.equal(delta, 1.5 * shared)  # alpha / rank
        assert shared.any()


@pytest.mark.parametrize("form", ADAPTERS)
def test_a_client_s_model_is_not_the_server_s(form):
    """The control of the test above."""
    run = federation(FedPara(ADAPTERS[form]))
    run.run()
    views = run.models("a")
    mixed = {n: views["client" if n in PRIVATE else "server"][n] for n in SPEC}
    ours, theirs = changes(ADAPTERS[form], mixed), changes(ADAPTERS[form], views["server"])
    assert not any(torch.allclose(ours[m], theirs[m]) for m in ours)


@pytest.mark.parametrize("form", ADAPTERS)
def test_first_private_pair_is_the_client_s_own_draw(form):
    method = FedPara(ADAPTERS[form])
    down, starts = method.broadcast(method.init(SPEC, weights(7), rng.initial_stream(0, "x")), ctx()), []
    for secret in (bytes([1]) * 32, bytes([2]) * 32, bytes([1]) * 32):
        local = ToyTrainer(SPEC)
        method.client(None, down, local, ctx(secret=secret))
        starts.append(local.started_from[0])
    first, other, again = starts
    assert all(torch.equal(first[n], again[n]) for n in SPEC)
    assert not torch.equal(first["h.0.attn.private_A"], other["h.0.attn.private_A"])
    assert not torch.equal(first["h.0.attn.private_A"], weights(7)["h.0.attn.private_A"])  # nor the server's
    assert 0 < first["h.0.attn.private_A"].abs().max() <= 5**-0.5
    assert all(bool(first[n].any()) == (form == "product") for n in PRIVATE if n.endswith("B"))
    assert all(torch.equal(first[n], w) for n, w in down.fields.items())


def test_a_new_private_pair_leaves_the_server_s_model_in_form_plus_one():
    """B_p = 0, so a first participation starts from W_0 + s B A."""
    method, local = FedPara(ADAPTERS["plus-one"]), ToyTrainer(SPEC)
    state = FederatedState(drop_private_factors(weights(9)))
    method.client(None, method.broadcast(state, ctx(4)), local, ctx(4))
    ours = changes(method.adapter, local.started_from[0])
    theirs = changes(method.adapter, method.models(state)["server"])
    assert all(torch.equal(ours[m], theirs[m]) for m in theirs)


def test_the_private_pair_goes_on_where_it_was():
    for is_new in (False, True):  # a site that the server takes for new keeps it too
        method, local, private = FedPara(), ToyTrainer(SPEC), FederatedState(weights(5))
        state = FederatedState(drop_private_factors(weights(9)))
        private_state, up = method.client(private, method.broadcast(state, ctx(4)), local, ctx(4, is_new=is_new))
        for name, started in local.started_from[0].items():
            assert torch.equal(started, private.tensors[name] if name in PRIVATE else state.tensors[name]), name
        assert set(up.fields) == set(SPEC) - PRIVATE
        assert all(torch.equal(private_state.tensors[n], w) for n, w in up.fields.items())


def test_the_private_pair_is_on_no_wire(tmp_path):
    """No message of the run has a field for it or its bytes; the shared pair's bytes are in the messages."""
    tap = MessageCapture(tmp_path)
    run = federation(FedPara(ADAPTERS["product"]), rounds=8, tap=tap)
    trained: list[dict[str, bytes]] = []
    original = run._turn

    def recording(round_, site, participate):
        up = original(round_, site, participate)
        trained.append({n: t.numpy().tobytes() for n, t in run.private.staged(site).tensors.items()})
        return up

    run._turn = recording  # type: ignore[method-assign]
    run.run()
    seen = [tap.read(m) for m in tap.messages()]
    assert all({f[0] for f in describe_message(data)["fields"]} == set(SPEC) - PRIVATE for data in seen)
    everything = b"".join(seen)
    assert all((data in everything) == (n not in PRIVATE) for turn in trained for n, data in turn.items())


def test_variance_of_the_drawn_b():
    """N(0, 1/r) at r = 16: 80,000 draws, the standard deviation to within 2 % (fixed secret)."""
    method = FedPara(HadamardLoraAdapter(rank=16, form="product"))
    drawn = method._drawn({"m.private_B": ParamSpec((5000, 16)), "m.lora_B": ParamSpec((3, 16))}, ctx().rng("x"))
    assert set(drawn) == {"m.private_B"}
    assert float(drawn["m.private_B"].std()) == pytest.approx(0.25, rel=0.02)


def test_another_adapter_is_refused():
    with pytest.raises(ConfigError, match="adapter.kind"):
        create_method("fedpara", 'adapter = {kind = "lora"}')
    assert create_method("fedpara", 'adapter = {form = "product"}').adapter == HadamardLoraAdapter(form="product")
