"""What the server holds of a model at one time: no copy of a message, none for the evaluation."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedveil import rng, tasks
from fedveil.adapters.all_weights import AllWeights
from fedveil.config import parse
from fedveil.contract.address import Address
from fedveil.contract.method import RoundContext, State
from fedveil.contract.spec import TensorSpec
from fedveil.contract.task import Example
from fedveil.federation.exchange import Exchange
from fedveil.models.loaded_model import _is_absent
from fedveil.records.state import digest
from fedveil.server_app import attempt as attempts
from fedveil.server_app.evaluate import Evaluator
from fedveil.server_app.intake import Limits
from fedveil.server_app.record import RoundRecord, RunFolder
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire import slices
from fedveil.wire.envelope import Stamp, pack

SPEC = {name: TensorSpec((1000, 1000)) for name in "abcde"}
BYTES = 20_000_000


@pytest.fixture(autouse=True)
def _flower_knows_who_sends():
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def attempt(folder=None) -> attempts.Attempt:
    generator = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(t.shape, generator=generator) for n, t in SPEC.items()}
    exchange = Exchange(FedAvg(adapter=AllWeights()), "fedavg", SPEC)
    return attempts.Attempt(exchange, State(weights), RoundRecord(0, 0, []), Limits(), "run", folder, None)


def contexts(sites: str) -> list[RoundContext]:
    return [RoundContext(0, site, True, bytes(32), True, Address("run", 0, site)) for site in sites]


def test_one_message_to_all_sites_is_in_memory_once():
    """Python's own buffers, which the message is made of; tensors are not counted."""
    trying = attempt()
    tracemalloc.start()
    messages = trying.messages(contexts("abc"), dict.fromkeys("abc", 1), 60.0, ConfigRecord())
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first = messages[0].content.array_records["fedveil"]
    assert all(message.content.array_records["fedveil"] is first for message in messages)
    sent = b"".join(first[slices.name(i)].data for i in range(len(first)))
    assert sent == trying.exchange.broadcast(trying.server, contexts("a")[0])
    assert trying.record.download_bytes == 3 * len(sent)
    assert BYTES <= held < 1.05 * BYTES
    assert peak < 1.2 * BYTES  # the first message, and a slice of the next


def test_slices_and_messages_that_are_equal_are_the_same_objects_whatever_comes_between():
    """FedPer sends all layers to one site and the top ones to the next; FedRand one factor or the other."""
    shared = attempts.Shared()
    long, other = b"x" * (3 << 20), b"z" * (3 << 20)
    records = [shared.record([data]) for data in (long, other, long, other, long)]
    assert len({id(record) for record in records}) == 2
    assert records[0] is records[2] is records[4]
    longer, shorter = shared.record([long, b"y"]), shared.record([b"x" * (2 << 20)])
    assert longer is not records[0]
    assert longer[slices.name(0)].data is records[0][slices.name(0)].data is shorter[slices.name(0)].data
    assert b"".join(longer[slices.name(i)].data for i in range(len(longer))) == long + b"y"
    assert len(shorter) < len(records[0])


def test_a_slice_whose_checksum_another_one_has_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(attempts.xxhash, "xxh3_128_digest", lambda part: b"the same")
    shared = attempts.Shared()
    assert [shared.record([data])[slices.name(0)].data for data in (b"a", b"b", b"a")] == [b"a", b"b", b"a"]


@pytest.mark.parametrize("parked", [True, False])
def test_a_long_upload_waits_in_a_file_and_reads_the_same(parked, tmp_path):
    trying = attempt(RunFolder(tmp_path / "run") if parked else None)
    (ctx,) = contexts("a")
    weights = trying.server.tensors
    payload = trying.exchange.method.broadcast(trying.server, ctx)
    up = pack(trying.exchange.layout, Stamp.of(trying.exchange.method, "fedavg", 0, "up", ctx.address), payload, 7)
    arrays = {slices.name(i): attempts._array(part) for i, part in enumerate(slices.sliced([up]))}
    reply = Message(RecordDict({"fedveil": ArrayRecord(arrays)}), 1, MessageType.TRAIN)
    upload = trying.judged(reply, ctx)
    assert (upload is not None, trying.record.failed) == (True, {})
    assert digest(upload.payload.fields) == digest(weights)
    assert type(upload.payload.fields).__name__ == ("ParkedFields" if parked else "dict")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.stat().st_size > 1_000_000) == []


def test_the_evaluation_reads_the_servers_weights_in_place_and_leaves_them(monkeypatch):
    config = parse({"evaluate.max-examples": 2, "evaluate.generate": "never"})
    task = tasks.load(config, AllWeights(), "cpu")
    server = State(dict(task.initial(rng.initial(0, "weights"))))
    before, seen = digest(server.tensors), []
    assert all(_is_absent(p) for p in task.trained.values())  # the server's state has them now
    examples = Example.of([{"mr": "name[a]", "ref": "A."}, {"mr": "name[b]", "ref": "B is here."}])
    honest = task.mean_loss
    monkeypatch.setattr(
        task, "mean_loss", lambda rows: seen.append({n: p.data_ptr() for n, p in task.trained.items()}) or honest(rows)
    )
    evaluator = Evaluator(task, examples, config.evaluate, rounds=1)
    first = evaluator.scores(FedAvg(adapter=AllWeights()), server, 0)
    assert seen[0] == {n: w.data_ptr() for n, w in server.tensors.items()}
    assert digest(server.tensors) == before
    assert all(_is_absent(p) for p in task.trained.values())
    task.put(server.tensors)  # a copy
    copied = honest(task.encode(examples))
    assert first["server"]["loss"] == copied
