from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from scipy import stats

from fedveil import rng, strategies
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.adapters.lora import LoraAdapter
from fedveil.contract.layout import Payload
from fedveil.contract.method import AcceptedUpload, FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import ConfigError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops import random_masks
from fedveil.ops.running_sums import RunningSums
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire import header
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.conftest import ToyTrainer, aggregated

SPEC = {"a.w": ParamSpec((7, 5)), "b.w": ParamSpec((11,)), "c.s": ParamSpec(())}
WIRES = ["explicit", "implicit", "seeded"]
SITES = ["x", "y", "z"]
CTX = RoundContext(0, "x", True, bytes(32))


@dataclass
class Given:
    """A client with the gradient that it was given; training is one step along it with rate 1."""

    g: dict[str, torch.Tensor]
    num_examples: int = 3

    @property
    def spec(self):
        return {n: ParamSpec(tuple(t.shape)) for n, t in self.g.items()}

    def gradient(self, weights) -> TrainingResult:
        return TrainingResult(dict(self.g), {})

    def train(self, weights, frozen=None, penalty=None) -> TrainingResult:
        return TrainingResult({n: w - self.g[n] for n, w in weights.items()}, {})


def random(seed: int, spec=SPEC) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in spec.items()}


def start(method, weights) -> FederatedState:
    spec = {n: ParamSpec(tuple(w.shape)) for n, w in weights.items()}
    return method.init(spec, weights, rng.initial_stream(0, "method init"))


def turn(method, server, gradients, private, round_=0, counts=(3, 8, 1)):
    """One round over the real wire, no byte left out; `private` is updated."""
    exchange = MessageExchange(method, "random_binary", next(iter(gradients.values())).spec)
    uploads = []
    for i, (site, local) in enumerate(gradients.items()):
        local.num_examples = counts[i % len(counts)]
        ctx = RoundContext(round_, site, round_ == 0, site.encode() * 32)
        down = exchange.broadcast(server, replace(ctx, secret=bytes(32)))
        private[site], up = exchange.participate(down, private.get(site), local, ctx)
        message = exchange.receive(b"".join(up), round_)
        uploads.append(AcceptedUpload(message.payload, message.num_examples, replace(ctx, secret=bytes(32))))
    return aggregated(method, server, iter(uploads)), uploads


def given(round_=0, spec=SPEC) -> dict[str, Given]:
    return {site: Given(random(100 * round_ + i, spec)) for i, site in enumerate(SITES)}


def equal(a, b) -> bool:
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


# --- Eq. 12 by hand


def upload(values, mask, n=1) -> AcceptedUpload:
    value, mask = torch.tensor(values), torch.tensor(mask, dtype=torch.bool)
    return AcceptedUpload(Payload({"w": value[mask], "mask.w": mask}), n, CTX)


def by_hand():
    """Entries: all three clients; one; none; two of which one is a true zero."""
    yield upload([3.0, 1.0, 9.0, 4.0], [1, 0, 0, 1], n=2)
    yield upload([6.0, 5.0, 9.0, 0.0], [1, 1, 0, 1], n=1)
    yield upload([0.0, 2.0, 9.0, 7.0], [1, 0, 0, 0], n=5)


def test_eq_12_by_hand():
    """(3 + 6 + 0) / 3 = 3; 5 / 1; nobody; (4 + 0) / 2 = 2. Then w - 0.5 of that."""
    method = RandomBinary(learning_rate=0.5)
    new = aggregated(method, FederatedState({"w": torch.full((4,), 10.0)}), by_hand()).tensors["w"]
    assert new.tolist() == pytest.approx([8.5, 7.5, 10.0, 9.0], rel=1e-6)
    assert new[2] == 10.0


def test_eq_12_by_hand_with_the_clients_weights():
    """(2 * 3 + 1 * 6 + 5 * 0) / 8 = 1.5; 5; nobody; (2 * 4 + 0) / 3."""
    method = RandomBinary(learning_rate=0.5, weighted=True)
    new = aggregated(method, FederatedState({"w": torch.full((4,), 10.0)}), by_hand()).tensors["w"]
    assert new.tolist() == pytest.approx([9.25, 7.5, 10.0, 10.0 - 0.5 * 8 / 3], rel=1e-6)


