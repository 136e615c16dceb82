"""Every edge case of the method, compared with values by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedveil import rng
from fedveil.config import parse
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, StateError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.lora_algebra import parse_factor_name
from fedveil.ops.quantization import BlockQuantizer
from fedveil.strategies import create_method
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedrand import FedRand
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.conftest import ToyTrainer, aggregated

A1, A2 = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 8.0]])
B1 = torch.tensor([[10.0], [20.0]])


def ctx(round_: int = 0, client: str = "k", is_new: bool = True, secret: bytes = bytes(32)) -> RoundContext:
    return RoundContext(round_, client, is_new, secret)


def secret_that_draws(side: str, rho: float = 0.5, round_: int = 0) -> bytes:
    for i in itertools.count():
        secret = bytes([i]) * 32
        if bool(ctx(round_, secret=secret).rng("factor").bernoulli(rho, ())) == (side == "A"):
            return secret
    raise AssertionError


def sent(side: str, value: torch.Tensor, n: int, client: str = "k", **scalars: str) -> AcceptedUpload:
    return AcceptedUpload(Payload({f"m.lora_{side}": value}, side, scalars), n, ctx(client=client))


def server(a=torch.zeros(1, 2), b=torch.zeros(2, 1)) -> FederatedState:
    return FederatedState({"m.lora_A": a, "m.lora_B": b}, {"next_factor": {}})


def test_aggregate_by_hand():
    """A over its two senders, (1 * [1, 2] + 3 * [3, 8]) / 4 = [2.5, 6.5]; B over its one."""
    new = aggregated(FedRand(), server(), iter([sent("A", A1, 1), sent("B", B1, 5), sent("A", A2, 3)]))
    assert new.tensors["m.lora_A"].tolist() == [[2.5, 6.5]]
    assert torch.equal(new.tensors["m.lora_B"], B1)


@pytest.mark.parametrize("side,value,other", [("A", A1, "B"), ("B", B1, "A")])
def test_nobody_sends_a_factor(side, value, other):
    """alpha = 0 or beta = 0: that factor stays the same tensor; nothing is divided by zero."""
    before = server(A2, B1 * 2)
    new = aggregated(FedRand(), before, iter([sent(side, value, 2), sent(side, value, 9)]))
    assert torch.equal(new.tensors[f"m.lora_{side}"], value)
    assert new.tensors[f"m.lora_{other}"] is before.tensors[f"m.lora_{other}"]


def test_without_normalisation_divides_by_the_whole_cohort():
    """A: (1 * A1) / 4, since m_r = 4; B: (3 * B1) / 4."""
    new = aggregated(FedRand(normalise=False), server(), iter([sent("A", A1, 1), sent("B", B1, 3)]))
    torch.testing.assert_close(new.tensors["m.lora_A"], A1 / 4)
    torch.testing.assert_close(new.tensors["m.lora_B"], B1 * 3 / 4)


@pytest.mark.parametrize("side", ["A", "B"])
def test_start_mixes_the_server_s_factor_with_the_past_one(side, lora_spec, lora_weights, random_weights):
    """Eq. 6: the drawn factor from the server, the other as it stood after the client's last participation."""
    past = FederatedState(random_weights(lora_spec, 7))
    local = ToyTrainer(lora_spec)
    private, up = FedRand().client(
        past, Payload(lora_weights, "both"), local, ctx(4, secret=secret_that_draws(side, round_=4))
    )
    for name, started in local.started_from[0].items():
        expected = lora_weights[name] if name.endswith(side) else past.tensors[name]
        assert torch.equal(started, expected), name
    assert up.variant == side
    assert set(up.fields) == set(parse_factor_name(lora_spec, side))
    assert all(torch.equal(private.tensors[n], local.started_from[0][n] + 0.5) for n in lora_spec)


