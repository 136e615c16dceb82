"""The layers that are sent and kept, compared with values by hand and a simple reference."""

from __future__ import annotations

import pytest
import torch

from fedveil import rng
from fedveil.adapters.lora import LoraAdapter
from fedveil.config import parse
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, StateError
from fedveil.federation import aggregation_rules
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.strategies import create_method
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedper import FedPer, _layer
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import describe_message
from tests.conftest import ToyTrainer, aggregated

SITES = ["a", "b", "c", "d", "e"]
SPEC = LoraAdapter(rank=2).example_spec()  # layers 0, 1 and 2
LOWER = {n for n in SPEC if n.startswith("h.0.")}
TOP = set(SPEC) - LOWER


def ctx(round_: int = 0, client: str = "k", is_new: bool = False) -> RoundContext:
    return RoundContext(round_, client, is_new, bytes(32))


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}


def server(seed: int = 1, holders: tuple[str, ...] = ()) -> FederatedState:
    return FederatedState(weights(seed), {"holders": list(holders)})


def step_of(site: str, round_: int) -> float:
    """Another step for every site and round, so that no two trained tensors are equal."""
    return 0.5 + ord(site) / 100 + round_ / 7


def federation(
    method, name: str, rounds: int = 6, fraction: float = 0.4, tap: MessageCapture | None = None
) -> InProcessFederation:
    config = parse({"run.deterministic": True, "run.seed": 3, "run.rounds": rounds, "cohort.fraction": fraction})
    trainer_for = lambda site, c: ToyTrainer(SPEC, 2 + ord(site), step_of(site, c.round))  # noqa: E731
    state = method.init(SPEC, weights(7), rng.initial_stream(0, "method init"))
    return InProcessFederation(MessageExchange(method, name, SPEC), config, trainer_for, SITES, state, tap=tap)


def test_aggregate_by_hand():
    """One tensor of layer 1 (shared) and one of layer 0: (1 * 2 + 3 * 6) / 4 = 5, and the lower one is not folded."""
    state = FederatedState({"h.0.lora_A": torch.zeros(1, 1), "h.1.lora_A": torch.zeros(1, 1)}, {"holders": ["z"]})
    full = lambda v: {"h.0.lora_A": torch.full((1, 1), -v), "h.1.lora_A": torch.full((1, 1), v)}  # noqa: E731
    method = FedPer(layers=1)
    for round_, lower, holders in ((0, -5.0, ["z"]), (4, 0.0, ["a", "b", "z"])):
        sent = [
            AcceptedUpload(Payload(full(v), "all"), n, ctx(round_, k), {}) for v, n, k in ((2.0, 1, "b"), (6.0, 3, "a"))
        ]
        new = aggregated(method, state, iter(sent))
        assert new.tensors["h.1.lora_A"].item() == 5.0
        assert new.tensors["h.0.lora_A"].item() == lower
        assert new.scalars == {"holders": holders}


def test_every_round_equals_a_naive_twin():
    """The whole run, two of five sites a round, beside the same in plain dictionaries."""
    run = federation(FedPer(), "fedper", rounds=9)
    secret = rng.derive_secret("server", 3, True)
    model, own, aggregate = weights(7), {}, None

    def compare(running: InProcessFederation, round_: int) -> None:
        nonlocal model, aggregate
        trained, counts = {}, {}
        for site in aggregation_rules.draw_cohort(SITES, 0.4, secret, round_):
            lower = model if round_ == 0 else own.get(site, aggregate)
            start = {n: (model if n in TOP else lower)[n] for n in SPEC}
            trained[site] = {n: w + step_of(site, round_) for n, w in start.items()}
            counts[site] = 2 + ord(site)
            if round_ > 0:
                own[site] = trained[site]
        total = sum(counts.values())
        mean = {n: sum(counts[s] / total * trained[s][n] for s in trained) for n in SPEC}
        model = {n: mean[n] if n in TOP or round_ == 0 else model[n] for n in SPEC}
        aggregate = dict(model) if round_ == 0 else aggregate
        for name in SPEC:
            torch.testing.assert_close(running.server.tensors[name], model[name])
            for site, whole in trained.items():
                torch.testing.assert_close(running.models(site)["client"][name], whole[name])

    run.run(compare)
    assert len(own) == len(SITES)  # otherwise the reference saw no late newcomer and no return


