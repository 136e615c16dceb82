"""A registered site that sends what Flower's fleet port takes from it, to a ServerApp without a guard before that port.

In each test the other sites' uploads count, and the round ends with the weights of a round in which this site says
nothing. All of it runs over Flower's own grid, state and handlers.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree

from fedveil import rng
from fedveil.client_app.app import app
from fedveil.config import CohortConfig, SecureConfig, parse
from fedveil.records import audit_log
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire import chunking
from tests.fedveil.guard.conftest import clean_database  # noqa: F401
from tests.fedveil.guard.fleet.replies import (
    Reply,
    exchange_object,
    json_body,
    make_reply,
    metadata,
    object_bytes,
    object_id,
    split,
)
from tests.server_app.grid import LocalGrid, use_toy_task
from tests.server_app.superlink import Act, FleetSite, Instruction, RuntimePort

SITES = ["east", "north", "west"]
CONFIG = {"run.deterministic": True, "run.seed": 9}
WITHOUT_WEST: list[RoundRecord] = []


class Federation:
    """Rounds of FedAvg over a SuperLink in this process; `west` is the hostile site."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, database: Path) -> None:
        self.task, self.folder = use_toy_task(monkeypatch), folder
        self.kind, self.database = kind, database
        self.port = self._port()

    def _port(self, **config: object) -> RuntimePort:
        folder = self.folder / f"port-{len(config)}"
        folder.mkdir()
        return RuntimePort(app, SITES, folder, self.database, self.kind, CONFIG | config)

    def _config(self, secure: SecureConfig) -> dict[str, object]:
        return {f"secure.{key}": value for key, value in secure.model_dump(by_alias=True).items()}

    def run(self, act: Act | None = None, rounds: int = 1, secure: SecureConfig | None = None) -> list[RoundRecord]:
        if secure:
            self.port = self._port(**self._config(secure))
        if act:
            self.port.hostile["west"] = act
        return self._rounds(self.port.grid, "run", rounds, secure)

    def run_without_west(self) -> RoundRecord:
        """A round over a grid without a network, where west says nothing. It ends the same in each test."""
        if not WITHOUT_WEST:
            grid = LocalGrid(app, SITES, self.folder / "silent", CONFIG, tamper={"west": lambda *_: None})
            WITHOUT_WEST.extend(self._rounds(grid, "silent-run", 1, None))
        return WITHOUT_WEST[0]

    def _rounds(self, grid, name: str, rounds: int, secure: SecureConfig | None) -> list[RoundRecord]:
        cohort = CohortConfig(min_sites=2, deadline_seconds=2.0, wait_seconds=2.0, max_retries=0)
        config = parse(CONFIG | self._config(secure or SecureConfig())).flat()
        settings = RunSettings(cohort, seed=9, deterministic=True, secure=secure or SecureConfig(), config=config)
        with RunFolder(self.folder / name) as folder:
            strategy = MethodStrategy(FedAvg(), settings, folder=folder, spec=self.task.spec)
            weights = self.task.initial(rng.initial_stream(9, "weights"))
            strategy.start(grid, ArrayRecord(dict(weights)), num_rounds=rounds)
        return strategy.history

    def events(self, event: str) -> list[dict]:
        return [line for line in audit_log.read_log(self.folder / audit_log.NAME) if line["event"] == event]


@pytest.fixture
def federation(request, monkeypatch, tmp_path, clean_database) -> Federation:  # noqa: F811
    return Federation(monkeypatch, tmp_path, getattr(request, "param", "dictionaries"), clean_database)


over_each_state = pytest.mark.parametrize("federation", ["dictionaries", "SQL"], indirect=True)


def own_reply(site: FleetSite, instruction: Instruction, **more: object) -> Reply:
    """The reply that an honest site would send."""
    return make_reply(site.train(instruction).content, metadata(instruction.row, site.node_id), **more)


def changed(reply: Reply, type_: str, content: bytes) -> Reply:
    """The reply with another object in the place of the first one of a type."""
    return exchange_object(reply, reply.of_type(type_), content)


def with_body(reply: Reply, type_: str, body: bytes) -> Reply:
    children = split(reply.objects[reply.of_type(type_)])[1]
    return changed(reply, type_, object_bytes(type_, children, body))


def with_root(reply: Reply, **inner: object) -> Reply:
    """The reply whose Message object has other metadata than those announced."""
    message = ProtoMessage.FromString(split(reply.objects[reply.root])[2])
    for name, value in inner.items():
        setattr(message.metadata, name, value)
    return with_body(reply, "Message", message.SerializeToString(deterministic=True))


def unsolicited(reply: Reply, **announced: object) -> Reply:
    """The reply announced as a message to the ServerApp that answers nothing."""
    about = reply.request.messages_list[0].metadata
    about.reply_to_message_id, about.src_node_id, about.dst_node_id = "", SUPERLINK_NODE_ID, SUPERLINK_NODE_ID
    for name, value in announced.items():
        setattr(about, name, value)
    return reply


