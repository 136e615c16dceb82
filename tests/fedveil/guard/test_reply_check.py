"""A bundle that makes a reply of its own, to carry out more than the upload that the policy measures."""

from __future__ import annotations

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedveil.client_app import failure_reason
from fedveil.errors import PolicyError
from fedveil.guard import reply_check
from fedveil.records import audit_log
from fedveil.wire import chunking
from tests.fedveil.guard.test_clientapp import Site, app, fab, upload

__all__ = ["app", "fab"]  # fixtures

STOLEN = "the rows of ward 7; "


@pytest.fixture
def site(tmp_path, monkeypatch, fab) -> Site:
    site = Site(tmp_path, monkeypatch, fab, "max-bytes-a-round = 5000")
    site.install()
    return site


@pytest.fixture
def data(lora_spec, lora_weights) -> bytes:
    return upload(lora_spec, lora_weights)


def of(data: bytes, **changes) -> Array:
    about = {"dtype": "uint8", "shape": (len(data),), "stype": chunking.STYPE, "data": data} | changes
    return Array(about["dtype"], about["shape"], about["stype"], about["data"])


def pushed(site: Site, arrays: dict[str, Array], **more) -> Message:
    content = RecordDict({"fedveil": ArrayRecord(arrays), **more})
    site.runtime.push_message(None, Message(content, reply_to=site.message), None)
    return site.sent[-1]


@pytest.mark.parametrize(
    "record,kind",
    [
        (ArrayRecord({"rows": Array("uint8", (10 << 20,), "any", bytes(10 << 20))}), "ArrayRecord"),
        (ConfigRecord({"rows": STOLEN * 500_000}), "ConfigRecord"),
        (ConfigRecord({"rows": [STOLEN.encode()] * 500_000}), "ConfigRecord"),
        (MetricRecord({"rows": [0.5] * 1_250_000}), "MetricRecord"),
    ],
)
def test_ten_megabytes_in_another_record_do_not_leave(site, data, record, kind):
    sent = pushed(site, {chunking.slice_key(0): of(data)}, **{"more\x1b[2J": record})
    assert sent.has_error()
    assert "the record fedveil and no other, but has 2" in sent.error.reason
    line = audit_log.read_log(site.log)[-1]
    assert line["event"] == "withheld"
    assert line["up_bytes"] >= 10_000_000 + len(data)
    assert [entry[:2] for entry in line["records"]] == [["fedveil", "ArrayRecord"], ["more\\x1b[2J", kind]]
    assert STOLEN not in str(line)


def test_a_record_of_arrays_in_the_place_of_the_logs_anchor_is_no_way_out(site, data):
    assert pushed(site, {chunking.slice_key(0): of(data)}, log=ConfigRecord({"head": STOLEN})).has_error()


@pytest.mark.parametrize(
    "changes",
    [{"dtype": STOLEN}, {"stype": STOLEN}, {"shape": (7, 7)}, {"shape": ()}],
    ids=["dtype", "stype", "shape", "no shape"],
)
def test_what_an_array_says_of_itself_carries_nothing(site, data, changes):
    sent = pushed(site, {chunking.slice_key(0): of(data, **changes)})
    assert sent.error.reason.startswith("PolicyError: reply: its slices must be uint8")


@pytest.mark.parametrize("names", [["000001"], ["000000", STOLEN], ["0"], []])
def test_the_names_of_slices_carry_nothing(site, data, names):
    sent = pushed(site, {name: of(data) for name in names})
    assert sent.error.reason.startswith("PolicyError: reply: its slices must be named 0, 1, 2")
    assert STOLEN not in sent.error.reason


def test_slices_have_one_size_and_the_last_one_is_not_empty(site, data, monkeypatch):
    cut = {chunking.slice_key(0): of(data[:100]), chunking.slice_key(1): of(data[100:])}
    assert "uint8 and have 1310720 bytes each, except the last" in pushed(site, cut).error.reason
    with pytest.raises(PolicyError, match="each, except the last"):
        reply_check.upload_slices(RecordDict({"fedveil": ArrayRecord({chunking.slice_key(0): of(b"")})}))
    monkeypatch.setattr(chunking, "SLICE_BYTES", 100)
    parts = list(chunking.slice_message([data], 100))
    arrays = {chunking.slice_key(i): of(part) for i, part in enumerate(parts)}
    assert reply_check.upload_slices(RecordDict({"fedveil": ArrayRecord(arrays)})) == parts


def test_what_leaves_is_the_guards_own_message(site, data):
    made = Message(RecordDict({"fedveil": ArrayRecord({chunking.slice_key(0): of(data)})}), reply_to=site.message)
    made.metadata.__dict__["_group_id"] = STOLEN
    made.metadata.__dict__["_message_type"] = "train." + "stolen"
    site.runtime.push_message(None, made, None)
    sent = site.sent[-1]
    assert (sent.metadata.group_id, sent.metadata.message_type) == (
        site.message.metadata.group_id,
        site.message.metadata.message_type,
    )
    assert set(sent.content) == {"fedveil", "log"}
    assert sent.content["fedveil"][chunking.slice_key(0)].data == data
    assert audit_log.read_log(site.log)[-1]["up_bytes"] == len(data)


def test_the_reason_of_an_error_is_short_and_printable(site):
    secret = f"<class 'ValueError'>:<'\x1b]0;{STOLEN * 1000}\n'>"
    site.runtime.push_message(None, Message(Error(10**6, secret), reply_to=site.message), None)
    error = site.sent[-1].error
    assert error.code == 2
    assert len(error.reason) < 550
    assert error.reason.isprintable()
    assert audit_log.read_log(site.log)[-1]["event"] == "failed"


@pytest.mark.parametrize(
    "reason,event",
    [("PolicyError: examples: too few", "refused"), ("BudgetError: spent", "refused"), ("PolicyErrors", "failed"),
     ("WireError: no", "failed"), ("KeyError at the site", "failed")],
)  # fmt: skip
def test_a_turn_that_met_the_sites_own_bounds_is_a_refusal(site, reason, event):
    site.runtime.push_message(None, Message(Error(2, reason), reply_to=site.message), None)
    assert audit_log.read_log(site.log)[-1]["event"] == event
    assert site.sent[-1].error.reason == reason


def test_why_a_turn_failed_stays_at_the_site(site):
    """In its audit log, once, as text; the reply has what the ClientApp said to the server, and no more."""
    failure_reason.note_failure("KeyError", "\"the column 'diagnosis'\x1b[2J of row 4711" + "x" * 2000)
    for _ in range(2):
        site.runtime.push_message(
            None, Message(Error(2, "KeyError at the site; see the site's log"), reply_to=site.message), None
        )
    first, second = audit_log.read_log(site.log)[-2:]
    assert first["cause"].startswith("KeyError: \"the column 'diagnosis'\\x1b[2J")
    assert len(first["cause"]) < 1100
    assert second["cause"] == ""
    assert [message.error.reason for message in site.sent] == ["KeyError at the site; see the site's log"] * 2