def test_lower_layers_of_the_server_are_the_round_0_aggregate_for_ever():
    run, seen = federation(FedPer(), "fedper"), []
    run.run(lambda running, _: seen.append({n: running.server.tensors[n].clone() for n in SPEC}))
    for later, before in zip(seen[1:], seen, strict=False):
        assert all(torch.equal(later[n], seen[0][n]) for n in LOWER)
        assert all(not torch.equal(later[n], before[n]) for n in TOP)


@pytest.mark.parametrize(
    "round_,is_new,holders,variant",
    [
        (0, True, (), "all"),
        (3, True, (), "all"),  # a newcomer
        (3, False, (), "all"),  # it took part in round 0 only
        (3, False, ("k",), "top"),
        (3, True, ("k",), "all"),  # it reported that it lost its state
    ],
)
def test_who_gets_what(round_, is_new, holders, variant):
    state = server(1, holders)
    down = FedPer().broadcast(state, ctx(round_, "k", is_new))
    assert down.variant == variant
    assert set(down.fields) == (set(SPEC) if variant == "all" else TOP)
    assert all(torch.equal(w, state.tensors[n]) for n, w in down.fields.items())


class Name(str):
    """Counts how often it is compared with another one."""

    compared = 0

    def __lt__(self, other: str) -> bool:
        Name.compared += 1
        return str.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_broadcast_to_one_of_many_sites_does_not_look_through_all_of_them(monkeypatch):
    """A round asks for every site: with N looks each, a thousand sites are a million."""
    state = server(1, tuple(Name(f"{i:04d}") for i in range(1000)))
    monkeypatch.setattr(Name, "compared", 0)
    assert FedPer().broadcast(state, ctx(3, "0997")).variant == "top"
    assert FedPer().broadcast(state, ctx(3, "0997x")).variant == "all"
    assert Name.compared < 30


def test_after_round_0_its_clients_start_from_the_aggregate_then_from_their_own_layers():
    method, state = FedPer(), server(1)
    private, up = method.client(None, method.broadcast(state, ctx(0)), ToyTrainer(SPEC), ctx(0))
    assert set(up.fields) == set(SPEC)
    assert all(torch.equal(private.tensors[n], state.tensors[n] + 0.5) for n in SPEC)

    local, after = ToyTrainer(SPEC), server(2)  # weights other than those that this client trained
    private, up = method.client(private, method.broadcast(after, ctx(5)), local, ctx(5))
    assert set(up.fields) == TOP
    assert all(torch.equal(local.started_from[0][n], after.tensors[n]) for n in SPEC)

    own, later = private.tensors, server(3, ("k",))
    _, up = method.client(private, method.broadcast(later, ctx(9)), local, ctx(9))
    assert set(up.fields) == TOP
    for name, started in local.started_from[1].items():
        assert torch.equal(started, later.tensors[name] if name in TOP else own[name]), name


def test_a_site_taken_for_new_goes_on_with_its_own_lower_layers():
    """Its upload came too late, say: the server sends everything, but its layers of a round after 0 are worth more."""
    local, state = ToyTrainer(SPEC), server(1)
    private = FederatedState(weights(5), {"round": 2})
    FedPer().client(private, FedPer().broadcast(state, ctx(3, is_new=True)), local, ctx(3, is_new=True))
    for name, started in local.started_from[0].items():
        assert torch.equal(started, state.tensors[name] if name in TOP else private.tensors[name]), name


@pytest.mark.parametrize("private", [None, FederatedState(weights(5), {"round": 0})])
def test_lost_private_state_is_an_error_when_only_the_top_came(private):
    state = server(1, ("k",))
    with pytest.raises(StateError, match="the lower layers of an earlier participation are missing"):
        FedPer().client(private, FedPer().broadcast(state, ctx(3)), ToyTrainer(SPEC), ctx(3))