def require_as_without_west(federation: Federation, act: Act) -> RoundRecord:
    """Run a round with the hostile site, and compare it with one in which it says nothing."""
    (record,) = federation.run(act)
    expected = federation.run_without_west()
    assert record.accepted == expected.accepted == ["east", "north"]
    assert record.weights == expected.weights
    return record


@pytest.mark.long
@over_each_state
def test_honest_sites_are_read_as_over_a_grid_without_a_network(federation):
    """Weights, figures, bytes and the order of the audit log."""
    over_port = federation.run(rounds=2)
    grid = LocalGrid(app, SITES, federation.folder / "local", CONFIG)
    over_grid = federation._rounds(grid, "local-run", 2, None)
    for one, other in zip(over_port, over_grid, strict=True):
        assert (one.accepted, one.weights, one.reports) == (other.accepted, other.weights, other.reports)
        assert (one.upload_bytes, one.download_bytes, one.failed) == (other.upload_bytes, other.download_bytes, {})
    lines = [
        (line["event"], line.get("site"), line.get("bytes"))
        for line in audit_log.read_log(federation.folder / audit_log.NAME)
        if line["event"] in ("sent", "accepted", "failed", "dropped")
    ]
    assert len(lines) == 24
    assert lines[:12] == lines[12:]
    assert not len(federation.port.state.object_store)  # each reply was taken from the SuperLink's disk


@pytest.mark.long
@over_each_state
def test_1_a_message_that_nobody_asked_for_speaks_for_no_other_site(federation):
    """West trains in east's name, and sends it before east has answered."""

    def speak_for_east(site: FleetSite, instruction: Instruction) -> None:
        order = instruction.message.content.config_records["order"]
        order["site"] = "east"
        site.context.node_config |= {"site": "east", "state-dir": str(federation.folder / "forged")}
        forged = own_reply(site, instruction)
        inner = {"src_node_id": site.superlink.sites["east"].node_id}
        site.send(unsolicited(with_root(forged, **inner)))

    record = require_as_without_west(federation, speak_for_east)
    assert record.failed == {"west": "no reply within 2 s"}
    (line,) = federation.events("dropped")
    assert (line["node"], line["answers"], line["round"]) == (str(SUPERLINK_NODE_ID), "", 0)


@pytest.mark.long
def test_2_any_number_of_messages_that_nobody_asked_for_ends_no_run(federation):
    def flood(site: FleetSite, instruction: Instruction) -> None:
        for number in range(30):
            content = RecordDict({"x": ConfigRecord({"n": number})})
            site.send(unsolicited(make_reply(content, metadata(instruction.row, site.node_id))))

    record = require_as_without_west(federation, flood)
    assert record.failed == {"west": "no reply within 2 s"}
    lines = federation.events("dropped")
    assert [line["messages"] for line in lines] == [1] * 20 + [10]


@pytest.mark.long
@over_each_state
def test_2_an_unasked_message_that_cannot_be_inflated_ends_no_run(federation):
    def garble(site: FleetSite, instruction: Instruction) -> None:
        reply = make_reply(RecordDict({"x": ConfigRecord({"n": 1})}), metadata(instruction.row, site.node_id))
        site.send(unsolicited(with_body(reply, "Message", b"\xff" * 5)))

    assert require_as_without_west(federation, garble).failed == {"west": "no reply within 2 s"}


@pytest.mark.long
def test_2_a_reply_that_is_sent_twice_and_two_different_replies_count_once(federation):
    def repeat(site: FleetSite, instruction: Instruction) -> None:
        reply = own_reply(site, instruction)
        for _ in range(2):
            site.send(reply)
        site.send(make_reply(Error(2, "another"), metadata(instruction.row, site.node_id)))

    (record,) = federation.run(repeat)
    (expected,) = federation._rounds(LocalGrid(app, SITES, federation.folder / "all", CONFIG), "all-run", 1, None)
    assert (record.accepted, record.weights) == (SITES, expected.weights)


OTHER_ROOTS: dict[str, Callable[[Reply], Reply]] = {
    "a ConfigRecord": lambda reply: _only(ConfigRecord({"a": 1}).deflate(), reply),
    "a chunk": lambda reply: _only(object_bytes("ArrayChunk", [], b"x"), reply),
    "no protobuf": lambda reply: with_body(reply, "Message", b"\xff" * 5),
    "an empty message": lambda reply: with_body(reply, "Message", b""),
    "two messages in one": lambda reply: with_body(reply, "Message", 2 * split(reply.objects[reply.root])[2]),
    "content inside": lambda reply: with_body(
        reply, "Message", split(reply.objects[reply.root])[2] + ProtoMessage(content={}).SerializeToString()
    ),
    "an Array for the RecordDict": lambda reply: changed(reply, "RecordDict", reply.objects[reply.of_type("Array")]),
}


def _only(content: bytes, reply: Reply) -> Reply:
    """The announcement of a reply whose root is this object, without children."""
    reply.request.message_object_trees[0].CopyFrom(ObjectTree(object_id=object_id(content)))
    reply.request.messages_list[0].metadata.message_id = object_id(content)
    return Reply(reply.request, {object_id(content): content})


