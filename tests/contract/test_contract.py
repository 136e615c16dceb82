"""A suite that runs on every method in `strategies/`, including methods that are added later."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil import rng, strategies
from fedveil.config import parse
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.errors import ConfigError, StateError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.records.tensor_state import state_digest
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import EnvelopeStamp, describe_message, pack_message, unpack_message
from tests.conftest import ToyTrainer, aggregated

METHODS = strategies.list_methods()
SECRET = bytes(range(32))


def spec_for(method) -> dict[str, ParamSpec]:
    """What the method's adapter would train, tiny."""
    return dict(method.adapter.example_spec())


def fields_of(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(strategies.load_method(name))}


def weights_for(spec, seed: int = 271828):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in spec.items()}


@pytest.fixture(params=METHODS)
def exchange(request) -> MessageExchange:
    method = strategies.create_method(request.param)
    return MessageExchange(method, request.param, spec_for(method))


def start(exchange: MessageExchange) -> FederatedState:
    return exchange.method.init(exchange.spec, weights_for(exchange.spec), rng.initial_stream(0, "method init"))


def federation(
    exchange: MessageExchange, sites=("a", "b", "c"), seed: int = 5, step: float = 0.5, rounds: int = 4
) -> InProcessFederation:
    config = parse({"run.deterministic": True, "run.seed": seed, "run.rounds": rounds, "cohort.fraction": 0.67})
    trainer_for = lambda site, ctx: ToyTrainer(exchange.spec, 3 + len(site), step * (1 + ord(site[0]) % 3))  # noqa: E731
    return InProcessFederation(exchange, config, trainer_for, list(sites), start(exchange))


def one_turn(
    exchange: MessageExchange,
    server: FederatedState,
    site: str = "a",
    round_: int = 0,
    private=None,
    is_new: bool = True,
):
    down = exchange.broadcast(server, RoundContext(round_, site, is_new, SECRET))
    ctx = RoundContext(round_, site, is_new, SECRET[::-1])
    private, up = exchange.participate(down, private, ToyTrainer(exchange.spec), ctx)
    return down, private, b"".join(up)


def equal(a, b) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


def as_upload(exchange: MessageExchange, up: bytes, ctx: RoundContext) -> AcceptedUpload:
    message = exchange.receive(up, ctx.round)
    return AcceptedUpload(message.payload, message.num_examples, ctx, message.report)


class Watched:
    """One deterministic run: all messages, all private states, and which side asked its context for draws."""

    def __init__(self, exchange: MessageExchange, seed: int, folder: Path, monkeypatch) -> None:
        run = federation(exchange, seed=seed)
        run.tap = MessageCapture(folder)
        sides = {run._server_secret: "server"}
        self.drew: set[str] = set()
        real = RoundContext.rng

        def noted(ctx: RoundContext, purpose: str):
            self.drew.add(sides.get(ctx.secret, "client"))
            return real(ctx, purpose)

        with monkeypatch.context() as patch:
            patch.setattr(RoundContext, "rng", noted)
            self.server = run.run()
        seen = list(run.tap.messages())
        self.down = [run.tap.read(m) for m in seen if m.direction == "down"]
        self.client = [run.tap.read(m) for m in seen if m.direction == "up"]
        self.client += [save(state) for _, state in sorted(run.private.items()) if state]


def save(state: FederatedState) -> bytes:
    return state_digest(state.tensors).encode() + json.dumps(state.scalars, sort_keys=True).encode()


def test_a_seed_decides_every_draw_and_another_one_decides_otherwise(exchange, tmp_path, monkeypatch):
    first, second, other = (
        Watched(exchange, seed, tmp_path / name, monkeypatch) for seed, name in ((5, "a"), (5, "b"), (6, "c"))
    )
    assert save(first.server) == save(second.server)
    assert (first.down, first.client) == (second.down, second.client)
    if "client" in first.drew:  # whatever of it: an upload's mask, or a private tensor's first value
        assert first.client != other.client
    if "server" in first.drew:
        assert first.down != other.down
    if not first.drew:
        assert (first.down, first.client) == (other.down, other.client)


