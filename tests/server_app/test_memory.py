"""What the server holds of a model at one time: no copy of a message, none for the evaluation."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedveil import rng, tasks
from fedveil.adapters.all_weights import AllWeightsAdapter
from fedveil.config import parse
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import FederatedState, RoundContext
from fedveil.contract.param_spec import ParamSpec
from fedveil.contract.task import Example
from fedveil.federation.exchange import MessageExchange
from fedveil.models.loaded_model import _is_absent
from fedveil.records.tensor_state import state_digest
from fedveil.server_app import round_attempt as attempts
from fedveil.server_app.evaluation import ServerEvaluator
from fedveil.server_app.message_recorder import RunMessageRecorder
from fedveil.server_app.reception import read_given_reply
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire import chunking
from fedveil.wire.envelope import EnvelopeStamp, pack_message

SPEC = {name: ParamSpec((1000, 1000)) for name in "abcde"}
BYTES = 20_000_000


@pytest.fixture(autouse=True)
def _flower_knows_who_sends():
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def attempt(sites: str, folder=None) -> attempts.RoundAttempt:
    generator = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}
    exchange = MessageExchange(FedAvg(adapter=AllWeightsAdapter()), "fedavg", SPEC)
    recorder = RunMessageRecorder(None, None, list(sites))
    return attempts.RoundAttempt(
        exchange, FederatedState(weights), RunSettings(), MessageAddress("run"), 0, contexts(sites), recorder, folder
    )


def contexts(sites: str) -> list[RoundContext]:
    return [RoundContext(0, site, True, bytes(32), True, MessageAddress("run", 0, site)) for site in sites]


def test_one_message_to_all_sites_is_in_memory_once():
    """Python's own buffers, which the message is made of; tensors are not counted."""
    trying = attempt("abc")
    tracemalloc.start()
    messages = trying.build_messages(dict.fromkeys("abc", 1), 60.0, ConfigRecord())
    traced_bytes, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first = messages[0].content.array_records["fedveil"]
    assert all(message.content.array_records["fedveil"] is first for message in messages)
    sent = b"".join(first[chunking.slice_key(i)].data for i in range(len(first)))
    assert sent == trying.exchange.broadcast(trying.server, contexts("a")[0])
    assert trying.tally.download_bytes == 3 * len(sent)
    assert BYTES <= traced_bytes < 1.05 * BYTES
    assert peak < 1.2 * BYTES  # the first message, and a slice of the next


def test_slices_and_messages_that_are_equal_are_the_same_objects_whatever_comes_between():
    """FedPer sends all layers to one site and the top ones to the next; FedRand one factor or the other."""
    shared = attempts.DeduplicatedSlices()
    long, other = b"x" * (3 << 20), b"z" * (3 << 20)
    records = [shared.record([data]) for data in (long, other, long, other, long)]
    assert len({id(record) for record in records}) == 2
    assert records[0] is records[2] is records[4]
    longer, shorter = shared.record([long, b"y"]), shared.record([b"x" * (2 << 20)])
    assert longer is not records[0]
    assert (
        longer[chunking.slice_key(0)].data
        is records[0][chunking.slice_key(0)].data
        is shorter[chunking.slice_key(0)].data
    )
    assert b"".join(longer[chunking.slice_key(i)].data for i in range(len(longer))) == long + b"y"
    assert len(shorter) < len(records[0])


def test_a_slice_whose_checksum_another_one_has_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(attempts.xxhash, "xxh3_128_digest", lambda part: b"the same")
    shared = attempts.DeduplicatedSlices()
    assert [shared.record([data])[chunking.slice_key(0)].data for data in (b"a", b"b", b"a")] == [b"a", b"b", b"a"]


@pytest.mark.parametrize("parked", [True, False])
def test_a_long_upload_waits_in_a_file_and_reads_the_same(parked, tmp_path):
    trying = attempt("a", tmp_path if parked else None)
    (ctx,) = contexts("a")
    weights = trying.server.tensors
    payload = trying.exchange.method.broadcast(trying.server, ctx)
    up = pack_message(
        trying.exchange.layout,
        EnvelopeStamp.from_exchange(trying.exchange.method, "fedavg", 0, "up", ctx.address),
        payload,
        7,
    )
    arrays = {chunking.slice_key(i): attempts._array(part) for i, part in enumerate(chunking.slice_message([up]))}
    reply = Message(RecordDict({"fedveil": ArrayRecord(arrays)}), 1, MessageType.TRAIN)
    upload = trying.judge_reply(read_given_reply(reply, "a", trying.largest_upload, trying.folder), ctx)
    assert (upload is not None, trying.tally.failed) == (True, {})
    assert state_digest(upload.payload.fields) == state_digest(weights)
    assert type(upload.payload.fields).__name__ == ("MmapTensors" if parked else "dict")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.stat().st_size > 1_000_000) == []


def test_the_evaluation_reads_the_servers_weights_in_place_and_leaves_them(monkeypatch):
    config = parse({"evaluate.eval-examples": 2, "evaluate.generate": "never"})
    task = tasks.load_task(config, AllWeightsAdapter(), "cpu")
    server = FederatedState(dict(task.initial(rng.initial_stream(0, "weights"))))
    before, seen = state_digest(server.tensors), []
    assert all(_is_absent(p) for p in task.trained.values())  # the server's state has them now
    examples = Example.from_columns([{"mr": "name[a]", "ref": "A."}, {"mr": "name[b]", "ref": "B is here."}])
    honest = task.mean_loss
    monkeypatch.setattr(
        task, "mean_loss", lambda rows: seen.append({n: p.data_ptr() for n, p in task.trained.items()}) or honest(rows)
    )
    evaluator = ServerEvaluator(task, examples, config.evaluate, rounds=1)
    first = evaluator.scores(FedAvg(adapter=AllWeightsAdapter()), server, 0)
    assert seen[0] == {n: w.data_ptr() for n, w in server.tensors.items()}
    assert state_digest(server.tensors) == before
    assert all(_is_absent(p) for p in task.trained.values())
    task.put(server.tensors)  # a copy
    copied = honest(task.encode(examples))
    assert first["server"]["loss"] == copied
