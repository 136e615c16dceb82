from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng, strategies
from fedveil.adapters import heterogeneous_ranks
from fedveil.adapters.residual_lora import ResidualLoraAdapter, factor_names, residual_names
from fedveil.config import parse
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, UploadRefused, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.ops.lora_algebra import parse_factor_name
from fedveil.ops.running_sums import RunningSums
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import judge_upload
from fedveil.strategies.flora import FLoRA
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.strategies.test_fedex_lora import CTX, SPEC, Site, weights_of
from tools.forge import with_header

RANKS = {"b": 1, "d": 1}
METHOD = FLoRA(ranks=RANKS, adapter=ResidualLoraAdapter(rank=2))


class Masked(Site):
    """The same site, which keeps what is frozen in part."""

    def train(self, weights, frozen=None, penalty=None):
        result = super().train(weights, frozen)
        masked_weights = {
            n: torch.where(frozen[n], weights[n], w) if n in frozen else w for n, w in result.weights.items()
        }
        self.started = {n: w.clone() for n, w in weights.items()}
        return replace(result, weights=masked_weights)


def federation(method=METHOD, sites="abc", fraction: float = 1.0, rounds: int = 4) -> InProcessFederation:
    config = parse({"run.deterministic": True, "run.rounds": rounds, "cohort.fraction": fraction})
    state = method.init(SPEC, weights_of(), rng.initial_stream(0, "m"))
    exchange = MessageExchange(method, "flora", SPEC)
    return InProcessFederation(exchange, config, lambda site, ctx: Masked(site, ctx.round), list(sites), state)


def stacked(server, round_: int, sites: list[str], low) -> dict[str, torch.Tensor]:
    """Eqs. 2 and 3 as they are written: [B_1, ..., B_K] [p_1 A_1; ...; p_K A_K], in fp64, from ranks of their own."""
    total, products = sum(1 + ord(site) % 5 for site in sites), {}
    parts = {m: ([], []) for m in ("h.0", "h.1")}
    for site in sites:
        rank = low.get(site, 2)
        start = dict(server)
        for m in parts:
            a, b = server[f"{m}.lora_A"].clone(), torch.zeros_like(server[f"{m}.lora_B"])
            a[rank:] = 0
            start |= {f"{m}.lora_A": a, f"{m}.lora_B": b}
        sent = Site(site, round_).train(start, {n: torch.tensor(True) for n in residual_names(SPEC)}).weights
        for m, (left, right) in parts.items():
            left.append(sent[f"{m}.lora_B"][:, :rank].double())
            right.append((1 + ord(site) % 5) / total * sent[f"{m}.lora_A"][:rank].double())
    for m, (left, right) in parts.items():
        products[m] = torch.cat(left, 1) @ torch.cat(right)
    return products


def check_rounds(run: InProcessFederation, rounds: int) -> None:
    """Each round against the stack."""
    for round_ in range(rounds):
        before = run.exchange.method.models(run.server)["server"]
        run.round(round_)
        wanted = stacked(before, round_, run.last_cohort, run.exchange.method.ranks)
        after = run.exchange.method.models(run.server)["server"]
        for m, change in wanted.items():
            grown = after[f"{m}.residual"].double() - before[f"{m}.residual"].double()
            size = float(change.norm()) + float(before[f"{m}.residual"].norm())
            assert float((grown - change).norm()) <= 2e-6 * size
            assert not after[f"{m}.lora_B"].any()
            assert not torch.equal(after[f"{m}.lora_A"], before[f"{m}.lora_A"])


def test_two_uploads_of_two_ranks_by_hand():
    """x, rank 2: [1, 2] [[1, 0], [0, 1]] = [1, 2]; y, rank 1: [3] [[2, 4]] = [6, 12]; (3 * [1, 2] + [6, 12]) / 4."""
    spec = {"m.lora_A": ParamSpec((2, 2)), "m.lora_B": ParamSpec((1, 2)), "m.residual": ParamSpec((1, 2))}
    method, sums = FLoRA({"y": 1}, ResidualLoraAdapter(rank=2)), RunningSums()
    server = method.init(spec, {n: torch.ones(t.shape) for n, t in spec.items()}, rng.initial_stream(0, "m"))
    assert not server.tensors["m.lora_B"].any()
    for site, a, b, n in (("x", [[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0]], 3), ("y", [[2.0, 4.0]], [[3.0]], 1)):
        sums.add(
            site,
            n,
            method.contributions(Payload({"m.lora_A": torch.tensor(a), "m.lora_B": torch.tensor(b)}), n, spec, CTX),
        )
    new = method.server_update(server, sums, CTX).tensors
    torch.testing.assert_close(new["m.residual"], torch.tensor([[1 + 2.25, 1 + 4.5]]))
    assert not new["m.lora_B"].any()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rounds_are_the_stack(fraction):
    check_rounds(federation(sites="abcd", fraction=fraction), 5)