def test_a_method_says_whether_its_sites_keep_a_state(exchange):
    run = federation(exchange, rounds=6)
    run.run()
    assert any(state is not None for _, state in run.private.items()) == exchange.method.keeps_private_state


def test_a_round_that_fails_changes_neither_the_server_nor_a_site(exchange):
    """The last site of round 1 fails, after the others have trained; then the round is repeated."""
    whole, broken = federation(exchange), federation(exchange)
    real, last = broken.trainer_for, []

    def fails_once(site, ctx):
        if ctx.round == 1 and site == "c" and not last:
            last.append(site)
            raise StateError("a full disk")
        return real(site, ctx)

    broken.trainer_for = fails_once
    broken.config = whole.config = parse(broken.config.flat() | {"cohort.fraction": 1.0})
    broken.round(0)
    before = {site: state and save(state) for site, state in broken.private.items()}
    with pytest.raises(StateError):
        broken.round(1)
    assert {site: state and save(state) for site, state in broken.private.items()} == before
    for round_ in (1, 2, 3):
        broken.round(round_)
    assert save(broken.server) == save(whole.run())


def test_draws_of_sites_and_rounds_are_their_own(exchange, tmp_path, monkeypatch):
    """From one broadcast: what leaves a site or stays there differs over sites exactly where the method draws there."""
    watched = Watched(exchange, 5, tmp_path, monkeypatch)
    server = start(exchange)
    down = exchange.broadcast(server, RoundContext(0, "a", True, SECRET))
    distinct_uploads = set()
    for secret in (bytes([i]) * 32 for i in range(12)):
        ctx = RoundContext(0, "a", True, secret, seeded=True)
        private, parts = exchange.participate(down, None, ToyTrainer(exchange.spec), ctx)
        distinct_uploads.add(b"".join(parts) + (save(private) if private else b""))
    assert (len(distinct_uploads) > 1) == ("client" in watched.drew)


def test_every_kind_of_upload_that_the_layout_declares_is_sent_by_somebody(exchange):
    """With the default fields, over two rounds of 24 sites: a draw that always falls on one side is none."""
    variants, server = set(), start(exchange)
    for secret in (bytes([i + 1]) * 32 for i in range(24)):
        private = None
        for round_ in (0, 1):
            down = exchange.broadcast(server, RoundContext(round_, "a", round_ == 0, SECRET))
            ctx = RoundContext(round_, "a", round_ == 0, secret)
            private, parts = exchange.participate(down, private, ToyTrainer(exchange.spec), ctx)
            variants.add(exchange.receive(b"".join(parts), round_).payload.variant)
    assert variants == set(exchange.layout.variants("up"))


def test_terms_are_the_same_on_either_side_and_belong_to_the_servers_tensors(exchange):
    """Under secure aggregation a site makes them, who has another secret than the server."""
    server = start(exchange)
    _, _, up = one_turn(exchange, server)
    message = exchange.receive(up, 0)
    ours, theirs = (
        exchange.method.contributions(message.payload, 7, exchange.spec, RoundContext(0, "a", True, secret))
        for secret in (SECRET, SECRET[::-1])
    )
    assert ours.clear == theirs.clear
    pairs = list(zip(ours.tensors, theirs.tensors, strict=True))
    assert pairs
    for one, two in pairs:
        assert (one.name, one.weight) == (two.name, two.weight)
        assert torch.equal(one.value, two.value)
        assert (one.mask is None) == (two.mask is None)
        assert one.mask is None or torch.equal(one.mask, two.mask)
        assert one.name in server.tensors
        assert one.value.shape == server.tensors[one.name].shape
        assert one.weight > 0


def test_terms_have_masks_in_exactly_the_methods_that_say_so(exchange):
    """A rule that compares whole uploads goes by what the method says, before anybody trains."""
    server = start(exchange)
    _, _, up = one_turn(exchange, server)
    upload = as_upload(exchange, up, RoundContext(0, "a", True, SECRET))
    assert (
        any(term.mask is not None for term in exchange.contributions(upload).tensors)
        == exchange.method.has_masked_terms
    )


