"""MethodStrategy and the ClientApp together, over a Grid in this process."""

from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path

import pytest
import torch
import xxhash
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import Strategy

import fedveil.federation.in_process
from fedveil import rng
from fedveil.client_app.app import app
from fedveil.config import CohortConfig, parse
from fedveil.contract.layout import MessageLayout, Payload, WireField
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.param_spec import ParamSpec
from fedveil.encrypted_files import VARIABLE, is_sealed, make_key
from fedveil.errors import ConfigError, QuorumError, StateError
from fedveil.federation.exchange import MessageExchange
from fedveil.records import disclosure_ledger
from fedveil.records.tensor_state import load_state, state_digest
from fedveil.server_app import completion, connected_sites
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.strategies.fedrand import FedRand
from fedveil.strategies.random_binary import RandomBinary
from fedveil.wire import chunking, header
from fedveil.wire.capture import MessageCapture
from fedveil.wire.dense import DenseCodec
from fedveil.wire.envelope import EnvelopeStamp, pack_message
from tests.server_app.grid import SHAPES, LocalGrid, use_toy_task

SITES = ["north", "east", "south", "west"]
SPEC = {n: ParamSpec(s) for n, s in SHAPES.items()}
RUN_CONFIG = {"run.deterministic": True, "run.seed": 9}
QUICK = {"min_sites": 2, "deadline_seconds": 1.0, "wait_seconds": 1.0}


@pytest.fixture
def task(monkeypatch):
    return use_toy_task(monkeypatch)


@pytest.fixture
def grid(tmp_path, task):
    return lambda **more: LocalGrid(app, SITES, tmp_path / "state", **({"run_config": RUN_CONFIG} | more))


def initial(task) -> ArrayRecord:
    return ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights"))))


def strategy(method=None, **more) -> MethodStrategy:
    cohort = CohortConfig(**(QUICK | more.pop("cohort", {})))
    named = {key: more.pop(key) for key in ("name", "tap", "limits") if key in more}
    settings = RunSettings(cohort, seed=9, deterministic=True, **named)
    return MethodStrategy(method or FedRand(), settings, **more)


def test_it_is_a_flower_strategy_for_anybody_s_serverapp(grid, task):
    """What a stranger's ServerApp does: its own evaluate_fn, Flower's start() arguments, Flower's result."""
    ours = strategy(FedRand(rho=0.5))
    assert isinstance(ours, Strategy)
    seen = []

    def evaluate_fn(server_round, arrays):
        seen.append((server_round, sorted(arrays)))
        return MetricRecord({"norm": float(sum(w.norm() for w in arrays.to_torch_state_dict().values()))})

    result = ours.start(
        grid(), initial(task), num_rounds=3, timeout=30, train_config=ConfigRecord({"lr": 0.1}), evaluate_fn=evaluate_fn
    )
    assert seen == [(r, sorted(SHAPES)) for r in range(4)]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert result.train_metrics_clientapp[1]["num-examples"] == 3 + 4 + 5 + 6
    assert result.train_metrics_clientapp[1]["loss_trained"] == 0.25
    assert {n: tuple(a.shape) for n, a in result.arrays.items()} == SHAPES


@pytest.mark.parametrize("method,named", [(RandomBinary(), True), (FedAvg(), False)])
def test_the_server_s_device_is_named_to_methods_that_use_one(grid, task, monkeypatch, method, named):
    contexts, made = [], MessageExchange.packed
    monkeypatch.setattr(
        MessageExchange, "packed", lambda self, server, ctx: (contexts.append(ctx), made(self, server, ctx))[1]
    )
    strategy(method, device=torch.device("cpu")).start(grid(), initial(task), num_rounds=1)
    assert {ctx.device for ctx in contexts} == {torch.device("cpu") if named else None}


@pytest.mark.parametrize("method", [FedAvg(), FedRand(), FedRand(downlink="selected"), FedRand(cold="initial")])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_grid_and_in_process_end_bit_identical(method, fraction, grid, task):
    ours = strategy(method, cohort={"fraction": fraction})
    over_grid = ours.start(grid(), initial(task), num_rounds=5).arrays.to_torch_state_dict()
    config = parse(RUN_CONFIG | {"run.rounds": 5, "cohort.fraction": fraction})
    exchange = MessageExchange(method, type(method).__module__.rpartition(".")[2], task.spec)
    start = method.init(task.spec, task.initial(rng.initial_stream(9, "weights")), rng.initial_stream(9, "method init"))
    sites = sorted(SITES)

    def trainer_for(site, ctx):
        return task.trainer([{}] * (3 + sites.index(site)), ctx.rng("batches"))

    run = fedveil.federation.in_process.InProcessFederation(exchange, config, trainer_for, sites, start, max_share=0.5)
    run.run()
    assert state_digest(over_grid) == state_digest(run.models()["server"])
    assert ours.history[-1].weights == state_digest(over_grid)
    assert sum(r.upload_bytes for r in ours.history) == run.upload_bytes
    assert sum(r.download_bytes for r in ours.history) == run.download_bytes