@settings(max_examples=12, deadline=None)
@given(
    sites=st.text("abcdefgh", min_size=1, max_size=6).map(lambda text: "".join(sorted(set(text)))),
    low=st.text("abcdefgh", max_size=4),
)
def test_they_are_for_any_sites_and_ranks(sites, low):
    method = FLoRA(dict.fromkeys(low, 1), ResidualLoraAdapter(rank=2))
    check_rounds(federation(method, sites), 3)


def test_a_site_trains_and_sends_its_own_rank_alone():
    exchange = MessageExchange(METHOD, "flora", SPEC)
    server = METHOD.init(SPEC, weights_of(), rng.initial_stream(0, "m"))
    sizes = {}
    for site, rank in (("a", 2), ("b", 1)):
        ctx, local = RoundContext(0, site, True, bytes(32)), Masked(site, 0)
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, local, ctx)
        payload = exchange.receive(b"".join(parts), 0, site=site).payload
        assert {w.shape for n, w in parse_factor_name(payload.fields, "A").items()} == {(rank, 30), (rank, 24)}
        assert {w.shape for n, w in parse_factor_name(payload.fields, "B").items()} == {(20, rank), (33, rank)}
        for name, w in factor_names(local.started).items():
            assert bool((w[rank:] == 0).all() if name.endswith("A") else not w.any())
        sizes[site] = sum(w.numel() for w in payload.fields.values())
    assert sizes["a"] == 2 * sizes["b"]


def test_a_site_goes_by_the_name_that_the_server_knows_it_by():
    """Its node config may call it otherwise, and the run's fields do not say that name."""
    exchange, address = MessageExchange(METHOD, "flora", SPEC), MessageAddress("run", 0, "b")
    server = METHOD.init(SPEC, weights_of(), rng.initial_stream(0, "m"))
    ctx = RoundContext(0, "ward 7", True, bytes(32), address=address)
    _, parts = exchange.participate(exchange.broadcast(server, ctx), None, Masked("b", 0), ctx)
    assert exchange.receive(b"".join(parts), 0, address).payload.fields["h.0.lora_A"].shape == (1, 30)


def test_what_lies_beyond_a_rank_is_frozen():
    masks = heterogeneous_ranks.rows_beyond({"m.lora_A": ParamSpec((3, 2)), "m.lora_B": ParamSpec((5, 3))}, 2)
    assert masks["m.lora_A"].tolist() == [[False], [False], [True]]
    assert masks["m.lora_B"].tolist() == [[False, False, True]]
    assert heterogeneous_ranks.rows_beyond({"m.lora_A": ParamSpec((3, 2))}, 3) == {}


def test_who_stays_gets_factors_of_at_most_the_sum_of_the_ranks():
    run = federation(sites="abc", rounds=3)
    run.run()
    payload = METHOD.broadcast(run.server, RoundContext(3, "a", False, bytes(32)))
    assert payload.variant == "step"
    assert payload.fields["step.h.0.left"].shape == (20, 2 + 1 + 2)
    before = residual_names(METHOD.models(run.server)["server"])
    run.round(3)
    for site in "abc":
        assert all(torch.equal(r, before[name]) for name, r in run.private.get(site).tensors.items())


def hostile(shapes: dict[str, tuple[int, ...]], value: float = 1.0) -> bytes:
    """A message with these shapes, under the run's digest."""
    exchange = MessageExchange(METHOD, "flora", SPEC)
    sent = {n: torch.full(shapes.get(n, t.shape), value) for n, t in factor_names(SPEC).items()}
    own = MessageLayout(
        tuple(replace(f, most=tuple(4 * n for n in f.most)) if f.most else f for f in exchange.layout.fields)
    )
    data = pack_message(own, EnvelopeStamp.from_exchange(METHOD, "flora", 0, "up"), Payload(sent), 3)
    return with_header(data, layout=exchange.layout.digest)


LOW = {"h.0.lora_A": (1, 30), "h.0.lora_B": (20, 1), "h.1.lora_A": (1, 24), "h.1.lora_B": (33, 1)}


