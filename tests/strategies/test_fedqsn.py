from __future__ import annotations

from dataclasses import replace
from math import log2, prod

import pytest
import torch

from fedveil import rng, strategies
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.config import parse
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, RoundContext
from fedveil.contract.param_spec import ParamLocation, ParamSpec
from fedveil.contract.task import Example
from fedveil.errors import ConfigError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.federation.in_process import InProcessFederation
from fedveil.models import param_locations
from fedveil.ops.quantization import BlockQuantizer
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedqsn import FedQSN
from fedveil.tasks import load_task
from fedveil.wire.capture import MessageCapture
from fedveil.wire.envelope import EnvelopeStamp, unpack_message
from tests.conftest import ToyTrainer, aggregated

SECRET = bytes(range(32))
SPEC = {
    "wte.weight": ParamSpec((30, 24), place=ParamLocation("embedding", "wte", 1)),
    "wpe.weight": ParamSpec((6, 24)),
    "in.weight": ParamSpec((24, 48), place=ParamLocation("linear", "in", 1)),
    "in.bias": ParamSpec((48,), place=ParamLocation("linear", "in", 0)),
    "out.weight": ParamSpec((24, 48), place=ParamLocation("linear", "out", 0, closes=True)),
    "out.bias": ParamSpec((24,), place=ParamLocation("linear", "out", 0, closes=True)),
    "head.weight": ParamSpec((30, 24), place=ParamLocation("embedding", "wte", 1)),
}
PLAIN = dict(server_rate=0.0, client_rate=0.0, quantiser="none")  # noqa: C408


def weights(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}


class Noisy(ToyTrainer):
    """Every entry that is not frozen moves by its own amount."""

    def train(self, weights, frozen=None, penalty=None):
        trained = super().train(weights, frozen)
        generator = torch.Generator().manual_seed(self.num_examples)
        moved = {n: w + torch.randn(w.shape, generator=generator) for n, w in weights.items()}
        for n, mask in (frozen or {}).items():
            moved[n] = torch.where(mask, weights[n], moved[n])
        return replace(trained, weights=moved)


def federation(method, name="fedqsn", rounds=3, sites="abcd", tap=None):
    exchange = MessageExchange(method, name, SPEC)
    config = parse({"run.deterministic": True, "run.rounds": rounds, "cohort.fraction": 0.75})
    state = method.init(SPEC, weights(), rng.initial_stream(0, "method init"))
    return InProcessFederation(exchange, config, lambda s, c: Noisy(SPEC, 3 + ord(s) % 7), list(sites), state, tap=tap)


@pytest.mark.parametrize("update", ["delta", "replace"])
def test_nothing_hidden_is_fedavg_bit_for_bit(update):
    veiled = federation(FedQSN(**PLAIN, update=update)).run()
    plain = federation(FedAvg(AllWeightsAdapter()), "fedavg").run()
    assert all(torch.equal(veiled.tensors[n], w) for n, w in plain.tensors.items())
    assert not torch.equal(plain.tensors["out.weight"], weights()["out.weight"])


