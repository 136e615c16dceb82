"""A site that answers with anything at all loses its own upload, and nothing else: the run goes on with the others."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedveil import rng
from fedveil.client_app.app import app
from fedveil.config import CohortConfig
from fedveil.errors import QuorumError
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.strategies.fedavg import FedAvg
from fedveil.wire import chunking
from tests.server_app.grid import LocalGrid, use_toy_task
from tools.forge import header_of, with_header, with_text

SITES = ["north", "east", "south"]


@pytest.fixture
def attacked(tmp_path, monkeypatch):
    """One round, in which `tamper` makes the replies of `hostile` sites. Returns every attempt's record."""
    task = use_toy_task(monkeypatch)

    def run(tamper, hostile=("east",), sites=SITES, repeats=2) -> list[RoundRecord]:
        config = {"run.deterministic": True, "run.seed": 9}
        grid = LocalGrid(app, sites, tmp_path / "state", config, tamper=dict.fromkeys(hostile, tamper))
        cohort = CohortConfig(min_sites=2, deadline_seconds=1.0, wait_seconds=1.0, max_retries=repeats)
        settings = RunSettings(cohort, seed=9, deterministic=True)
        strategy = MethodStrategy(FedAvg(), settings, folder=RunFolder(tmp_path / "run"))
        with contextlib.suppress(QuorumError):
            strategy.start(grid, ArrayRecord(dict(task.initial(rng.initial_stream(9, "weights")))), num_rounds=1)
        return strategy.history

    return run


def sent(message: Message, data: bytes, **records) -> Message:
    """A reply of these bytes."""
    parts = enumerate(chunking.slice_message([data]))
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in parts}
    return Message(RecordDict({"fedveil": ArrayRecord(arrays), **records}), reply_to=message)


def bytes_of(reply: Message) -> bytes:
    """The upload in a reply."""
    return b"".join(array.data for _, array in sorted(reply.content.array_records["fedveil"].items()))


def rebuilt(change):
    """A reply whose bytes are changed."""
    return lambda message, reply: sent(message, change(bytes_of(reply)))


def resized(size: int):
    """The size of the first field is another one."""

    def change(data: bytes) -> bytes:
        fields = header_of(data)["fields"]
        fields[0][3] = size
        return with_header(data, fields=fields)

    return change


REPLIES = {
    "a header of 5": (lambda d: with_text(d, b"5"), "header: expected an object"),
    "a header of null": (lambda d: with_text(d, b"null"), "header: expected an object"),
    "a report of 10**400": (lambda d: with_header(d, report={"steps": 10**400}), "a number is above"),
    "a report of 10**308": (lambda d: with_header(d, report={"loss_trained": 10**308}), "a number is above"),
    "a report of 1e308": (lambda d: with_header(d, report={"loss_trained": 1e308}), "report loss_trained: expected"),
    "a size of 4,300 digits": (resized(10**4299), "a number is above"),
    "a size of 2**53 + 1": (resized(2**53 + 1), "a number is above"),
    "10**400 examples": (lambda d: with_header(d, num_examples=10**400), "a number is above"),
    "a round that is true": (lambda d: with_header(d, round=False), "header.round: expected int, found False"),
    "a variant that is a list": (lambda d: with_header(d, variant=[[]]), "header.variant: expected str"),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_costs_its_sender_the_upload_and_the_others_nothing(kind, attacked):
    change, reason = REPLIES[kind]
    (record,) = attacked(rebuilt(change))
    assert record.accepted == ["north", "south"]
    assert re.match(rf"refused: .*{re.escape(reason)}", record.failed["east"])


def test_whatever_judging_a_reply_raises_is_a_refusal_whose_text_stays_in_the_log(attacked, monkeypatch, caplog):
    calls = []

    def careless(self, payload, spec):
        calls.append(1)
        if len(calls) == 1:  # replies are judged in the order of names: this is east's
            raise ZeroDivisionError("what nobody thought of")

    monkeypatch.setattr(FedAvg, "check", careless)
    (record,) = attacked(lambda message, reply: reply)
    assert record.accepted == ["north", "south"]
    assert record.failed == {"east": "refused: ZeroDivisionError"}
    assert "what nobody thought of" not in json.dumps(record.failed)
    assert "what nobody thought of" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("head", [b"\0" * 80, "9" * 5000 + ":" + "0" * 64, 7, [1.5], True])
def test_an_anchor_of_any_kind_does_no_harm(head, attacked):
    tamper = lambda message, reply: sent(message, bytes_of(reply), log=ConfigRecord({"head": head}))  # noqa: E731
    (record,) = attacked(tamper)
    assert record.accepted == ["east", "north", "south"]