@pytest.mark.parametrize(
    "shapes,site,match",
    [
        ({}, "b", r"h\.0\.lora_A: expected rank 1 .the rank of site b., found 2"),
        (LOW, "a", r"h\.0\.lora_A: expected rank 2 .the rank of site a., found 1"),
        ({**LOW, "h.1.lora_B": (33, 2)}, "b", r"h\.1\.lora_B: expected rank 1 .*, found 2"),
        (
            {**LOW, "h.1.lora_B": (33, 2)},
            "",
            r"h\.1\.lora_B: expected rank 1 .one rank for all factors, 1 to 2., found 2",
        ),
        ({n: (0, s[1]) if n.endswith("A") else (s[0], 0) for n, s in LOW.items()}, "", r"expected rank 0 .*, found 0"),
        ({**LOW, "h.0.lora_A": (3, 30)}, "b", r"h\.0\.lora_A: expected shape \(None, 30\) of at most \(2, 30\), found"),
        ({**LOW, "h.0.lora_A": (1, 31)}, "b", r"h\.0\.lora_A: expected shape \(None, 30\)"),
    ],
)
def test_an_upload_of_another_rank_than_the_sites_is_refused_by_its_field(shapes, site, match):
    exchange = MessageExchange(METHOD, "flora", SPEC)
    with pytest.raises(WireError, match=match):
        exchange.receive(hostile(shapes), 0, site=site)


def test_the_site_of_an_address_decides_as_over_grpc():
    """The server names it; a stamp of another site is refused before."""
    exchange, address = MessageExchange(METHOD, "flora", SPEC), MessageAddress("run", 0, "b")
    sent = {n: torch.ones(t.shape) for n, t in factor_names(SPEC).items()}
    data = pack_message(
        exchange.layout, EnvelopeStamp.from_exchange(METHOD, "flora", 0, "up", address), Payload(sent), 3
    )
    with pytest.raises(WireError, match="expected rank 1 .the rank of site b., found 2"):
        exchange.receive(data, 0, address)


@pytest.mark.parametrize(
    "value,match",
    [(float("nan"), "expected finite values"), (1e5, r"h\.0\.residual: expected a norm of at most 1e\+06")],
)
def test_values_that_would_spoil_the_sum_are_refused_by_field(value, match):
    exchange = MessageExchange(METHOD, "flora", SPEC)
    message = exchange.receive(hostile(LOW, value), 0, site="b")
    with pytest.raises(UploadRefused, match=match):
        judge_upload(exchange, message, CTX, UploadLimits(max_norm=1e6))


@pytest.mark.parametrize("fields", ["ranks = {north = 9}", "ranks = {north = 0}", "ranks = {north = -1}"])
def test_a_rank_beyond_the_adapters_is_refused_by_the_site(fields):
    with pytest.raises(ConfigError, match=r"ranks\.north: expected an integer from 1 to adapter\.rank, 8, found"):
        strategies.create_method("flora", fields)


def test_ranks_are_whole_numbers_and_the_layout_is_open_only_where_they_differ():
    with pytest.raises(ConfigError, match="ranks"):
        strategies.create_method("flora", "ranks = {north = 2.5}")
    shapes = {
        f.name: f.shape for f in FLoRA(adapter=ResidualLoraAdapter(rank=2)).layout(SPEC).fields if f.direction == "up"
    }
    assert shapes == {n: t.shape for n, t in factor_names(SPEC).items()}
    assert strategies.create_method("flora", "ranks = {north = 3}").ranks == {"north": 3}


def test_codes_are_decoded_before_they_are_multiplied():
    method = FLoRA(RANKS, ResidualLoraAdapter(rank=2), upload_bits=4)
    exchange = MessageExchange(method, "flora", SPEC)
    server, uploads, wanted, total = method.init(SPEC, weights_of(), rng.initial_stream(0, "m")), [], 0.0, 0
    for site in "ab":
        ctx = RoundContext(0, site, True, bytes(32))
        _, parts = exchange.participate(exchange.broadcast(server, ctx), None, Masked(site, 0), ctx)
        message = exchange.receive(b"".join(parts), 0, site=site)
        opened, n = method._uploads.opened(message.payload), message.num_examples
        wanted = wanted + n * opened["h.0.lora_B"].double() @ opened["h.0.lora_A"].double()
        total += n
        uploads.append(AcceptedUpload(message.payload, n, ctx))
    new = exchange.aggregate(server, uploads)
    torch.testing.assert_close(new.tensors["h.0.residual"].double(), wanted / total, rtol=1e-5, atol=1e-6)