@pytest.mark.parametrize("round_", [0, 3])
def test_newcomer_starts_at_both_server_factors(round_, lora_spec, lora_weights):
    local = ToyTrainer(lora_spec)
    FedRand().client(None, Payload(lora_weights, "both"), local, ctx(round_))
    assert all(torch.equal(local.started_from[0][n], w) for n, w in lora_weights.items())


def test_without_past_no_site_starts_from_the_initial_factor():
    """w/o past: both factors come from the server, a late newcomer's as well."""
    with pytest.raises(ConfigError, match='cold: "initial" has no effect with past = false'):
        FedRand(past=False, cold="initial")


def test_cold_initial_gives_a_late_newcomer_the_initial_factor(lora_spec, lora_weights, random_weights):
    method = FedRand(cold="initial")
    state = method.init(lora_spec, lora_weights, rng.initial_stream(0, "method init"))
    later = FederatedState({**state.tensors, **random_weights(lora_spec, 11)}, state.scalars)
    assert method.broadcast(later, ctx(0)).variant == "both"
    assert method.broadcast(later, ctx(3, is_new=False)).variant == "both"
    down = method.broadcast(later, ctx(3))
    assert down.variant == "cold"
    for side in "AB":
        local = ToyTrainer(lora_spec)
        method.client(None, down, local, ctx(3, secret=secret_that_draws(side, round_=3)))
        for name, started in local.started_from[0].items():
            initial = torch.zeros_like(started) if name.endswith("B") else lora_weights[name]
            assert torch.equal(started, later.tensors[name] if name.endswith(side) else initial)


def test_without_past_both_factors_come_from_the_server(lora_spec, lora_weights, random_weights):
    local = ToyTrainer(lora_spec)
    FedRand(past=False).client(
        FederatedState(random_weights(lora_spec, 7)), Payload(lora_weights, "both"), local, ctx(4, is_new=False)
    )
    assert all(torch.equal(local.started_from[0][n], w) for n, w in lora_weights.items())


def test_independent_initial_factors_are_each_client_s_own(lora_spec, lora_weights):
    starts = []
    for i in (1, 2):
        local = ToyTrainer(lora_spec)
        FedRand(init_factors="independent").client(
            None, Payload(lora_weights, "both"), local, ctx(secret=bytes([i]) * 32)
        )
        starts.append(local.started_from[0])
    first, second = starts
    assert not torch.equal(first["h.0.lora_A"], second["h.0.lora_A"])
    assert not torch.equal(first["h.0.lora_A"], lora_weights["h.0.lora_A"])
    assert first["h.0.lora_A"].abs().max() <= 5**-0.5
    assert all(not first[n].any() for n in first if n.endswith("B"))


@pytest.mark.parametrize("rho,side", [(1.0, "A"), (0.0, "B")])
def test_rho_of_one_and_zero_share_one_factor_for_ever(rho, side, lora_spec, lora_weights):
    run = federation(FedRand(rho=rho), lora_spec, lora_weights)
    after = run.run()
    for name, before in lora_weights.items():
        changed = not torch.equal(after.tensors[name], before)
        assert changed == name.endswith(side), name


def federation(
    method: FedRand, spec, weights, rounds: int = 6, fraction: float = 0.67, tap: MessageCapture | None = None
) -> InProcessFederation:
    config = parse({"run.deterministic": True, "run.seed": 3, "run.rounds": rounds, "cohort.fraction": fraction})
    exchange = MessageExchange(method, "fedrand", spec)
    state = method.init(spec, weights, rng.initial_stream(0, "method init"))
    trainer_for = lambda site, c: ToyTrainer(spec, 2 + ord(site), 0.5 + ord(site) / 100 + c.round / 10)  # noqa: E731
    return InProcessFederation(exchange, config, trainer_for, ["a", "b", "c", "d"], state, tap=tap)


@pytest.mark.long
def test_draw_follows_rho():
    """4,000 draws at rho = 0.3: within 5 standard deviations of 1,200 (fixed secret)."""
    method = FedRand(rho=0.3)
    draws = sum(method._draw(ctx(r), "factor") == "A" for r in range(4000))
    assert abs(draws - 1200) < 5 * (4000 * 0.3 * 0.7) ** 0.5


