"""Small versions of the cases in core/scale, whose Grid makes replies one at a time."""

from __future__ import annotations

import json

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedveil import rng, strategies
from fedveil.contract.message_address import MessageAddress
from fedveil.contract.method import RoundContext
from fedveil.federation.exchange import MessageExchange
from fedveil.server_app.round_attempt import DeduplicatedSlices
from fedveil_bench.core import many_sites
from fedveil_bench.core.many_sites import ManySitesCase, StreamedGrid, measure_case

METHODS = [("fedavg", ""), ("fedrand", ""), ("fedrand", "downlink = 'selected'"), ("fedper", "")]


@pytest.mark.long
@pytest.mark.parametrize("way", ["in-process", "strategy"])
@pytest.mark.parametrize("method,fields", METHODS)
def test_every_site_takes_part_in_every_round(way, method, fields):
    found = measure_case(ManySitesCase(way, method, fields, 6, 4, 0))
    assert len(found.seconds) == 4
    assert all(0 < sent < whole for sent, whole in zip(found.sending_cpu_seconds, found.cpu_seconds, strict=False))
    assert len(found.sending_cpu_seconds) == (4 if way == "strategy" else 0)
    upload = found.upload_bytes / 6
    assert (4 if method == "fedavg" else 2) * many_sites._SMALL * 8 < upload < 20_000


def test_an_upload_has_the_megabytes_that_were_asked_for():
    for method, fields in METHODS:
        found = measure_case(ManySitesCase("strategy", method, fields, 2, 3, 1))
        assert found.upload_bytes / 2 == pytest.approx(1_000_000, rel=0.01)


def test_a_reply_is_made_when_it_is_pulled_and_no_message_is_kept(monkeypatch):
    method, made = strategies.create_method("fedavg", ""), []
    spec = many_sites._spec(8)
    grid = StreamedGrid(method, "fedavg", spec, 5)
    honest = grid._reply
    monkeypatch.setattr(grid, "_reply", lambda ctx, *more: made.append(ctx.client) or honest(ctx, *more))
    exchange = MessageExchange(method, "fedavg", spec)
    server = method.init(spec, many_sites._weights(spec), rng.initial_stream(0, "method init"))
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    messages = []
    for node in grid.get_nodes():
        ctx = RoundContext(0, node.name, True, bytes(32), True, MessageAddress("run", 0, node.name))
        order = ConfigRecord({"round": 0, "is-new": True, "site": node.name, "run": "run", "attempt": 0})
        record: ArrayRecord = DeduplicatedSlices().record(exchange.packed(server, ctx).parts)
        messages.append(Message(RecordDict({"fedveil": record, "order": order}), node.node_id, MessageType.TRAIN))
    numbers = list(grid.push_messages(messages))
    assert made == []
    assert len(grid._down) == 1
    (reply,) = grid.pull_messages(numbers[3:4])
    assert made == ["site-00003"]
    assert len(grid._waiting) == 4
    data = b"".join(array.data for array in reply.content.array_records["fedveil"].values())
    assert exchange.receive(data, 0, MessageAddress("run", 0, "site-00003")).num_examples == 100
    assert grid.spent.cpu > 0


def test_a_case_in_a_process_of_its_own_prints_its_figures(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["many_sites", "in-process", "fedavg", "", "3", "2", "0"])
    many_sites.main()
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {
        "seconds", "cpu_seconds", "sending_cpu_seconds", "grown_mb", "upload_bytes"
    }  # fmt: skip