@pytest.mark.parametrize("kind", OTHER_ROOTS)
def test_11_a_solicited_reply_whose_root_is_no_message_costs_only_its_sender(federation, kind):
    act = lambda site, instruction: site.send(OTHER_ROOTS[kind](own_reply(site, instruction)))  # noqa: E731
    record = require_as_without_west(federation, act)
    assert record.failed["west"].startswith("refused: reply: ")
    (line,) = federation.events("failed")[:1]
    assert (line["site"], line["reason"]) == ("west", record.failed["west"])


def bomb(times: int) -> Callable[[FleetSite, Instruction], None]:
    """One slice of 100 kB that its Array names so many times."""

    def act(site: FleetSite, instruction: Instruction) -> None:
        part = b"x" * 100_000
        content = RecordDict({"fedveil": ArrayRecord({"000000": Array("uint8", (len(part),), chunking.STYPE, part)})})
        reply = make_reply(content, metadata(instruction.row, site.node_id))
        body = json.loads(split(reply.objects[reply.of_type("Array")])[2])
        body |= {"shape": [len(part) * times], "arraychunk_ids": [0] * times}
        site.send(with_body(reply, "Array", json_body(body)))

    return act


def test_12_an_array_that_names_a_chunk_a_thousand_times_takes_no_memory(federation):
    tracemalloc.start()
    try:
        record = require_as_without_west(federation, bomb(1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert record.failed == {"west": "refused: reply: an object of type Array has the wrong size"}
    assert peak < 30e6


@pytest.mark.long
def test_12_a_record_that_names_an_array_a_thousand_times_takes_no_memory(federation):
    def act(site: FleetSite, instruction: Instruction) -> None:
        part = b"x" * chunking.SLICE_BYTES
        array = Array("uint8", (len(part),), chunking.STYPE, part)
        content = RecordDict({"fedveil": ArrayRecord({chunking.slice_key(i): array for i in range(1000)})})
        site.send(make_reply(content, metadata(instruction.row, site.node_id)))

    tracemalloc.start()
    try:
        record = require_as_without_west(federation, act)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert record.failed["west"].startswith("refused: reply: its ")
    assert peak < 30e6


@pytest.mark.parametrize(
    "field,value",
    [
        ("reply_to_message_id", "ab" * 32), ("reply_to_message_id", "EAST"), ("src_node_id", "EAST"),
        ("src_node_id", SUPERLINK_NODE_ID), ("run_id", 5), ("message_type", "query"), ("group_id", "9"),
        ("dst_node_id", 5),
    ],
)  # fmt: skip
def test_15_other_metadata_inside_the_object_than_announced_are_refused(federation, field, value):
    def act(site: FleetSite, instruction: Instruction) -> None:
        east = {"src_node_id": site.superlink.sites["east"].node_id, "reply_to_message_id": "cd" * 32}
        site.send(with_root(own_reply(site, instruction), **{field: east[field] if value == "EAST" else value}))

    record = require_as_without_west(federation, act)
    expected = f"refused: reply: the {field} in its object differs from the one that the site announced"
    assert record.failed == {"west": expected}


@pytest.mark.long
@over_each_state
def test_15_an_answer_of_secure_aggregation_with_other_metadata_ends_no_run(federation):
    """Answers were looked up by what stands inside the object: a site could end the run, or answer for another."""
    seen: list[str] = []

    def act(site: FleetSite, instruction: Instruction) -> None:
        seen.append(instruction.row.message_type)
        reply = own_reply(site, instruction)
        site.send(with_root(reply, reply_to_message_id="ab" * 32) if len(seen) == 1 else reply)

    (record,) = federation.run(act, secure=SecureConfig(enabled=True, max_weight=10, min_sites=2, max_colluders=0))
    assert record.accepted == ["east", "north"]
    assert record.failed["west"].startswith("reply: the reply_to_message_id in its object differs")


@pytest.mark.long
def test_an_announced_reply_whose_objects_do_not_come_is_waited_for_until_the_deadline(federation):
    def act(site: FleetSite, instruction: Instruction) -> None:
        reply = own_reply(site, instruction)
        site.send(reply, without=[reply.of_type("ArrayChunk")])

    assert require_as_without_west(federation, act).failed == {"west": "no reply within 2 s"}


def test_an_error_is_the_announced_one(federation):
    def act(site: FleetSite, instruction: Instruction) -> None:
        reply = make_reply(Error(2, "PolicyError: mine"), metadata(instruction.row, site.node_id))
        inner = ProtoMessage.FromString(split(reply.objects[reply.root])[2])
        inner.error.reason = "another"
        site.send(with_body(reply, "Message", inner.SerializeToString()))

    record = require_as_without_west(federation, act)
    assert record.failed["west"].startswith("refused: reply: the error in its object differs")


@pytest.mark.long
@over_each_state
def test_an_error_is_said_in_the_words_of_its_site(federation):
    act = lambda site, instruction: site.send(  # noqa: E731
        make_reply(Error(2, "PolicyError: mine"), metadata(instruction.row, site.node_id))
    )
    assert require_as_without_west(federation, act).failed == {"west": "PolicyError: mine (code 2)"}