def test_flower_s_own_loop_can_drive_it(grid, task):
    ours, reference = strategy(FedAvg()), strategy(FedAvg())
    g = grid()
    result = Strategy.start(ours, g, initial(task), num_rounds=2)
    expected = reference.start(grid(), initial(task), num_rounds=2)
    assert state_digest(result.arrays.to_torch_state_dict()) == state_digest(expected.arrays.to_torch_state_dict())


@pytest.mark.long
def test_order_of_arrival_does_not_matter_when_deterministic(grid, task):
    quick = strategy(FedAvg()).start(grid(), initial(task), num_rounds=2)
    slow = strategy(FedAvg()).start(grid(late={"east": 2, "west": 1}), initial(task), num_rounds=2)
    assert state_digest(quick.arrays.to_torch_state_dict()) == state_digest(slow.arrays.to_torch_state_dict())


def in_slices(data: bytes, stype: str = chunking.STYPE) -> ArrayRecord:
    parts = enumerate(chunking.slice_message([data]))
    return ArrayRecord({chunking.slice_key(i): Array("uint8", (len(part),), stype, part) for i, part in parts})


def rebuilt(change):
    """A reply whose message bytes are changed by `change`."""

    def tamper(message: Message, reply: Message) -> Message:
        order = message.content.config_records["order"]
        data = b"".join(array.data for _, array in sorted(reply.content.array_records["fedveil"].items()))
        data = change(data, MessageAddress(order["run"], order["attempt"], order["site"]))
        return Message(RecordDict({"fedveil": in_slices(data)}), reply_to=message)

    return tamper


def flip(data: bytes, address) -> bytes:
    damaged = bytearray(data)
    damaged[-12] ^= 1
    return bytes(damaged)


def claiming(num_examples):
    """A reply whose header claims so many examples; the library itself would not pack it."""

    def change(data: bytes, address) -> bytes:
        content, start = header.read_header(memoryview(data))
        text = zlib.compress(header.write_header({**content, "num_examples": num_examples}))
        prefix = data[:4] + len(text).to_bytes(4, "little") + xxhash.xxh3_64_digest(text)[::-1]
        prefix += data[16 : header.PREFIX]
        return prefix + text + bytes(-(header.PREFIX + len(text)) % 8) + data[start:]

    return rebuilt(change)


def repacked(change_payload=lambda p: p, round_=None, version=1):
    """A reply packed anew, as a hostile or broken site could pack it."""

    def change(data: bytes, address: MessageAddress) -> bytes:
        exchange = MessageExchange(FedAvg(), "fedavg", SPEC)
        message = exchange.receive(data, 0, address)
        payload = change_payload(message.payload)
        return pack_message(
            _layout_of(payload), EnvelopeStamp("fedavg", version, round_ or 0, "up", address), payload, 3
        )

    return rebuilt(change)


def _layout_of(payload):
    down = MessageLayout(FedAvg().layout(SPEC).fields)
    ups = [WireField(n, "up", DenseCodec(v.dtype), tuple(v.shape)) for n, v in payload.fields.items()]
    return MessageLayout(tuple(f for f in down.fields if f.direction == "down") + tuple(ups))


def replace(name="h.1.lora_A", value=None, drop=False):
    def change(payload):
        fields = {n: v.clone() for n, v in payload.fields.items()}
        if drop:
            del fields[name]
        else:
            fields[name] = value
        return Payload(fields)

    return change