def test_uploads_whose_entries_differ_between_sites_are_said_to_be_partial(exchange):
    """The claim of secure aggregation goes by it: an entry that one site alone sends is that site's."""
    server = start(exchange)
    for round_ in range(4):
        sent = set()
        for site in "abcdef":
            _, _, up = one_turn(exchange, server, site, round_)
            terms = exchange.contributions(as_upload(exchange, up, RoundContext(round_, site, True, SECRET))).tensors
            masks = ((term.name, None if term.mask is None else term.mask.numpy().tobytes()) for term in terms)
            sent.add(frozenset(masks))
        assert len(sent) == 1 or exchange.method.has_partial_uploads


def test_messages_decode_to_what_was_encoded_and_sizes_are_the_bytes(exchange):
    server = start(exchange)
    payload = exchange.method.broadcast(server, RoundContext(0, "a", True, SECRET))
    stamp = EnvelopeStamp.from_exchange(exchange.method, exchange.name, 0, "down")
    data = pack_message(exchange.layout, stamp, payload)
    message = unpack_message(data, exchange.layout, stamp)
    assert message.payload.variant == payload.variant
    fields = exchange.layout.fields_of("down", payload.variant)
    assert set(message.payload.fields) == set(fields) == set(payload.fields)
    for name, field in fields.items():
        assert b"".join(field.codec.encode(message.payload.fields[name])) == b"".join(
            field.codec.encode(payload.fields[name])
        )
        assert message.field_bytes[name] == field.codec.nbytes(field.codec.shape(payload.fields[name]))
    assert describe_message(data)["payload_bytes"] == message.payload_bytes < len(data)


def test_envelope_costs_less_than_two_kilobytes(exchange):
    down, _, up = one_turn(exchange, start(exchange))
    for data in (down, up):
        assert len(data) - describe_message(data)["payload_bytes"] < 2000


def test_no_half_changes_its_inputs(exchange):
    server = start(exchange)
    before = copy.deepcopy(server)
    _, private, up = one_turn(exchange, server)
    private_copy, sent = copy.deepcopy(private), bytes(up)
    ctx = RoundContext(0, "a", True, SECRET)
    new = exchange.aggregate(server, iter([as_upload(exchange, up, ctx), as_upload(exchange, up, ctx)]))
    one_turn(exchange, new, round_=1, private=private, is_new=False)
    assert equal(server.tensors, before.tensors)
    assert server.scalars == before.scalars
    assert bytes(up) == sent
    if private_copy is not None:
        assert equal(private_copy.tensors, private.tensors)


def test_broadcast_can_be_replayed(exchange):
    server, ctx = start(exchange), RoundContext(3, "a", False, SECRET)
    assert exchange.broadcast(server, ctx) == exchange.broadcast(server, ctx)


def test_states_keep_names_shapes_and_dtypes_over_rounds(exchange):
    run = federation(exchange)
    before = {n: (t.shape, t.dtype) for n, t in run.server.tensors.items()}
    after = run.run()
    assert {n: (t.shape, t.dtype) for n, t in after.tensors.items()} == before
    for view in run.models("a").values():
        shapes = {n: tuple(t.shape) for n, t in view.items()}
        assert shapes == {n: t.shape for n, t in exchange.spec.items()}, (
            "what else is kept: Method.deployed leaves it out"
        )


def test_no_upload_leaves_the_server_as_it_is(exchange):
    server = start(exchange)
    after = exchange.aggregate(server, iter([]))
    assert equal(server.tensors, after.tensors)


def test_aggregate_holds_one_upload_at_a_time(exchange):
    """Beside the one that it asks for next: memory does not grow with the number of clients."""
    server, seen = start(exchange), []

    def uploads():
        for site in "abcdef":
            _, _, up = one_turn(exchange, server, site)
            upload = as_upload(exchange, up, RoundContext(0, site, True, SECRET))
            seen.append([weakref.ref(value) for value in (upload.payload, *upload.payload.fields.values())])
            assert sum(any(ref() is not None for ref in refs) for refs in seen) <= 2
            yield upload
            del upload

    exchange.aggregate(server, uploads())
    assert len(seen) == 6


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
@pytest.mark.parametrize("name", METHODS)
def test_mean_of_equal_uploads_is_the_upload(name, counts):
    method = strategies.create_method(name)
    exchange = MessageExchange(method, name, spec_for(method))
    server = start(exchange)
    _, _, up = one_turn(exchange, server)
    message = exchange.receive(up, 0)

    def uploads(numbers):
        for i, n in enumerate(numbers):
            yield AcceptedUpload(message.payload, n, RoundContext(0, f"s{i}", True, SECRET), {})

    once = aggregated(method, server, uploads([1]))
    many = aggregated(method, server, uploads(counts))
    assert equal(method.models(once)["server"], method.models(many)["server"])