def test_implicit_leaves_a_true_zero_out_and_explicit_does_not():
    """As above, but zeros are all that the server sees: (3 + 6) / 2 = 4.5 and 4 / 1."""
    implicit = (
        AcceptedUpload(Payload({"w": torch.where(u.payload.fields["mask.w"], torch.tensor(g), 0.0)}), 1, CTX)
        for u, g in zip(by_hand(), ([3.0, 1, 9, 4], [6.0, 5, 9, 0], [0.0, 2, 9, 7]), strict=True)
    )
    method = RandomBinary(learning_rate=0.5, wire="implicit")
    new = aggregated(method, FederatedState({"w": torch.full((4,), 10.0)}), implicit).tensors["w"]
    assert new.tolist() == pytest.approx([7.75, 7.5, 10.0, 8.0], rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_against_a_naive_twin(wire, weighted):
    """Entry by entry in double precision, with masks read off the upload as anybody on the wire could."""
    method = RandomBinary(rate={"a": 0.3, "b": 0.7}, wire=wire, learning_rate=0.1, weighted=weighted)
    weights, clients = random(7), given()
    explicit = replace(method, wire="explicit")
    _, seen = turn(explicit, start(explicit, weights), clients, {})
    new, _ = turn(method, start(method, weights), clients, {})
    for name, old in weights.items():
        for i in range(old.numel()):
            top = bottom = 0.0
            for site, up in zip(SITES, seen, strict=True):
                mask = up.payload.fields.get(f"mask.{name}", torch.ones(old.shape))
                n = up.num_examples if weighted else 1
                top += n * float(mask.flatten()[i]) * clients[site].g[name].flatten()[i].item()
                bottom += n * float(mask.flatten()[i])
            expected = old.flatten()[i].item() - (0.1 * top / bottom if bottom else 0.0)
            assert new.tensors[name].flatten()[i].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


# --- the wire


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("rate", [0.5, {"a": 0.2, "b": 0.8}, {"a": 1.0, "b": 0.5}])
def test_the_three_wire_forms_end_alike_where_no_gradient_is_zero(rate, optimiser, dtype):
    ends = []
    for wire in WIRES:
        method = RandomBinary(rate=rate, wire=wire, optimiser=optimiser, learning_rate=0.1, wire_dtype=dtype)
        server, private = start(method, random(7)), {}
        for round_ in range(3):
            server, _ = turn(method, server, given(round_), private, round_)
        ends.append(server.tensors)
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])
    assert not torch.equal(ends[0]["b.w"], random(7)["b.w"])


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_bytes(rate):
    size = 100_000
    spec = {"big": ParamSpec((size - 600,)), "small": ParamSpec((20, 30))}
    expected = {
        "explicit": (1 - rate) * 4 * size + size / 8,
        "seeded": (1 - rate) * 4 * size + 32,
        "implicit": 4 * size,
    }
    for wire, nbytes in expected.items():
        exchange = MessageExchange(RandomBinary(rate=rate, wire=wire), "random_binary", spec)
        down = exchange.broadcast(FederatedState(random(1, spec)), CTX)
        _, up = exchange.participate(down, None, Given(random(2, spec)), CTX)
        data = b"".join(up)
        assert exchange.receive(data, 0).payload_bytes == pytest.approx(nbytes, rel=0.01)
        assert len(data) == pytest.approx(nbytes, rel=0.01, abs=0.01 * nbytes + 500)