@pytest.mark.long
@pytest.mark.parametrize("targets", ["proj", "all"])
@pytest.mark.parametrize("quantiser,bits", [("nf_sym", 2), ("absmax", 4)])
@pytest.mark.parametrize("update", ["delta", "replace"])
def test_on_the_tap(tmp_path, targets, quantiser, bits, update):
    """Masked columns are exact zeros, the others are levels, and no client ever gets a server-masked column."""
    method = FedQSN(0.3, 0.3, targets, quantiser=quantiser, bits=bits, embeddings="quantised", update=update)
    run = federation(method, tap=MessageCapture(tmp_path))
    run.run()
    veil, start = method._veil(SPEC, "down"), weights()
    server_masks = method._shown(veil, run._server_secret)
    assert set(server_masks) == ({"wte", "out"} if targets == "proj" else {"wte", "out", "in"})
    assert all(not m.all() and m.any() for m in server_masks.values())
    hidden = {n: ~veil.seen(n, server_masks).expand(t.shape) for n, t in SPEC.items() if n in veil.masked}
    seen_masks = set()
    messages = list(run.tap.messages())
    assert len(messages) == 18
    for message in messages:
        stamp = EnvelopeStamp.from_exchange(method, "fedqsn", message.round, message.direction)
        data = run.tap.read(message)
        payload = unpack_message(data, run.exchange.layout, stamp).payload
        visible = veil.visible(payload)
        assert not any(bool((m & ~server_masks[c]).any()) for c, m in visible.items())
        seen_masks.add(tuple(m.numpy().tobytes() for m in visible.values()))
        for name, tensor in method._veil(SPEC, message.direction).open(payload):
            if name in hidden:
                assert bool((tensor[hidden[name]] == 0).all())
                assert bool((tensor[~veil.seen(name, visible).expand(tensor.shape)] == 0).all())
                assert torch.count_nonzero(tensor)
        if message.direction == "down":
            for name in veil.coders:
                coded = payload.fields[name]
                assert isinstance(coded, QuantizedTensor)
                assert int(coded.codes.max()) < len(BlockQuantizer(quantiser, bits).levels)
        for name, mask in hidden.items():  # not one original column, in either layout of memory
            for j in mask.movedim(veil.masked[name].axis, 0).flatten(1).any(1).nonzero() if mask.ndim == 2 else []:
                column = start[name].select(veil.masked[name].axis, int(j)).contiguous()
                assert column.numpy().tobytes() not in data
    assert len(seen_masks) == 9  # three clients in three rounds, each with its own masks
    for name, mask in hidden.items():
        assert torch.equal(run.server.tensors[name][mask], start[name][mask])  # restored: W_0
        assert not torch.equal(run.server.tensors[name][~mask], start[name][~mask])


def turn(method, ctx, local=None):
    exchange = MessageExchange(method, "fedqsn", SPEC)
    state = method.init(SPEC, weights(), rng.initial_stream(0, "x"))
    down = exchange.broadcast(state, ctx)
    received = unpack_message(
        down, exchange.layout, EnvelopeStamp.from_exchange(method, "fedqsn", ctx.round, "down")
    ).payload
    local = local or ToyTrainer(SPEC)
    _, up = exchange.participate(down, None, local, ctx)
    return state, received, exchange.receive(b"".join(up), ctx.round).payload, local


CTX = RoundContext(0, "a", True, SECRET)


def test_eq_5_by_hand():
    """Two clients with 1 and 3 examples: both saw the first column, the second client the second, neither the third."""
    spec = {"w": ParamSpec((3,), place=ParamLocation("linear", "w", 0, closes=True))}
    method = FedQSN(0.0, 0.5, quantiser="none")
    state = method.init(spec, {"w": torch.tensor([10.0, 20.0, 30.0])}, rng.initial_stream(0, "x"))
    one = {"w": torch.tensor([4.0]), "visible.w": torch.tensor([True, False, False])}
    two = {"w": torch.tensor([8.0, 6.0]), "visible.w": torch.tensor([True, True, False])}
    uploads = [AcceptedUpload(Payload(one), 1, CTX), AcceptedUpload(Payload(two), 3, replace(CTX, client="b"))]
    # The scale is 2: (4 + 3 * 8) / 4 / 2 = 3.5 and 6 / 2 = 3.
    assert aggregated(method, state, iter(uploads)).tensors["w"].tolist() == [13.5, 23.0, 30.0]
    literal = replace(method, update="replace")
    assert aggregated(literal, state, iter(uploads)).tensors["w"].tolist() == [3.5, 3.0, 30.0]


@pytest.mark.parametrize("quantiser", ["none", "nf_sym"])
def test_proxy_is_mask_scale_codes(quantiser):
    method = FedQSN(0.2, 0.25, quantiser=quantiser, block=16)
    state, down, _, local = turn(method, CTX)
    proxy = method.models(state, down=down)["proxy"]
    visible, w = down.fields["visible.out"], weights()
    scaled_weights = w["out.weight"][visible] / (0.8 * 0.75)
    expected = torch.zeros(24, 48)
    how = BlockQuantizer("nf_sym", 2, 16)
    expected[visible] = how.dequantise(how.quantise(scaled_weights)) if quantiser == "nf_sym" else scaled_weights
    torch.testing.assert_close(proxy["out.weight"], expected)
    torch.testing.assert_close(proxy["out.bias"], torch.where(visible, w["out.bias"] / 0.6, 0.0))
    assert torch.equal(proxy["wpe.weight"], w["wpe.weight"])
    assert torch.equal((proxy["wte.weight"] != 0).all(0), (proxy["head.weight"] != 0).all(0))
    assert all(torch.equal(proxy[n], t) for n, t in local.started_from[0].items())
    assert torch.equal(method.models(state)["server"]["out.weight"], w["out.weight"])


