"""With a device in the context, large computations run there, and messages equal those of a CPU byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedveil import rng
from fedveil.contract.codec import QuantizedTensor
from fedveil.contract.method import Method, RoundContext
from fedveil.contract.param_spec import Spec, Weights
from fedveil.contract.trainer import TrainingResult
from fedveil.errors import TaskError, WireError
from fedveil.federation.exchange import MessageExchange
from fedveil.ops import fedsgd
from fedveil.strategies.fedqsn import FedQSN
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire.envelope import EnvelopeStamp, pack_message, unpack_message
from fedveil.wire.quantized import QuantizedCodec
from tests.pretend import DEVICE, Pretended, There
from tests.strategies.test_on_gpu import SPEC, weights

CTX = RoundContext(1, "a", True, bytes(range(32)))
THERE = replace(CTX, device=DEVICE)


@dataclass
class OnDevice:
    """A client that computes on the device: what it gets must lie there, or be taken there a tensor at a time."""

    spec: Spec
    device: torch.device | None = None
    num_examples: int = 3

    def gradient(self, received: Weights) -> TrainingResult:
        return TrainingResult({n: torch.sin(w.to(self.device)) for n, w in received.items()}, {"steps": 1})

    def train(self, received: Weights, frozen: Weights | None = None, penalty=None) -> TrainingResult:
        moved = {n: torch.cos(w) for n, w in received.items()}
        for n, mask in (frozen or {}).items():
            moved[n] = torch.where(mask.to(self.device), received[n], moved[n])
        return TrainingResult(moved, {"steps": 1})


METHODS = [
    (FedQSN(0.3, 0.3), "fedqsn"),
    (FedQSN(0.3, 0.3, quantiser="absmax", bits=4, upload_bits=3, wire_dtype="bfloat16"), "fedqsn"),
    (FedQSN(0.3, 0.3, "all", quantiser="none", update="replace"), "fedqsn"),
    (FedQSN(0.0, 0.0, quantiser="none"), "fedqsn"),
    *((RandomBinary(rate=0.3, wire=wire), "random_binary") for wire in ("explicit", "implicit", "seeded")),
    (RandomBinary(rate={"in": 0.4, "out": 0.0}, wire_dtype="bfloat16"), "random_binary"),
    (RandomBinary(exchange="epoch", mask_period="never"), "random_binary"),
]


def turn(method: Method, name: str, ctx: RoundContext) -> tuple[bytes, bytes]:
    """The broadcast and the upload of one site."""
    exchange = MessageExchange(method, name, SPEC)
    server = method.init(SPEC, weights("cpu"), rng.initial_stream(0, "method init"))
    down = exchange.broadcast(server, ctx)
    _, up = exchange.participate(down, None, OnDevice(SPEC, ctx.device), ctx)
    return down, b"".join(up)


@pytest.mark.long
@pytest.mark.parametrize("method,name", METHODS, ids=lambda value: value if isinstance(value, str) else "")
def test_messages_are_those_of_a_cpu(method, name):
    expected = turn(method, name, CTX)
    with Pretended() as pretended:
        messages = turn(method, name, THERE)
    assert messages == expected
    assert sum(pretended.back) <= sum(map(len, messages))  # only sent tensors come back


def test_a_proxy_is_coded_there_and_comes_back_packed():
    method = FedQSN(0.3, 0.3)
    exchange = MessageExchange(method, "fedqsn", SPEC)
    server = method.init(SPEC, weights("cpu"), rng.initial_stream(0, "method init"))
    with Pretended() as pretended:
        payload = method.broadcast(server, THERE)
        coded = {n: v for n, v in payload.fields.items() if isinstance(v, QuantizedTensor)}
        assert sorted(coded) == ["in.weight", "out.weight"]
        assert all(isinstance(t, There) for v in coded.values() for t in (v.codes, v.scales))
        assert not pretended.back
        down = exchange.packed(server, THERE)
    codecs = {n: exchange.layout.fields_of("down", "")[n].codec for n in coded}
    sizes = {n: codecs[n].nbytes(tuple(v.codes.shape)) - 4 * len(v.scales) for n, v in coded.items()}
    assert set(sizes.values()) <= set(pretended.back)
    assert not set(sizes.values()) & {v.codes.numel() for v in coded.values()}
    assert sum(map(len, down.parts)) < sum(w.nbytes for w in weights("cpu").values())


def test_a_gradient_comes_back_without_what_its_mask_leaves_out():
    method = RandomBinary(rate=0.8, wire="seeded")
    server = method.init(SPEC, weights("cpu"), rng.initial_stream(0, "method init"))
    exchange = MessageExchange(method, "random_binary", SPEC)
    down = exchange.broadcast(server, CTX)
    with Pretended() as pretended:
        _, up = exchange.participate(down, None, OnDevice(SPEC, DEVICE), THERE)
    entries = sum(w.numel() for w in weights("cpu").values())
    assert sum(pretended.back) < 0.21 * 4 * entries
    assert len(b"".join(up)) < 0.25 * 4 * entries


def test_what_is_not_finite_is_refused_once_all_is_coded():
    method = FedQSN(0.3, 0.3)
    broken = weights("cpu")
    broken["in.weight"][3, 5] = torch.nan
    server = method.init(SPEC, broken, rng.initial_stream(0, "method init"))
    for ctx in (CTX, THERE):
        with Pretended(), pytest.raises(TaskError, match="cannot quantize NaN or infinity"):
            method.broadcast(server, ctx)


def test_codes_that_only_decoding_shows_to_be_wrong_are_refused_at_the_access():
    """Five codes of 5 levels in a word of 14 bits: 6 digits, of which one more is not zero; and a word beyond 5^6."""
    exchange = MessageExchange(FedQSN(), "fedqsn", SPEC)
    server = exchange.method.init(SPEC, weights("cpu"), rng.initial_stream(0, "method init"))
    payload = exchange.method.broadcast(server, CTX)
    stamp = EnvelopeStamp.from_exchange(exchange.method, "fedqsn", 1, "down")
    quantized_field = payload.fields["in.weight"]
    worse = Worse(5, quantized_field.codes.numel())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedCodec, "encode", worse.encode)
        data = pack_message(exchange.layout, stamp, payload)
    with pytest.raises(WireError, match="in.weight: codes: expected 6 codes below 5 in a word"):
        unpack_message(data, exchange.layout, stamp)
    with Pretended():
        message = unpack_message(data, exchange.layout, stamp, DEVICE)
        assert set(message.payload.fields) == set(payload.fields)
        assert isinstance(message.payload.fields["out.weight"], QuantizedTensor)
        with pytest.raises(WireError, match="in.weight: codes: expected 6 codes below 5 in a word of 14 bits, found"):
            message.payload.fields["in.weight"]


def test_codes_that_were_damaged_on_the_way_are_refused_before_any_access():
    exchange = MessageExchange(FedQSN(), "fedqsn", SPEC)
    server = exchange.method.init(SPEC, weights("cpu"), rng.initial_stream(0, "method init"))
    payload = exchange.method.broadcast(server, CTX)
    data = bytearray(exchange.broadcast(server, CTX))
    packed = exchange.layout.fields_of("down", "")["in.weight"].codec.encode(payload.fields["in.weight"])[1]
    data[data.index(bytes(packed)) + 5] ^= 1
    with pytest.raises(WireError, match="in.weight: expected checksum .*: the field was damaged in transit"):
        unpack_message(data, exchange.layout, EnvelopeStamp.from_exchange(exchange.method, "fedqsn", 1, "down"), DEVICE)


@pytest.mark.parametrize("exchange", ["batch", "epoch"])
def test_without_a_device_gradients_come_to_where_the_weights_are(exchange):
    with Pretended():
        gradient = fedsgd.client_gradient(OnDevice(SPEC, DEVICE), weights("cpu"), "batch")
        assert {g.device.type for g in gradient.values()} == {"cpu"}
        there = fedsgd.client_gradient(OnDevice(SPEC), weights("cpu"), exchange, DEVICE)
        assert {g.device for g in there.values()} == {DEVICE}


class Worse:
    """Encodes codes of one length with a last byte of ones in place of a code."""

    def __init__(self, levels: int, count: int) -> None:
        self._honest, self._count = QuantizedCodec(levels).encode, count

    def encode(self, value):
        scales, packed = self._honest(value)
        if value.codes.numel() == self._count:
            packed = bytes(packed[:8]) + b"\xff\xff\xff" + bytes(packed[11:])
        return [scales, packed]