def test_what_is_masked_is_not_in_the_upload():
    """Rate 1/2 of marked values: those on the wire are those of the mask, and no byte pattern of another is there."""
    spec = {"w": ParamSpec((64,))}
    marked = {"w": random(5, spec)["w"] + 100}
    for wire in WIRES:
        exchange = MessageExchange(RandomBinary(wire=wire), "random_binary", spec)
        down = exchange.broadcast(FederatedState(random(1, spec)), CTX)
        _, up = exchange.participate(down, None, Given(marked), CTX)
        data = b"".join(up)
        sent = [marked["w"][i].numpy().tobytes() in data for i in range(64)]
        assert 16 < sum(sent) < 48
        mask = dict(exchange.method._masks(exchange.receive(data, 0).payload, {"w": (64,)}))["w"]
        assert mask.tolist() == sent


def message(wire, fields, spec=None):
    """An upload packed by somebody whose layout is the server's, or that of `spec`, and its receipt."""
    method = RandomBinary(wire=wire)
    exchange = MessageExchange(method, "random_binary", {"h.w": ParamSpec((6,))})
    layout = method.layout(spec or exchange.spec)
    return exchange.receive(
        pack_message(layout, EnvelopeStamp.from_exchange(method, "random_binary", 0, "up"), Payload(fields), 3), 0
    )


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_count_that_does_not_match_the_mask_is_refused_before_it_is_folded(count):
    mask = torch.tensor([True, False, True, False, False, True])
    assert message("explicit", {"h.w": torch.ones(3), "mask.h.w": mask}).num_examples == 3
    with pytest.raises(WireError, match=f"h.w: expected 3 values, as many as its mask has ones, found {count}"):
        message("explicit", {"h.w": torch.ones(count), "mask.h.w": mask})
    ones = int(random_masks.expand_mask(bytes(32), 0.5, (6,)).sum())
    assert message("seeded", {"h.w": torch.ones(ones), "key.0.5": bytes(32)}).num_examples == 3
    with pytest.raises(WireError, match=f"h.w: expected {ones} values, as many as its mask has ones, found {ones + 1}"):
        message("seeded", {"h.w": torch.ones(ones + 1), "key.0.5": bytes(32)})
    with pytest.raises(WireError, match="h.w: expected 3 values"):  # nor by aggregate itself
        aggregated(
            RandomBinary(),
            FederatedState({"h.w": torch.zeros(6)}),
            iter([AcceptedUpload(Payload({"h.w": torch.ones(count), "mask.h.w": mask}), 1, CTX)]),
        )


def test_an_end_that_draws_other_masks_is_refused():
    """Version 1 drew them from AES."""
    exchange = MessageExchange(RandomBinary(), "random_binary", {"h.w": ParamSpec((6,))})
    fields = {"h.w": torch.ones(6), "mask.h.w": torch.ones(6, dtype=torch.bool)}
    stamp = EnvelopeStamp.from_exchange(exchange.method, "random_binary", 0, "up")
    assert exchange.receive(pack_message(exchange.layout, stamp, Payload(fields), 3), 0).num_examples == 3
    with pytest.raises(WireError, match="version: expected 2, found 1"):
        exchange.receive(pack_message(exchange.layout, replace(stamp, version=1), Payload(fields), 3), 0)


@pytest.mark.parametrize("length", [5, 7, 600])
def test_a_mask_of_another_length_is_refused(length):
    fields = {"h.w": torch.ones(length), "mask.h.w": torch.ones(length, dtype=torch.bool)}
    refusals = {5: r"mask.h.w: expected shape \(6,\), found \(5,\)", 7: r"h.w: expected shape .* of at most \(6,\)"}
    with pytest.raises(WireError, match=refusals.get(length, "message: expected at most")):
        message("explicit", fields, {"h.w": ParamSpec((length,))})
    with pytest.raises(WireError, match="expected a key of 32 bytes, found 31"):
        message("seeded", {"h.w": torch.ones(3), "key.0.5": bytes(31)})