@pytest.mark.parametrize("embeddings", ["masked", "quantised", "open"])
def test_embeddings_and_head_are_sent_as_the_field_says(embeddings):
    """A tied head is the embedding, so that a mask on it is one on the head; open leaves both whole."""
    method, w = FedQSN(0.2, 0.25, embeddings=embeddings, block=16), weights()
    state, down, _, _ = turn(method, CTX)
    proxy = method.models(state, down=down)["proxy"]
    assert ("visible.wte" in down.fields) == (embeddings != "open")
    for name in ("wte.weight", "head.weight"):
        assert isinstance(down.fields[name], QuantizedTensor) == (embeddings == "quantised")
        if embeddings == "open":
            assert torch.equal(proxy[name], w[name])
            continue
        visible = down.fields["visible.wte"]
        assert bool((proxy[name][:, ~visible] == 0).all())
        is_exact = torch.allclose(proxy[name][:, visible], w[name][:, visible] / (0.8 * 0.75))
        assert is_exact == (embeddings == "masked")
    assert not down.fields["visible.out"].all()  # layers are masked in every case


def test_upload_is_what_training_changed_and_masked_columns_stay_frozen():
    method = FedQSN(0.2, 0.25)
    _, down, up, _ = turn(method, CTX)
    ones = int(down.fields["visible.out"].sum())
    assert up.fields["out.weight"].shape == (ones, 48)
    torch.testing.assert_close(up.fields["out.weight"], torch.full((ones, 48), 0.5))
    _, _, trained, _ = turn(replace(method, update="replace"), CTX)
    assert not torch.allclose(trained.fields["out.weight"], torch.full((ones, 48), 0.5))


def test_masks_have_their_rates_and_the_server_s_never_changes():
    spec = {"w": ParamSpec((40000,), place=ParamLocation("linear", "w", 0, closes=True))}
    for exact in (False, True):
        method = FedQSN(0.1, 0.2, quantiser="none", exact=exact)
        state = method.init(spec, {"w": torch.ones(40000)}, rng.initial_stream(0, "x"))
        seen = [
            method.broadcast(state, RoundContext(r, s, False, SECRET)).fields["visible.w"]
            for r in range(4)
            for s in "ab"
        ]
        hidden = [int((~m).sum()) for m in seen]
        union = torch.stack(seen).any(0)
        num_server_hidden = int((~method._shown(method._veil(spec, "down"), SECRET)["w"]).sum())
        assert abs(num_server_hidden - 4000) < 300
        assert abs(int((~union).sum()) - num_server_hidden) < 15  # 36000 * 0.2^8 = 0.09 more
        if exact:
            assert hidden == [num_server_hidden + 8000] * 8
        else:
            assert all(abs(h - 40000 * (1 - 0.9 * 0.8)) < 500 for h in hidden)
        assert len({m.numpy().tobytes() for m in seen}) == 8
        other = method._shown(method._veil(spec, "down"), bytes(32))["w"]
        assert not torch.equal(other, method._shown(method._veil(spec, "down"), SECRET)["w"])


def test_a_client_that_claims_a_server_masked_column_moves_nothing_of_it():
    method = FedQSN(0.5, 0.0, quantiser="none")
    state, _, up, _ = turn(method, CTX)
    veil = method._veil(SPEC, "up")
    lie = {c: torch.ones_like(m) for c, m in veil.visible(up).items()}
    payload = Payload(veil.close({n: torch.ones(t.shape) for n, t in SPEC.items()}, lie))
    new = aggregated(method, state, iter([AcceptedUpload(payload, 3, CTX)])).tensors
    hidden = ~method._shown(veil, SECRET)["out"]
    assert hidden.any()
    assert torch.equal(new["out.weight"][hidden], weights()["out.weight"][hidden])
    assert not torch.equal(new["out.weight"][~hidden], weights()["out.weight"][~hidden])