def with_optimizer(exchange: MessageExchange, **changes) -> InProcessFederation:
    """All three sites in every round, with these changes of the config."""
    run = federation(exchange)
    config = parse(run.config.flat() | {"cohort.fraction": 1.0} | changes)
    return InProcessFederation(exchange, config, run.trainer_for, run.sites, start(exchange))


def test_a_server_optimizer_steps_along_the_methods_update_or_is_refused_with_the_reason(exchange):
    """Momentum of rate 1 without memory is the method itself."""
    momentum = {"server.optimizer": "fedavgm", "server.beta1": 0.0}
    if why := exchange.method.server_optimizer_conflict:
        with pytest.raises(ConfigError, match=f"server.optimizer: .*{why}"):
            with_optimizer(exchange, **momentum)
        return
    plain, same, adam = (
        with_optimizer(exchange, **changes) for changes in ({}, momentum, {"server.optimizer": "fedadam"})
    )
    for round_ in (0, 1):
        for run in (plain, same, adam):
            run.round(round_)
    wanted, found, other = (run.models()["server"] for run in (plain, same, adam))
    for name, w in wanted.items():
        torch.testing.assert_close(found[name], w, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert set(adam.server.tensors) == set(plain.server.tensors)
    assert any(not torch.equal(other[name], w) for name, w in wanted.items())


@pytest.mark.long
def test_a_site_scores_the_servers_model_or_the_method_says_why_not(exchange):
    """The first weights that a site computes with, in a round after the first, are those of the view "server"."""
    if exchange.method.site_score_conflict:
        return
    run, trainer = with_optimizer(exchange), ToyTrainer(exchange.spec)
    run.round(0)
    run.trainer_for = lambda site, ctx: trainer
    server = {name: w.clone() for name, w in run.models()["server"].items()}
    run.round(1)
    for name, start in trainer.started_from[0].items():
        torch.testing.assert_close(start.float(), server[name].float(), rtol=1e-2, atol=1e-2)


def test_a_late_upload_moves_the_current_state_or_is_refused_with_the_reason(exchange):
    """The third site's upload comes two steps late, and is the only one that the third step waits for."""
    buffer = {"cohort.buffer-size": 2, "cohort.min-sites": 1}
    if why := exchange.method.stale_upload_conflict:
        with pytest.raises(ConfigError, match=f"cohort.buffer-size: .*{re.escape(why)}"):
            with_optimizer(exchange, **buffer)
        return
    run = with_optimizer(exchange, **buffer)
    run.site_seconds = {run.sites[2]: 2.5}
    for round_ in range(3):
        before = run.models()["server"]
        run.round(round_)
    assert run.staleness[run.sites[2]] == 2
    after = run.models()["server"]
    assert any(not torch.equal(after[name], w) for name, w in before.items())
    assert all(bool(torch.isfinite(w.float()).all()) for w in after.values())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", [name for name in METHODS if "upload_bits" in fields_of(name) and name != "fedqsn"])
def test_codes_on_the_wire_are_off_by_half_a_step_of_their_block(name, bits):
    """The twin decodes by hand: of each 256 weights, the largest magnitude is the last of 2^(bits-1) - 1 steps."""
    sent = []
    for fields in ("", f"upload_bits = {bits}"):
        method = strategies.create_method(name, fields)
        exchange = MessageExchange(method, name, spec_for(method))
        ctx = RoundContext(0, "a", True, SECRET)
        _, _, up = one_turn(exchange, start(exchange))
        message = exchange.receive(up, 0)
        sent.append(
            {term.name: term.value for term in method.contributions(message.payload, 3, exchange.spec, ctx).tensors}
        )
        assert any(isinstance(value, QuantizedTensor) for value in message.payload.fields.values()) == bool(fields)
    plain, coded = sent
    assert plain.keys() == coded.keys()
    if name in ("fedex_lora", "flora"):  # their terms are products of factors, too
        return
    for term, value in plain.items():
        blocks = torch.nn.functional.pad(value.flatten().float(), (0, -value.numel() % 256)).view(-1, 256)
        step = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        found = torch.nn.functional.pad(coded[term].flatten().float(), (0, -value.numel() % 256)).view(-1, 256)
        assert bool(((found - blocks).abs() <= step * 0.5001 + 1e-7).all()), term


def test_newcomer_in_a_later_round_takes_part(exchange):
    run = federation(exchange, rounds=3)
    run.run()
    down, _, up = one_turn(exchange, run.server, site="late", round_=3)
    assert exchange.receive(up, 3).num_examples == 3
    assert len(down) > 0


def test_zero_training_from_zero_state_stays_finite(exchange):
    zeros = {n: torch.zeros(t.shape) for n, t in exchange.spec.items()}
    server = exchange.method.init(exchange.spec, zeros, rng.initial_stream(0, "method init"))
    _, _, up = one_turn(exchange, server)
    after = exchange.aggregate(server, iter([as_upload(exchange, up, RoundContext(0, "a", True, SECRET))]))
    assert all(torch.isfinite(t).all() for t in after.tensors.values())


def test_what_is_private_stays(exchange):
    """No tensor of the private state leaves the site, but for those that the layout sends from it by name."""
    _, private, up = one_turn(exchange, start(exchange))
    if private is None:
        return
    sent = exchange.receive(up, 0).payload.fields
    for name, tensor in private.tensors.items():
        if name not in sent and tensor.numel() > 4:
            assert tensor.detach().contiguous().numpy().tobytes() not in up, name


def test_the_tap_holds_exactly_what_crossed_the_wire(exchange, tmp_path):
    """An attack reads the tap and the public layout, nothing else; what it finds there is every byte that was sent."""
    run = federation(exchange)
    run.tap = MessageCapture(tmp_path)
    run.run()
    seen = list(MessageCapture(tmp_path).messages())
    for direction, total in (("up", run.upload_bytes), ("down", run.download_bytes)):
        assert sum(len(run.tap.read(m)) for m in seen if m.direction == direction) == total
    for message in seen:
        stamp = EnvelopeStamp.from_exchange(exchange.method, exchange.name, message.round, message.direction)
        payload = unpack_message(run.tap.read(message), exchange.layout, stamp).payload
        assert set(payload.fields) == set(exchange.layout.fields_of(message.direction, payload.variant))


def test_undeclared_field_cannot_be_packed(exchange):
    server = start(exchange)
    payload = exchange.method.broadcast(server, RoundContext(0, "a", True, SECRET))
    smuggled = Payload({**payload.fields, "patients": torch.zeros(3)}, payload.variant, payload.scalars)
    with pytest.raises(WireError, match="patients: there is no such field"):
        pack_message(exchange.layout, EnvelopeStamp.from_exchange(exchange.method, exchange.name, 0, "down"), smuggled)


@pytest.mark.parametrize("name", METHODS)
def test_method_file_is_pure(name):
    """No Flower, no I/O, no logging, no global randomness in a method file; a final frozen dataclass with a header."""
    tree = ast.parse(Path(inspect.getfile(strategies.load_method(name))).read_text())
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    allowed = {"__future__", "collections", "dataclasses", "math", "typing", "typing_extensions", "torch", "jaxtyping"}
    allowed |= {"bisect", "numpy", "fedveil"}
    assert imported <= allowed
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not called & {"open", "print", "super", "hasattr"}
    header = ast.get_docstring(tree) or ""
    for part in ("The client learns", "The server learns", "Formal guarantees", "Differences from the paper"):
        assert part in header, f"{name}: the header lacks {part!r}"
    method = strategies.load_method(name)
    assert method.__final__
    assert method.__dataclass_params__.frozen