NAN = torch.full((2, 7), float("nan"))
BAD = {
    "nan": (repacked(replace(value=NAN)), r"h.1.lora_A: expected finite values, found nan at entry 0 \(14 in total\)"),
    "inf": (repacked(replace(value=-NAN.nan_to_num(math.inf))), "expected finite values, found -inf"),
    "shape": (repacked(replace(value=torch.zeros(7, 2))), r"h.1.lora_A: expected shape \(2, 7\), found \(7, 2\)"),
    "dtype": (
        repacked(replace(value=torch.zeros(2, 7, dtype=torch.float16))),
        "expected 'dense float32', found 'dense float16'",
    ),
    "name": (repacked(replace(name="patients", value=torch.zeros(2))), "patients: there is no such field"),
    "missing": (repacked(replace(drop=True)), "h.1.lora_A: this field is missing"),
    "zero examples": (claiming(0), "num_examples: expected a whole number from 1 to 100000000, found 0"),
    "negative examples": (claiming(-1), "found -1"),
    "nan examples": (claiming(float("nan")), "found nan"),
    "huge examples": (claiming(1e12), "found 1000000000000.0"),
    "another round": (repacked(round_=7), "round: expected 0, found 7"),
    "another version": (repacked(version=2), "version: expected 1, found 2"),
    "truncated": (rebuilt(lambda d, _: d[:-40]), "message: expected .* bytes as its header declares, found"),
    "twice the size": (rebuilt(lambda d, _: d * 2), "message: expected .* bytes as its header declares, found"),
    "ten times the size": (rebuilt(lambda d, _: d * 10), "reply: its .* bytes exceed the .* that the run's layout"),
    "flipped bit": (rebuilt(flip), "expected checksum .* the field was damaged"),
    "no record": (
        lambda m, r: Message(RecordDict({"x": ArrayRecord()}), reply_to=m),
        "reply: it needs the record fedveil, optionally log and signature, found",
    ),
    "foreign array": (
        lambda m, r: Message(RecordDict({"fedveil": in_slices(b"x", "numpy.ndarray")}), reply_to=m),
        "reply: an array has type .* instead of fedveil.slice/1",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_upload_is_refused_with_its_reason_and_the_round_goes_on(kind, grid, task, tmp_path):
    tamper, reason = BAD[kind]
    folder = RunFolder(tmp_path / "run")
    ours = strategy(FedAvg(), folder=folder)
    result = ours.start(grid(tamper={"east": tamper}), initial(task), num_rounds=1)
    (record,) = ours.history
    assert record.accepted == ["north", "south", "west"]
    assert list(record.failed) == ["east"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(record.failed["east"])
    without = strategy(FedAvg())
    alone = without.start(grid(tamper={"east": lambda m, r: None}), initial(task), num_rounds=1)
    assert state_digest(result.arrays.to_torch_state_dict()) == state_digest(alone.arrays.to_torch_state_dict())
    (line,) = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["failed"] == record.failed
    assert list(line["unlisted"]) == ["east"]
    ledger = disclosure_ledger.read_messages(tmp_path / "run" / "disclosure.jsonl")
    listed = sum(message["bytes"] for message in ledger if message["direction"] == "up")
    assert listed + line["unlisted"]["east"][0] == line["upload_bytes"]


@pytest.mark.long
def test_a_silent_site_ends_the_round_at_the_deadline(grid, task):
    ours = strategy(FedAvg())
    ours.start(grid(tamper={"south": lambda m, r: None}), initial(task), num_rounds=1)
    assert ours.history[0].failed == {"south": "no reply within 1 s"}
    assert 1.0 <= ours.history[0].seconds < 3.0


@pytest.mark.long
def test_below_the_quorum_the_round_is_repeated_and_the_run_then_ends_with_the_reasons(grid, task, tmp_path):
    broken = dict.fromkeys(("east", "south", "west"), rebuilt(lambda d, _: d[:-40]))
    folder = RunFolder(tmp_path / "run")
    ours = strategy(FedAvg(), cohort={"max_retries": 2}, folder=folder)
    with pytest.raises(
        QuorumError,
        match=r"round 1: at least 2 uploads must be accepted, but the last of 3 attempts had only 1 \(east: refused",
    ):
        ours.start(grid(tamper=broken), initial(task), num_rounds=1)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["attempt"] for x in lines] == [0, 1, 2]


@pytest.mark.long
def test_a_repeated_round_can_succeed(grid, task):
    calls = []

    def twice(message, reply):
        calls.append(1)
        return None if len(calls) <= 3 else reply

    ours = strategy(FedAvg(), cohort={"min_sites": 4})
    ours.start(grid(tamper=dict.fromkeys(("east", "south", "west"), twice)), initial(task), num_rounds=1)
    assert [len(r.accepted) for r in ours.history] == [1, 4]


def test_too_few_sites_is_an_error_and_not_a_silent_wait(grid, task):
    ours = strategy(FedAvg(), cohort={"sites": 5, "wait_seconds": 0.3})
    with pytest.raises(QuorumError, match="5 sites must connect within 0.3 s, but only 4 did"):
        ours.start(grid(), initial(task), num_rounds=1)


def test_the_text_of_a_client_s_exception_stays_at_the_site(grid, task, monkeypatch, caplog):
    def explode(self, rows, rng, watch=None, round_=0):
        raise ValueError("patient 4711 has ...")

    ours = strategy(FedAvg(), cohort={"max_retries": 0})
    monkeypatch.setattr(type(task), "trainer", explode)
    with pytest.raises(QuorumError) as error:
        ours.start(grid(), initial(task), num_rounds=1)
    assert "ValueError at the site" in ours.history[0].failed["east"]
    assert "4711" not in str(error.value) + str(ours.history)


def test_a_reason_from_another_node_is_shown_as_text_and_says_what_was_cut(grid, task):
    forged = "gone\x1b[2J\n\u202e" + "x" * 5000
    ours = strategy(FedAvg())
    ours.start(grid(tamper={"east": lambda m, r: Message(Error(2, forged), reply_to=m)}), initial(task), num_rounds=1)
    reason = ours.history[0].failed["east"]
    assert reason.startswith("gone\\x1b[2J\\n\\u202exxx")
    assert reason.endswith("x... (5019 characters)")


@pytest.mark.parametrize(
    "code,words",
    [
        (
            8,
            r"its client process \(flwr-clientapp\) ended without a message: killed, perhaps .*; see .* \(code 8\)",
        ),
        (5, r"its SuperNode has not been heard for a minute: .* \(code 5\)"),
        (4, r"its reply was lost, or arrived too late \(code 4\)"),
        (3, r"its message was lost before it had fully arrived: .* \(code 3\)"),
    ],
)
def test_what_flower_says_of_a_lost_reply_is_put_in_words(code, words, grid, task):
    ours = strategy(FedAvg())
    lost = grid(tamper={"east": lambda m, r: Message(Error(code, "ClientApp stopped responding."), reply_to=m)})
    ours.start(lost, initial(task), num_rounds=1)
    assert re.fullmatch(words, ours.history[0].failed["east"])


def test_a_run_that_ends_for_sites_out_of_memory_says_so_and_what_to_lower(grid, task, tmp_path, monkeypatch):
    ended = "WorkerError: the site's worker ended: probably out of memory"
    ours = strategy(FedAvg(), cohort={"max_retries": 0, "min_sites": 3})
    g = grid(tamper={site: lambda m, r: Message(Error(2, ended), reply_to=m) for site in ("east", "north", "west")})
    with pytest.raises(QuorumError) as error:
        ours.start(g, initial(task), num_rounds=1)
    reason = completion.failure_reason(error.value, tmp_path)
    assert f"east, north, west: {ended} (code 2))" in reason
    assert reason.endswith("give the site more memory, or lower train.batch-size, or set train.quantized-base or "
                         'train.optimizer = "adamw-8bit"')  # fmt: skip


def test_a_site_that_fails_is_a_newcomer_again(grid, task):
    ours = strategy(FedAvg())

    def fails_once(message, reply):
        return Message(Error(2, "boom"), reply_to=message) if message.metadata.group_id.startswith("1/") else reply

    g = grid(tamper={"east": fails_once})
    ours.start(g, initial(task), num_rounds=3)
    new = [
        (m.metadata.group_id.partition("/")[0], m.content.config_records["order"]["site"])
        for m in g.pushed
        if m.content.config_records["order"]["is-new"]
    ]
    assert [n for n in new if n[0] == "0"] == [("0", s) for s in sorted(SITES)]
    assert [n for n in new if n[0] != "0"] == [("2", "east")]
    assert ours.history[1].failed == {"east": "boom (code 2)"}


def test_equal_broadcasts_share_one_object(grid, task):
    g = grid()
    strategy(FedAvg()).start(g, initial(task), num_rounds=1)
    assert len({id(m.content.array_records["fedveil"]["000000"].data) for m in g.pushed}) == 1


@pytest.mark.long
def test_run_folder_holds_metrics_ledger_checkpoint_and_final_weights(grid, task, tmp_path):
    folder = RunFolder(tmp_path / "run")
    ours = strategy(FedRand(), folder=folder, tap=True, scores=lambda s, r: {"server": {"loss": float(r)}})
    result = ours.start(grid(), initial(task), num_rounds=3)
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(m["round"], m["scores"]["server"]["loss"]) for m in metrics] == [(-1, -1.0), (0, 0.0), (1, 1.0), (2, 2.0)]
    ledger = disclosure_ledger.read_messages(tmp_path / "run" / "disclosure.jsonl")
    assert len(ledger) == 3 * 4 * 2
    for way, key in (("up", "upload_bytes"), ("down", "download_bytes")):
        assert sum(x["bytes"] for x in ledger if x["direction"] == way) == sum(m.get(key, 0) for m in metrics)
    for line in ledger:
        names = {name for name, *_ in line["fields"]}
        expected = {n for n in SHAPES if line["direction"] == "down" or n.endswith(line["variant"])}
        assert names == expected
        assert line["payload_bytes"] == sum(4 * torch.Size(SHAPES[n]).numel() for n in names)
    tap = MessageCapture(tmp_path / "run" / "tap")
    assert sum(len(tap.read(m)) for m in tap.messages()) == sum(x["bytes"] for x in ledger)

    final = load_state(tmp_path / "run" / "final" / "server.safetensors")
    assert state_digest(final.tensors) == state_digest(result.arrays.to_torch_state_dict()) == metrics[-1]["weights"]


def test_a_tap_is_sealed_where_the_servers_environment_names_a_key_file(grid, task, tmp_path, monkeypatch):
    seal = make_key(tmp_path / "key")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "key"))
    strategy(FedRand(), folder=RunFolder(tmp_path / "run"), tap=True).start(grid(), initial(task), num_rounds=1)
    tap = MessageCapture(tmp_path / "run" / "tap", seal)
    files = [tap.folder / message.file for message in tap.messages()]
    assert len(files) == 8
    assert all(is_sealed(file) for file in files)
    ledger = disclosure_ledger.read_messages(tmp_path / "run" / "disclosure.jsonl")
    assert sum(len(tap.read(m)) for m in tap.messages()) == sum(x["bytes"] for x in ledger)