def test_columns_that_do_not_fit_the_bits_are_refused_by_name():
    method = FedQSN(0.3, 0.3)
    _, _, up, _ = turn(method, CTX)
    wrong = {**up.fields, "out.weight": up.fields["out.weight"][1:]}
    with pytest.raises(WireError, match=r"out\.weight: expected \d+ columns"):
        method.check(Payload(wrong), SPEC)


def test_upload_as_codes():
    method = FedQSN(upload_bits=4)
    _, _, up, _ = turn(method, CTX, Noisy(SPEC))
    assert isinstance(up.fields["in.weight"], QuantizedTensor)
    assert isinstance(up.fields["wte.weight"], torch.Tensor)
    run = federation(method)
    assert run.run().tensors["in.weight"].shape == (24, 48)
    assert run.upload_bytes < federation_bytes(FedQSN())


def federation_bytes(method) -> int:
    run = federation(method)
    run.run()
    return run.upload_bytes


# --- real models


def causal(kind: str):
    import transformers as t

    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=8))
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**small, intermediate_size=40))
    if kind == "neox":
        return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**small, intermediate_size=40))
    return t.OPTForCausalLM(t.OPTConfig(**small, ffn_dim=40, max_position_embeddings=8, word_embed_proj_dim=16))


@pytest.mark.parametrize(
    "kind,closing,axis,heads",
    [
        ("gpt2", {"attn.c_proj", "mlp.c_proj"}, 1, 1),
        ("llama", {"self_attn.o_proj", "mlp.down_proj"}, 0, 2),
        ("neox", {"attention.dense", "mlp.dense_4h_to_h"}, 0, 2),
        ("opt", {"self_attn.out_proj", "fc2"}, 0, 1),
    ],
)
def test_places_of_real_models(kind, closing, axis, heads):
    model = causal(kind)
    trained = dict(model.named_parameters())
    locations = param_locations.param_locations(model, trained)
    linear = {n: p for n, p in locations.items() if p.part == "linear"}
    assert all(any(p.columns.endswith(c) for c in closing) == p.closes for p in linear.values())
    assert sum(p.closes and n.endswith("weight") for n, p in linear.items()) == 4
    assert {p.axis for n, p in linear.items() if trained[n].ndim == 2} == {axis}
    assert sum(p.part == "embedding" for p in locations.values()) == heads
    for name, parameter in trained.items():
        if "norm" in name or "ln_" in name or "wpe" in name or "embed_positions" in name:
            assert name not in locations
        elif parameter.ndim == 2:
            assert name in locations


def test_places_by_hand_of_one_block():
    locations = param_locations.param_locations(model := causal("gpt2"), dict(model.named_parameters()))
    name = "transformer.h.0.attn.c_proj"
    assert locations[f"{name}.weight"] == ParamLocation("linear", name, 1, closes=True)
    assert locations[f"{name}.bias"] == ParamLocation("linear", name, 0, closes=True)
    assert locations["transformer.wte.weight"] == ParamLocation("embedding", "transformer.wte", 1)


def test_tiny_gpt2_trains_a_proxy_and_its_masked_columns_stay_zero(tmp_path, monkeypatch):
    """Over the real wire with a great weight decay: no entry of a masked column moves, none leaves."""
    task = load_task(
        parse({"train.learning-rate": 1e-2, "train.weight-decay": 0.5, "train.max-steps": 3}),
        AllWeightsAdapter(),
        "cpu",
    )
    method = FedQSN(0.2, 0.2, "all")
    rows = task.encode(
        Example.from_columns({"mr": f"name[{i}], food[{i}]", "ref": f"{i} serves {i}."} for i in range(8))
    )
    exchange = MessageExchange(method, "fedqsn", task.spec)
    state = method.init(task.spec, task.initial(rng.initial_stream(0, "w")), rng.initial_stream(0, "x"))
    down, after, taken = exchange.broadcast(state, CTX), {}, task.taken
    monkeypatch.setattr(task, "taken", lambda weights: after.setdefault("site", taken(weights)))
    _, up = exchange.participate(down, None, task.trainer(rows, CTX.rng("batches")), CTX)
    payload = exchange.receive(b"".join(up), 0).payload
    veil = method._veil(task.spec, "up")
    visible = veil.visible(payload)
    moved = 0
    for name, parameter in after["site"].items():
        if name in veil.masked:
            missing = ~veil.seen(name, visible).expand(parameter.shape)
            assert bool((parameter.detach()[missing] == 0).all())
            moved += int((parameter.detach()[~missing] != 0).any())
    assert moved == len(veil.masked)
    new = aggregated(method, state, iter([AcceptedUpload(payload, len(rows), CTX)])).tensors
    for name, old in state.tensors.items():
        if name in veil.masked:
            missing = ~veil.seen(name, visible).expand(old.shape)
            assert torch.equal(new[name][missing], old[missing])
    scored = method.models(
        state,
        down=unpack_message(down, exchange.layout, EnvelopeStamp.from_exchange(method, "fedqsn", 0, "down")).payload,
    )
    rows = Example.from_columns(
        [{"mr": "name[Blue Spice], food[Thai]", "ref": "Blue Spice is a restaurant that serves Thai food."}]
    )
    assert task.evaluate(scored["proxy"], rows, False)["loss"] > task.evaluate(scored["server"], rows, False)["loss"]