def test_a_mask_that_was_changed_on_the_way_is_refused():
    spec = {"w": ParamSpec((800,))}
    exchange = MessageExchange(RandomBinary(), "random_binary", spec)
    down = exchange.broadcast(FederatedState(random(1, spec)), CTX)
    _, up = exchange.participate(down, None, Given(random(2, spec)), CTX)
    data = bytearray(b"".join(up))
    mask = exchange.receive(bytes(data), 0).field_bytes["mask.w"]
    assert mask == 100
    data[header.read_header(memoryview(data))[1] + 50] ^= 1  # fields are sorted by name: the mask comes first
    with pytest.raises(WireError, match="mask.w: expected checksum"):
        exchange.receive(data, 0)


# --- R = 0 and R = 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rate", [0.0, {"no such tensor": 0.5}, {"a|b|c": 0.0}])
@pytest.mark.parametrize("wire", WIRES)
def test_r_0_is_fedsgd_bit_for_bit(wire, rate, weighted):
    """FedSGD without a line of this method: the weighted mean of the gradients, torch's own SGD; true zeros and all."""
    method = RandomBinary(rate=rate, wire=wire, learning_rate=0.1, weighted=weighted)
    server, plain = start(method, random(7)), random(7)
    sgd = torch.optim.SGD(plain.values(), lr=0.1)
    for round_ in range(4):
        clients = given(round_)
        clients["y"].g["a.w"][2:4] = 0.0
        server, uploads = turn(method, server, clients, {}, round_)
        sums = RunningSums()
        for n, local in zip((3, 8, 1), clients.values(), strict=True):
            for name, g in local.g.items():
                sums.fold(name, g, n if weighted else 1)
        for name, parameter in plain.items():
            parameter.grad = sums.means(plain)[name]
        sgd.step()
        assert set(uploads[0].payload.fields) == set(SPEC)
    assert equal(server.tensors, plain)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("rate", [1.0, {".": 1.0}])
def test_r_1_changes_nothing_and_sends_nothing(rate, wire, optimiser):
    method = RandomBinary(rate=rate, wire=wire, optimiser=optimiser, learning_rate=1.0)
    server = start(method, random(7))
    new, uploads = turn(method, server, given(), {})
    assert equal(new.tensors, server.tensors)
    assert not uploads[0].payload.fields


# --- mask periods


def masks_over(method, rounds, site="x"):
    private, masks, spec = {}, [], {"w": ParamSpec((400,))}
    server = start(method, random(1, spec))
    for round_ in range(rounds):
        server, uploads = turn(method, server, {site: Given(random(round_, spec))}, private, round_)
        masks.append(dict(method._masks(uploads[0].payload, {"w": (400,)}))["w"])
    return masks, private[site]


@pytest.mark.parametrize("wire", WIRES)
def test_periods(wire):
    """Who has the same mask as whom, over six rounds; at most 0.5 of 400 entries agree by chance, give or take."""
    groups = {("batch", 1): "012345", ("epoch", 1): "012345", ("epoch", 4): "000011", ("never", 1): "000000"}
    for (period, batches), expected in groups.items():
        masks, private = masks_over(RandomBinary(mask_period=period, epoch_batches=batches, wire=wire), 6)
        for i in range(6):
            for j in range(i):
                agree = float((masks[i] == masks[j]).float().mean())
                assert (agree == 1.0) == (expected[i] == expected[j])
                assert agree == 1.0 or abs(agree - 0.5) < 0.15
        assert (private is None) == (batches == 1 and period != "never")


def test_the_locked_mask_is_kept_as_its_key_and_survives_json():
    masks, private = masks_over(RandomBinary(rate=0.3, mask_period="never"), 2)
    assert not private.tensors
    again = FederatedState({}, json.loads(json.dumps(dict(private.scalars))))
    method, spec = RandomBinary(rate=0.3, mask_period="never"), {"w": ParamSpec((400,))}
    down = method.broadcast(FederatedState(random(1, spec)), CTX)
    _, up = method.client(again, down, Given(random(2, spec)), replace(CTX, round=9))
    assert torch.equal(up.fields["mask.w"], masks[0])