@pytest.mark.parametrize("layers", [3, 50])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_sharing_every_layer_is_fedavg_bit_for_bit(layers, wire_dtype, tmp_path):
    """Server weights after every round, and the bytes of every payload in both directions."""
    ours = federation(FedPer(layers, wire_dtype=wire_dtype), "fedper", tap=MessageCapture(tmp_path / "ours"))
    theirs = federation(FedAvg(wire_dtype=wire_dtype), "fedavg", tap=MessageCapture(tmp_path / "theirs"))
    for round_ in range(6):
        ours.round(round_)
        theirs.round(round_)
        assert all(torch.equal(ours.server.tensors[n], theirs.server.tensors[n]) for n in SPEC)
    pairs = list(zip(ours.tap.messages(), theirs.tap.messages(), strict=True))
    assert len(pairs) == 2 * 2 * 6
    for mine, other in pairs:
        assert (mine.site, mine.direction) == (other.site, other.direction)
        assert payload_of(ours.tap.read(mine)) == payload_of(theirs.tap.read(other))


def payload_of(data: bytes) -> bytes:
    """What comes behind the header, which names the method."""
    return data[-describe_message(data)["payload_bytes"] :]


def test_sharing_fewer_layers_is_not_fedavg():
    """The control of the test above."""
    ours, theirs = federation(FedPer(2), "fedper").run(), federation(FedAvg(), "fedavg").run()
    assert not any(torch.equal(ours.tensors[n], theirs.tensors[n]) for n in SPEC if n in LOWER)


def test_lower_layers_are_on_no_wire_once_a_client_has_its_own(tmp_path):
    tap = MessageCapture(tmp_path)
    run = federation(FedPer(), "fedper", rounds=10, tap=tap)
    secrets: list[bytes] = []
    original = run._turn

    def recording(round_, site, participate):
        up = original(round_, site, participate)
        if round_ > 0:
            secrets.extend(run.private.staged(site).tensors[n].numpy().tobytes() for n in LOWER)
        return up

    run._turn = recording  # type: ignore[method-assign]
    run.run()
    returned: set[str] = set()
    for message in tap.messages():
        data = tap.read(message)
        fields = {f[0] for f in describe_message(data)["fields"]}
        if message.round > 0:
            expected = set(SPEC) if message.direction == "down" and message.site not in returned else TOP
            assert fields == expected, (message.round, message.site, message.direction)
            assert not any(secret in data for secret in secrets)
            if message.direction == "up":
                returned.add(message.site)
        else:
            assert fields == set(SPEC)
    assert returned == set(SITES)


def test_server_model_and_client_model():
    state, private = server(1), FederatedState(weights(5), {"round": 2})
    views = FedPer().models(state, private)
    assert all(torch.equal(views["server"][n], state.tensors[n]) for n in SPEC)
    assert all(torch.equal(views["client"][n], private.tensors[n]) for n in SPEC)
    assert set(FedPer().models(state)) == {"server"}


@pytest.mark.parametrize(
    "name,layer",
    [
        ("model.language_model.layers.3.self_attn.q_proj.lora_A", 3),
        ("h.0.attn.lora_A", 0),
        ("layers.11.experts.2.up.lora_B", 11),
    ],
)
def test_layer_of_a_tensor(name, layer):
    assert _layer(name) == layer


def test_top_is_counted_by_number_and_not_by_text_or_order():
    names = ["h.10.m.lora_A", "h.9.m.lora_A", "h.2.m.lora_A", "h.10.m.lora_B"]
    assert FedPer(layers=2)._top(names) == {"h.10.m.lora_A", "h.10.m.lora_B", "h.9.m.lora_A"}


def test_a_head_without_a_number_belongs_to_the_top():
    names = ["h.1.m.lora_A", "classifier.lora_A", "h.0.m.lora_A", "classifier.lora_B"]
    assert FedPer(layers=1)._top(names) == {"h.1.m.lora_A", "classifier.lora_A", "classifier.lora_B"}


def test_what_it_refuses():
    with pytest.raises(ConfigError, match=r"wte\.lora_A2: the name has no layer number"):
        FedPer().init({"wte.lora_A2": ParamSpec((1,))}, {}, rng.initial_stream(0, "x"))
    for fields, match in (
        ("layers = 0", "layers: expected at least 1 shared layer, found 0"),
        ("layer = 3", "layer: unknown field of fedper"),
        ('adapter = {kind = "all"}', "adapter"),
    ):
        with pytest.raises(ConfigError, match=match):
            create_method("fedper", fields)