def gpt2_medium_spec():
    import transformers as t

    with torch.device("meta"):
        model = t.GPT2LMHeadModel(t.GPT2Config(n_embd=1024, n_layer=24, n_head=16))
    trained = dict(model.named_parameters())
    locations = param_locations.param_locations(model, trained)
    return {n: ParamSpec(tuple(p.shape), place=locations.get(n)) for n, p in trained.items()}


def formula(method, spec, columns) -> int:
    """Codes at log2(5) bits, 4 bytes for 256 of them, a bit for each masked column, 4 bytes for each other entry."""
    masked, total = method._veil(spec, "down").masked, 0.0
    for layer in {p.columns: spec[n].shape[p.axis] for n, p in masked.items()}.values():
        total += layer / 8
    for name, t in spec.items():
        count = prod(t.shape)
        if name in masked:
            count = count // t.shape[masked[name].axis] * columns[masked[name].columns]
        coded = t.place is not None and t.place.part == "linear" and len(t.shape) == 2
        total += count * (log2(5) / 8 + 4 / 256) if coded else 4 * count
    return round(total)


def test_download_of_gpt2_medium():
    """Shapes only: the layout's sizes, which the contract suite compares with the bytes."""
    spec, method = gpt2_medium_spec(), FedQSN(0.1, 0.1, "all", bits=2)
    veil = method._veil(spec, "down")
    stream = rng.initial_stream(0, "columns")
    columns = {c: int(stream.bernoulli(0.81, (n,)).sum()) for c, n in veil.columns.items()}
    total = 0
    for f in method.layout(spec).fields:
        if f.direction == "down":
            shape = tuple(columns[veil.masked[f.name].columns] if s is None else s for s in f.shape)
            total += f.codec.nbytes(shape)
    plain = sum(4 * torch.Size(t.shape).numel() for t in spec.values())
    assert total == pytest.approx(formula(method, spec, columns), rel=0.02)
    assert total / plain < 0.18


# --- configuration


@pytest.mark.parametrize(
    "fields,named",
    [
        ('quantiser = "absmax"\nbits = 1', "bits"),
        ("bits = 9", "bits"),
        ('quantiser = "absmax"\nbits = 9', "bits"),
        ("server_rate = 1.0", "server_rate"),
        ("client_rate = 1.0", "client_rate"),
        ("client_rate = -0.1", "client_rate"),
        ("server_rate = nan", "server_rate"),
        ("block = 0", "block"),
        ("block = -256", "block"),
        ("upload_bits = 5", "bits"),
        ('mask_targets = "embeddings"', "mask_targets"),
        ('adapter = {kind = "lora"}', "adapter"),
    ],
)
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("fedqsn", fields)


def test_a_base_without_linear_layers_is_refused():
    spec = {"wte.weight": ParamSpec((5, 4), place=ParamLocation("embedding", "wte", 1)), "conv": ParamSpec((5, 4))}
    with pytest.raises(ConfigError, match="belongs to a linear layer"):
        FedQSN().init(spec, {}, rng.initial_stream(0, "x"))


def test_fused_experts_are_refused():
    with pytest.raises(ConfigError, match="experts"):
        FedQSN().init({**SPEC, "experts": ParamSpec((2, 3, 4))}, {}, rng.initial_stream(0, "x"))
