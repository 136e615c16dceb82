"""Lines that a site could cause without end: Flower's own, one for each refused call."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from flwr.common.constant import Status
from flwr.supercore import log
from flwr.supercore.error import ApiErrorCode, FlowerError, grpc
from flwr.supercore.logger import LOGGER_NAME

from fedveil.guard import minute_log
from fedveil.guard.fleet import port
from fedveil.guard.fleet.refusal import RefusalReason
from fedveil.guard.minute_log import RefusalLineFilter


class Lines:
    """Flower's log behind the filter, with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.written = 1000.0, list[str]()
        self.filter = RefusalLineFilter(lambda: self.now)
        logger, handler = logging.getLogger(LOGGER_NAME), logging.Handler()
        handler.emit = lambda record: self.written.append(record.getMessage())  # type: ignore[method-assign]
        monkeypatch.setattr(logger, "filters", [self.filter])
        monkeypatch.setattr(logger, "handlers", [handler])

    def refuse(self, call: str, error: Exception) -> None:
        """Answer a call with an error, as Flower's servicer does."""
        context = SimpleNamespace(abort=lambda *_: None, code=lambda: None)
        with pytest.raises(grpc.grpc.RpcError), grpc.rpc_error_translator(context, call):
            raise error


@pytest.fixture
def lines(monkeypatch) -> Lines:
    return Lines(monkeypatch)


def refused(node: int, reason: RefusalReason = RefusalReason.SESSION) -> FlowerError:
    """The fleet port's own refusal."""
    request = SimpleNamespace(node=SimpleNamespace(node_id=node))
    return port._flower_error(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, "push_object", request, reason.value)


def test_ten_thousand_refused_calls_have_one_line_and_a_count(lines):
    for _ in range(10_000):
        lines.refuse("Fleet.PushObject", refused(5))
    assert len(lines.written) == 1
    lines.now += minute_log.SECONDS
    lines.refuse("Fleet.PushObject", refused(5))
    assert len(lines.written) == 2
    assert lines.written[1] == f"{lines.written[0]} (9999 more such lines since the last one)"


def test_a_site_hides_no_line_about_another_site_call_or_reason(lines):
    for call in ("Fleet.PushObject", "Fleet.PushMessages"):
        for node in (5, 6):
            for reason in (RefusalReason.SESSION, RefusalReason.HASH):
                lines.refuse(call, refused(node, reason))
    assert len(lines.written) == len(set(lines.written)) == 8


def test_text_that_a_caller_chose_makes_no_line_of_its_own(lines):
    for number in range(100):
        lines.refuse("Fleet.ActivateNode", FlowerError(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, f"key {number}"))
        lines.refuse("Fleet.ActivateNode", KeyError(number))
    assert len(lines.written) == 2


def test_other_lines_are_all_written(lines):
    for _ in range(100):
        log(logging.INFO, "a run has %s", Status.FINISHED)
    assert len(lines.written) == 100


def test_the_memory_of_kinds_is_bounded(lines, monkeypatch):
    monkeypatch.setattr(minute_log, "_MAX_KEYS", 10)
    for node in range(100):
        lines.now += minute_log.SECONDS / 5
        lines.refuse("Fleet.PushObject", refused(node))
    assert len(lines.filter._written) <= 10


def test_a_call_that_fails_in_the_port_has_one_traceback_a_minute_and_site(lines, monkeypatch):
    monkeypatch.setattr(port.FleetPort, "_record", lambda *_: None)
    at = object.__new__(port.FleetPort)
    for node in (5, 5, 5, 6):
        request = SimpleNamespace(node=SimpleNamespace(node_id=node))
        at._after_failure(None, "push_messages", request, KeyError("x"))
    assert lines.written == [f"fleet port: push_messages of node {node} failed" for node in (5, 6)]
    lines.now += minute_log.SECONDS
    at._after_failure(None, "push_messages", SimpleNamespace(node=SimpleNamespace(node_id=5)), KeyError("x"))
    assert lines.written[2].startswith("fleet port: push_messages of node 5 failed (2 more such lines")