def moves(method, rounds, spec):
    """How often each entry moved, and the union of the clients' masks of the first round."""
    server, private, count, union = (
        start(method, random(1, spec)),
        {},
        0,
        torch.zeros(spec["w"].shape, dtype=torch.bool),
    )
    for round_ in range(rounds):
        ones = {site: Given({"w": torch.ones(spec["w"].shape)}) for site in SITES}
        new, uploads = turn(method, server, ones, private, round_)
        count = count + (new.tensors["w"] != server.tensors["w"]).int()
        if round_ == 0:
            for up in uploads:
                union |= up.payload.fields["mask.w"]
        server = new
    return count, union


def test_locked_entries_that_all_clients_mask_never_move():
    count, union = moves(RandomBinary(rate=0.8, mask_period="never", learning_rate=0.5), 12, {"w": ParamSpec((3000,))})
    assert torch.equal(count, 12 * union.int())
    frozen = int((~union).sum())
    low, high = stats.binom.ppf([1e-5, 1 - 1e-5], 3000, 0.8**3)
    assert low <= frozen <= high


def test_update_counts_are_binomial():
    """Eq. 13 as corrected: Binomial(m, 1 - R^N), by chi-square over bins of at least 20 expected entries."""
    m, size, rate = 15, 6000, 0.8
    count, _ = moves(RandomBinary(rate=rate, learning_rate=0.5), m, {"w": ParamSpec((size,))})
    seen = torch.bincount(count, minlength=m + 1).double().numpy()
    expected = size * stats.binom.pmf(range(m + 1), m, 1 - rate**3)
    large_bins = expected >= 20
    seen, expected = [*seen[large_bins], seen[~large_bins].sum()], [*expected[large_bins], expected[~large_bins].sum()]
    statistic = sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True))
    assert len(seen) > 8
    assert statistic < stats.chi2.ppf(1 - 1e-4, len(seen) - 1)
    wrong = size * stats.binom.pmf(range(m + 1), m, 1 - rate**2)  # the control: two clients instead of three
    assert (
        sum((s - e) ** 2 / e for s, e in zip(seen, [*wrong[large_bins], wrong[~large_bins].sum()], strict=True)) > 1000
    )


def test_sites_and_tensors_draw_apart():
    spec = {"p": ParamSpec((500,)), "q": ParamSpec((500,))}
    method = RandomBinary()
    _, uploads = turn(method, start(method, random(1, spec)), given(0, spec), {})
    drawn = [up.payload.fields[f"mask.{n}"] for up in uploads for n in "pq"]
    for i in range(len(drawn)):
        for j in range(i):
            assert abs(float((drawn[i] == drawn[j]).float().mean()) - 0.5) < 0.12


# --- server Adam, pseudo-gradients


def test_server_adam_against_a_twin_per_entry():
    """Each entry has its own Adam, which sees the rounds that moved it and no other."""
    method = RandomBinary(rate=0.7, optimiser="adam", learning_rate=0.01)
    server, private = start(method, random(7)), {}
    twin = {(n, i): [v.item(), 0.0, 0.0, 0] for n, w in random(7).items() for i, v in enumerate(w.flatten())}
    skipped = 0
    for round_ in range(9):
        clients = given(round_)
        server, uploads = turn(method, server, clients, private, round_)
        for (name, i), entry in twin.items():
            there = [bool(up.payload.fields[f"mask.{name}"].flatten()[i]) for up in uploads]
            got = [local.g[name].flatten()[i].item() for local, t in zip(clients.values(), there, strict=True) if t]
            if not got:
                skipped += 1
                continue
            g, (w, first, second, t) = sum(got) / len(got), entry
            first, second, t = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g, t + 1
            w -= 0.01 * (first / (1 - 0.9**t)) / (math.sqrt(second / (1 - 0.999**t)) + 1e-8)
            entry[:] = w, first, second, t
    assert skipped > 50
    for (name, i), (w, first, second, t) in twin.items():
        for key, expected in ((name, w), (f"adam.first.{name}", first), (f"adam.second.{name}", second)):
            assert server.tensors[key].flatten()[i].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert int(server.tensors[f"adam.steps.{name}"].flatten()[i]) == t


