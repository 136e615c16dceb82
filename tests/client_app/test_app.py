"""The ClientApp: why a turn failed stays at the site."""

from __future__ import annotations

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedveil.client_app import app as client
from fedveil.client_app import failure_reason


@pytest.mark.parametrize("handler", [client.train_app, client.secure_])
def test_a_failure_is_noted_for_the_sites_guard_and_the_server_gets_its_kind(monkeypatch, handler):
    def fails(message, context):
        raise KeyError("row 4711")

    monkeypatch.setattr(client, "_records", fails)
    monkeypatch.setenv(failure_reason.VARIABLE, "")
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    reply = handler(Message(RecordDict(), 7, MessageType.TRAIN), Context(1, 7, {}, RecordDict(), {}))
    assert reply.error.reason == "KeyError at the site; see the site's log"
    assert failure_reason.take_failure() == "KeyError: 'row 4711'"
    assert failure_reason.take_failure() == ""
