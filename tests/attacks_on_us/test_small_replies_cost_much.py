"""Replies that are small on the line, or large and worthless, cost the server no more than a sound upload could."""

from __future__ import annotations

import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedveil import rng, strategies
from fedveil.contract.layout import MessageLayout, Payload
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.federation.exchange import MessageExchange
from fedveil.server_app.message_recorder import RunMessageRecorder
from fedveil.server_app.reception import read_given_reply
from fedveil.server_app.round_attempt import RoundAttempt
from fedveil.server_app.run_settings import RunSettings
from fedveil.wire import chunking
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.conftest import ToyTrainer
from tools.forge import with_compressed

STREAM = rng.initial_stream(1, "method init")
SPEC = {"h.0.lora_A": ParamSpec((2, 5)), "h.0.lora_B": ParamSpec((7, 2))}
CTX = RoundContext(0, "east", True, bytes(32))


def judged(exchange: MessageExchange, records: dict[str, object]) -> tuple[str, int, float]:
    """The reason of the refusal, the bytes that judging took at its peak, and its seconds."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    recorder = RunMessageRecorder(None, None, ["east"])
    attempt = RoundAttempt(exchange, FederatedState(), RunSettings(), MessageAddress("run"), 0, [CTX], recorder)
    question = Message(RecordDict(), 1, MessageType.TRAIN)
    question.metadata.__dict__["_message_id"] = "m1"
    reply = Message(RecordDict(records), reply_to=question)
    started = time.process_time()
    tracemalloc.start()
    try:
        assert attempt.judge_reply(read_given_reply(reply, "east", attempt.largest_upload, None), CTX) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return attempt.tally.failed["east"], peak, time.process_time() - started


def in_slices(data: bytes, size: int = chunking.SLICE_BYTES) -> dict[str, object]:
    parts = enumerate(chunking.slice_message([data], size))
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in parts}
    return {"fedveil": ArrayRecord(arrays)}


def entries(count: int) -> bytes:
    """A header of a few kB that names `count` fields."""
    field = b'["x","dense float32",[1],4,"0000000000000000"]'
    head = b'{"method":"fedavg","version":1,"round":0,"direction":"up","variant":"","layout":"0","fields":['
    return zlib.compress(head + b",".join([field] * count) + b'],"scalars":{},"num_examples":3,"report":{}}', 9)


BOMBS: dict[str, Callable[[], bytes]] = {  # not compressed before it is needed
    "300,000 fields in 40 kB": lambda: entries(300_000),
    "brackets": lambda: zlib.compress(b"[" * (15 << 20), 9),
    "empty lists": lambda: zlib.compress(b"[" + b"[]," * (5 << 20) + b"[]]", 9),
    "spaces": lambda: zlib.compress(b" " * (15 << 20) + b"5", 9),
    "without end": lambda: zlib.compress(b"[" + b" " * (1 << 30 >> 4) + b"]", 9),
    "a header of 10 MB that does not compress": lambda: b"\xff" * (10 << 20),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_header_costs_no_more_than_the_layout_s_fields_need(kind, exchange, upload):
    reason, peak, _ = judged(exchange, in_slices(with_compressed(upload, BOMBS[kind]())))
    assert reason.startswith(("refused: header: ", "refused: reply: its "))
    assert peak < 300_000


@pytest.mark.long
def test_junk_is_refused_before_it_is_gathered(exchange, upload):
    junk = bytearray(64 << 20)
    reason, peak, _ = judged(exchange, in_slices(upload + bytes(junk)))
    assert reason.startswith("refused: reply: its ")
    assert peak < 300_000


def test_more_slices_than_the_bytes_need_are_refused(exchange, upload):
    reason, _, _ = judged(exchange, in_slices(upload, 1))
    assert reason == f"refused: reply: its {len(upload)} bytes need 1 slices, but it has {len(upload)}"


def test_what_comes_beside_the_upload_is_refused(exchange, upload):
    beside = in_slices(upload) | {"more": ConfigRecord({"x": b"\0" * (10 << 20)})}
    reason, peak, _ = judged(exchange, beside)
    assert reason.startswith("refused: reply: it needs the record fedveil, optionally log and signature")
    assert reason.endswith("found ['fedveil', 'more']")
    assert peak < 300_000


def test_a_length_that_only_the_sender_knows_has_a_bound(random_weights):
    """random_binary sends as many values as survive: at most every entry of the tensor."""
    exchange = MessageExchange(strategies.create_method("random_binary"), "random_binary", SPEC)
    server = exchange.method.init(SPEC, random_weights(SPEC, 1), STREAM)
    _, parts = exchange.participate(exchange.broadcast(server, CTX), None, ToyTrainer(SPEC), CTX)
    payload = exchange.receive(b"".join(parts), 0).payload
    longer = Payload({**payload.fields, "h.0.lora_A": torch.zeros(11)}, payload.variant, payload.scalars)
    own = MessageLayout(tuple(replace(f, most=tuple(2 * n for n in f.most)) for f in exchange.layout.fields))
    forged = pack_message(own, EnvelopeStamp.from_exchange(exchange.method, "random_binary", 0, "up"), longer, 3)
    reason, _, _ = judged(exchange, in_slices(forged))
    assert reason == "refused: h.0.lora_A: expected shape (None,) of at most (10,), found (11,)"


@pytest.mark.parametrize("name", strategies.list_methods())
def test_a_sound_upload_is_within_the_bound_of_its_layout(name, random_weights):
    method = strategies.create_method(name)
    exchange = MessageExchange(method, name, dict(method.adapter.example_spec()))
    server = method.init(exchange.spec, random_weights(exchange.spec, 1), STREAM)
    _, parts = exchange.participate(exchange.broadcast(server, CTX), None, ToyTrainer(exchange.spec), CTX)
    size = sum(map(len, parts))
    assert size <= exchange.largest_upload < 1.5 * size + 4000