def test_adam_agrees_with_torch_where_nothing_is_masked():
    method = RandomBinary(rate=0.0, optimiser="adam", learning_rate=0.01)
    server, parameter = start(method, random(7)), random(7)["a.w"].requires_grad_()
    theirs = torch.optim.Adam([parameter], lr=0.01)
    for round_ in range(20):
        clients = given(round_)
        server, _ = turn(method, server, clients, {}, round_)
        parameter.grad = sum(local.g["a.w"] for local in clients.values()) / 3
        theirs.step()
    torch.testing.assert_close(server.tensors["a.w"], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_count_0_leaves_adam_s_moments_and_weights_bit_for_bit():
    method = RandomBinary(optimiser="adam", learning_rate=0.1)
    server = start(method, {"w": torch.tensor([1.0, 2.0])})
    once = aggregated(method, server, iter([upload([3.0, 4.0], [1, 1])]))
    again = aggregated(method, once, iter([upload([3.0, 4.0], [1, 0])]))
    for name, tensor in once.tensors.items():
        assert again.tensors[name][1] == tensor[1], name
        assert again.tensors[name][0] != tensor[0], name
    assert set(method.models(again)["server"]) == {"w"}


def test_an_epoch_s_pseudo_gradient_with_rate_1_is_the_mean_of_the_trained_weights():
    method = RandomBinary(rate=0.0, exchange="epoch")
    weights, clients = random(7), given()
    new, _ = turn(method, start(method, weights), clients, {})
    for name, w in weights.items():
        expected = sum(w - local.g[name] for local in clients.values()) / 3
        torch.testing.assert_close(new.tensors[name], expected, rtol=1e-5, atol=1e-6)


def test_a_batch_asks_for_a_gradient_and_an_epoch_for_a_training(lora_spec, lora_weights, monkeypatch):
    for exchange, step in (("batch", 1e-4), ("epoch", 1.0)):
        method = RandomBinary(rate=0.0, exchange=exchange, adapter=LoraAdapter())
        local = ToyTrainer(lora_spec, step=0.5)
        monkeypatch.delattr(ToyTrainer, "train" if exchange == "batch" else "gradient")
        server = method.init(lora_spec, lora_weights, rng.initial_stream(0, "x"))
        _, up = method.client(None, method.broadcast(server, CTX), local, CTX)
        new = aggregated(method, server, iter([AcceptedUpload(up, 3, CTX)]))
        monkeypatch.undo()
        for name, w in lora_weights.items():
            torch.testing.assert_close(new.tensors[name], w + 0.5 * step)


# --- configuration


@pytest.mark.parametrize("rate", ["-0.1", "1.5", "nan", '{"attn" = 2.0}'])
def test_a_rate_outside_0_to_1_is_refused_by_name(rate):
    with pytest.raises(ConfigError, match="rate"):
        strategies.create_method("random_binary", f"rate = {rate}")


@pytest.mark.parametrize(
    "fields,named",
    [
        ("learning_rate = 0.0", "learning_rate"),
        ("epoch_batches = 0", "epoch_batches"),
        ('epoch_batches = 2\nexchange = "epoch"', "epoch_batches"),
        ('epoch_batches = 2\nmask_period = "never"', "epoch_batches"),
        ('wire = "dense"', "wire"),
        ('rate = {"(" = 0.5}', r"rate\.\("),
    ],
)
def test_bad_fields_are_refused_by_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        strategies.create_method("random_binary", fields)


def test_fields_reach_the_client_as_they_are_the_order_of_the_map_too():
    method = strategies.create_method("random_binary", 'rate = {"b" = 0.5, "." = 0.25}\nmask_period = "never"')
    sent = strategies.create_from_json("random_binary", json.dumps(asdict(method)))
    assert sent == method
    assert list(sent.rate) == ["b", "."]
    assert method.adapter == AllWeightsAdapter()
    assert method.layout(SPEC) == sent.layout(SPEC)
