from __future__ import annotations

import pytest
import torch

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.errors import ConfigError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.lora_algebra import factor_name, parse_factor_name
from fedveil.strategies.fedsa_lora import FedSALoRA
from tests.conftest import ToyTrainer, aggregated


def context(round_: int, site: str = "a") -> RoundContext:
    return RoundContext(round_, site, round_ == 0, bytes(32))


def test_mean_of_a_by_hand_and_b_of_the_server_stays():
    server = FederatedState({"m.lora_A": torch.tensor([[2.0, -1.0]]), "m.lora_B": torch.tensor([[3.0]])})
    sent = (([[1.0, 0.0]], 3), ([[5.0, 8.0]], 1))
    uploads = [
        AcceptedUpload(Payload({"m.lora_A": torch.tensor(a), "m.lora_B": torch.tensor([[9.0]])}), n, context(0))
        for a, n in sent
    ]
    new = aggregated(FedSALoRA(), server, iter(uploads)).tensors
    assert new["m.lora_A"].tolist() == [[2.0, 2.0]]
    assert new["m.lora_B"] is server.tensors["m.lora_B"]


def test_two_sites_share_a_and_keep_a_b_each(lora_spec, lora_weights):
    """Three rounds in which site b skips one: its B waits, and goes on beside the newest A. No message holds a B."""
    method = FedSALoRA()
    exchange, server = (
        MessageExchange(method, "fedsa_lora", lora_spec),
        method.init(lora_spec, lora_weights, rng.initial_stream(0, "x")),
    )
    private, steps = {}, {"a": 0.5, "b": 2.0}
    for round_, sites in enumerate(["ab", "a", "ab"]):
        uploads = []
        for site in sites:
            down = exchange.broadcast(server, context(round_, site))
            local = ToyTrainer(lora_spec, step=steps[site])
            before = private.get(site)
            private[site], parts = exchange.participate(down, before, local, context(round_, site))
            data, started = b"".join(parts), local.started_from[0]
            for name, w in started.items():
                if factor_name(name) == "A":
                    assert torch.equal(w, server.tensors[name])
                else:
                    assert torch.equal(w, before.tensors[name] if before else torch.zeros_like(w))
                    assert w.numpy().tobytes() not in down or not w.any()
                    assert private[site].tensors[name].numpy().tobytes() not in data
            payload = exchange.receive(data, round_).payload
            assert set(payload.fields) == set(parse_factor_name(lora_spec, "A"))
            uploads.append(AcceptedUpload(payload, 1, context(round_, site)))
        server = exchange.aggregate(server, uploads)
    for name, w in lora_weights.items():
        if factor_name(name) == "A":
            torch.testing.assert_close(server.tensors[name], w + 1.25 + 0.5 + 1.25)
        else:
            assert torch.equal(server.tensors[name], w)
            assert torch.equal(private["a"].tensors[name], w + 3 * 0.5)
            assert torch.equal(private["b"].tensors[name], w + 2 * 2.0)
    views = method.models(server, private["b"])
    assert list(views["client"]) == list(lora_spec)
    for name in lora_spec:
        own = private["b"].tensors.get(name)
        assert torch.equal(views["client"][name], server.tensors[name] if own is None else own)
        assert torch.equal(views["server"][name], server.tensors[name])


def test_it_is_fedrand_with_rho_1_bit_for_bit(lora_spec, lora_weights):
    """Where every client shares A: the same models everywhere, but B_0 does not go down."""
    ended = []
    for name, fields in (("fedsa_lora", ""), ("fedrand", "rho = 1.0")):
        method = strategies.create_method(name, fields)
        config = parse({"run.deterministic": True, "run.rounds": 4, "cohort.fraction": 0.67})
        trainer_for = lambda site, ctx: ToyTrainer(lora_spec, 3, 0.5 * (1 + ord(site) % 3))  # noqa: E731
        state = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
        run = InProcessFederation(MessageExchange(method, name, lora_spec), config, trainer_for, list("abc"), state)
        run.run()
        ended.append(run)
    ours, theirs = ended
    for name in lora_spec:
        assert torch.equal(ours.server.tensors[name], theirs.server.tensors[name])
    for site in "abc":
        for name, b in parse_factor_name(lora_weights, "B").items():
            local_factor = ours.private.get(site).tensors[name]
            assert torch.equal(local_factor, theirs.private.get(site).tensors[name])
            assert not torch.equal(local_factor, b)
    assert ours.download_bytes < theirs.download_bytes
    assert list(ours.private.get("a").tensors) == list(parse_factor_name(lora_spec, "B"))


def test_a_in_codes_and_the_kept_b_is_exact(lora_spec, lora_weights):
    method = FedSALoRA(upload_bits=4)
    exchange, server = (
        MessageExchange(method, "fedsa_lora", lora_spec),
        method.init(lora_spec, lora_weights, rng.initial_stream(0, "x")),
    )
    down = exchange.broadcast(server, context(0))
    private, parts = exchange.participate(down, None, ToyTrainer(lora_spec), context(0))
    new = exchange.aggregate(
        server, [AcceptedUpload(exchange.receive(b"".join(parts), 0).payload, 1, context(0))]
    ).tensors
    for name, w in lora_weights.items():
        if factor_name(name) == "A":
            most = (w + 0.5).abs().max() / 7 / 2  # half a step of 15 levels; a block holds the whole tensor here
            assert 0 < float((new[name] - w - 0.5).abs().max()) <= float(most) * 1.0001
        else:
            assert torch.equal(private.tensors[name], w + 0.5)


@pytest.mark.parametrize("fields,named", [("upload_bits = 1", "bits"), ('adapter = {kind = "all"}', "adapter")])
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("fedsa_lora", fields)