def test_server_never_sees_a_pair_that_belongs_together(tmp_path, lora_spec, lora_weights):
    """In no participation do A and B of the same training both cross the wire, in all of the run's messages."""
    tap = MessageCapture(tmp_path)
    run = federation(FedRand(), lora_spec, lora_weights, rounds=12, tap=tap)
    pairs: list[tuple[dict, dict]] = []
    original = run._turn

    def recording(round_, site, participate):
        up = original(round_, site, participate)
        pairs.append(
            (
                parse_factor_name(run.private.staged(site).tensors, "A"),
                parse_factor_name(run.private.staged(site).tensors, "B"),
            )
        )
        return up

    run._turn = recording  # type: ignore[method-assign]
    run.run()
    seen = b"".join(tap.read(m) for m in tap.messages() if m.direction == "up")
    in_clear = lambda factors: all(t.numpy().tobytes() in seen for t in factors.values())  # noqa: E731
    assert all(in_clear(a) != in_clear(b) for a, b in pairs)
    variants = {
        run.exchange.receive(tap.read(m), m.round).payload.variant for m in tap.messages() if m.direction == "up"
    }
    assert variants == {"A", "B"}


def test_same_run_under_fedavg_shows_every_pair(tmp_path, lora_spec, lora_weights):
    """The control of the test above: undefended, the server does see every pair."""
    exchange = MessageExchange(FedAvg(), "fedavg", lora_spec)
    state = exchange.method.init(lora_spec, lora_weights, rng.initial_stream(0, "method init"))
    down = exchange.broadcast(state, ctx())
    _, parts = exchange.participate(down, None, ToyTrainer(lora_spec), ctx())
    up = b"".join(parts)
    assert all((w + 0.5).numpy().tobytes() in up for w in lora_weights.values())


def test_upload_is_one_factor_s_bytes(lora_spec, lora_weights):
    exchange = MessageExchange(FedRand(), "fedrand", lora_spec)
    state = exchange.method.init(lora_spec, lora_weights, rng.initial_stream(0, "method init"))
    down = exchange.broadcast(state, ctx())
    for side in "AB":
        _, parts = exchange.participate(down, None, ToyTrainer(lora_spec), ctx(secret=secret_that_draws(side)))
        up = b"".join(parts)
        expected = sum(4 * w.numel() for n, w in lora_weights.items() if n.endswith(side))
        assert exchange.receive(up, 0).payload_bytes == expected


def test_selected_downlink_sends_the_announced_factor_only(lora_spec, lora_weights):
    method = FedRand(downlink="selected")
    exchange = MessageExchange(method, "fedrand", lora_spec)
    state = method.init(lora_spec, lora_weights, rng.initial_stream(0, "method init"))
    assert method.broadcast(state, ctx()).variant == "both"
    private, parts = exchange.participate(
        exchange.broadcast(state, ctx()), None, ToyTrainer(lora_spec), ctx(secret=b"s" * 32)
    )
    message = exchange.receive(b"".join(parts), 0)
    announced = message.payload.scalars["next_factor"]
    state = aggregated(method, state, iter([AcceptedUpload(message.payload, 3, ctx(), {})]))
    down = method.broadcast(state, ctx(1, is_new=False))
    assert down.variant == announced
    assert set(down.fields) == set(parse_factor_name(lora_spec, announced))
    _, second = method.client(private, down, ToyTrainer(lora_spec), ctx(1, is_new=False))
    assert second.variant == announced
    assert method.broadcast(state, ctx(1, client="other", is_new=False)).variant == "both"
    # A site that lost its state says so; the server then treats it as new and sends both.
    with pytest.raises(StateError, match="the factors of an earlier participation are missing"):
        method.client(None, down, ToyTrainer(lora_spec), ctx(1, is_new=False))
    assert method.broadcast(state, ctx(2, is_new=True)).variant == "both"