def test_a_run_never_meets_the_private_state_of_another_one_of_its_name(grid, task):
    ends = [strategy(FedRand(), cohort={"fraction": 0.5}).start(grid(), initial(task), num_rounds=4) for _ in range(2)]
    assert state_digest(ends[0].arrays.to_torch_state_dict()) == state_digest(ends[1].arrays.to_torch_state_dict())


def test_a_run_folder_is_not_overwritten(tmp_path):
    RunFolder(tmp_path / "run").status("completed", 4, 5)
    with pytest.raises(StateError, match="it already contains a run"):
        RunFolder(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(StateError, match="it is not empty"):
        RunFolder(tmp_path / "model")
    with pytest.raises(StateError, match="there is no run in"):
        RunFolder(tmp_path / "other", resume=True)


@pytest.mark.long
def test_a_hung_site_does_not_fail_punctual_ones_and_is_said_to_be_late(grid, task):
    """In a deterministic run uploads are fetched in the order of the sites' names, and the first site hangs."""
    g = grid(tamper={"east": lambda message, reply: None})
    ours = strategy(FedAvg(), cohort={"min_sites": 3})
    ours.start(g, initial(task), num_rounds=1)
    assert ours.history[0].accepted == ["north", "south", "west"]
    assert ours.history[0].failed == {"east": "no reply within 1 s"}
    orders = [message.content.config_records["order"] for message in g.pushed]
    assert {order["seconds"] for order in orders} == {1.0}
    assert all(message.metadata.ttl > 30 for message in g.pushed)  # else Flower ends it first, in its own words


def test_nodes_of_the_simulation_engine_are_called_by_their_partition(grid, task):
    class Simulated(LocalGrid):
        def get_nodes(self):
            ids = [17, 3, 99, 4]  # drawn anew at every start
            at = ["2026-01-01T00:00:05+00:00", *(f"2026-01-01T00:00:05.00000{i}+00:00" for i in (1, 2, 3))]
            return [
                NodeInfo(node_id=node, registered_at=when, heartbeat_interval=1e300)
                for node, when in zip(ids, at, strict=True)
            ]

    node_ids = connected_sites.connected_sites(Simulated(app, SITES, Path("unused")))
    assert node_ids == {"partition-0": 17, "partition-1": 3, "partition-2": 99, "partition-3": 4}


def test_an_evaluate_config_is_refused_and_not_ignored(grid, task):
    with pytest.raises(ConfigError, match="evaluate_config: there is no evaluate exchange"):
        strategy().start(grid(), initial(task), evaluate_config=ConfigRecord({"x": 1}))