def test_selected_downlink_announces_every_round(lora_spec, lora_weights):
    run = federation(FedRand(downlink="selected"), lora_spec, lora_weights, rounds=6, fraction=1.0)
    run.run()
    assert set(run.server.scalars["next_factor"]) == {"a", "b", "c", "d"}
    both = federation(FedRand(), lora_spec, lora_weights, rounds=6, fraction=1.0)
    both.run()
    assert run.download_bytes < both.download_bytes


def test_forged_announcement_is_refused(lora_spec, lora_weights):
    exchange = MessageExchange(FedRand(downlink="selected"), "fedrand", lora_spec)

    fields = parse_factor_name(lora_weights, "A")
    with pytest.raises(WireError, match=r"next_factor: expected one of \('A', 'B'\), found 'C'"):
        pack_message(
            exchange.layout, EnvelopeStamp("fedrand", 1, 0, "up"), Payload(fields, "A", {"next_factor": "C"}), 3, {}
        )


@pytest.mark.parametrize(
    "fields,match",
    [
        ("rho = 1.5", "rho: expected a probability from 0 to 1, found 1.5"),
        ("rho = -0.1", "rho: expected a probability"),
        ('rho = "half"', "rho: "),
        ("rhoo = 0.5", "rhoo: unknown field of fedrand; did you mean rho\\? expected one of"),
        ('adapter = {kind = "all"}', "adapter"),
        ('downlink = "selected"\npast = false', "downlink: "),
        ("rho", "expected TOML"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, match):
    with pytest.raises(ConfigError, match=match):
        create_method("fedrand", fields)


def test_weights_without_factors_are_refused():
    with pytest.raises(ConfigError, match="expected a LoRA factor"):
        FedRand().init({"wte.weight": ParamSpec((2, 3))}, {}, rng.initial_stream(0, "x"))
    with pytest.raises(ConfigError, match="expected both LoRA factors"):
        FedRand().init({"m.lora_A": ParamSpec((2, 3))}, {}, rng.initial_stream(0, "x"))


def test_staying_alone_with_one_client_and_full_sharing_equals_fedavg(lora_spec, lora_weights):
    """One client, w/o past: what the server gets of a factor is what FedAvg would get of it."""
    down = Payload(lora_weights, "both")
    _, ours = FedRand(past=False).client(None, down, ToyTrainer(lora_spec), ctx())
    _, theirs = FedAvg().client(None, Payload(lora_weights), ToyTrainer(lora_spec), ctx())
    assert all(torch.equal(w, theirs.fields[n]) for n, w in ours.fields.items())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_uploads_as_codes(bits, lora_spec, lora_weights):
    """Only levels leave; the server folds what they stand for; what the client keeps is not rounded."""
    method = FedRand(rho=1.0, upload_bits=bits)
    exchange = MessageExchange(method, "fedrand", lora_spec)
    server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
    ctx = RoundContext(0, "a", True, bytes(32))
    private, up = exchange.participate(exchange.broadcast(server, ctx), None, ToyTrainer(lora_spec), ctx)
    message = exchange.receive(b"".join(up), 0)
    new = aggregated(method, server, iter([AcceptedUpload(message.payload, 3, ctx)])).tensors
    how = BlockQuantizer("absmax", bits)
    for name, w in lora_weights.items():
        if name.endswith("A"):
            assert isinstance(message.payload.fields[name], QuantizedTensor)
            assert torch.equal(new[name], how.dequantise(how.quantise(w + 0.5)))
            assert torch.equal(private.tensors[name], w + 0.5)
        else:
            assert name not in message.payload.fields
            assert torch.equal(new[name], w)


def test_uploads_as_codes_of_1_bit_are_refused():
    with pytest.raises(ConfigError, match="bits"):
        FedRand(upload_bits=1)
