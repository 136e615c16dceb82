"""Operators without a token, with somebody else's, with too small a role; other ways to the same calls."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from flwr.proto import control_pb2
from flwr.proto.fab_pb2 import Fab
from flwr.superlink.routers.control import router as control_router

from fedveil.console.provisioning import operator_registry as kept
from fedveil.errors import StateError
from fedveil.guard import operator_access
from fedveil.guard.control_log import ControlLog
from fedveil.guard.operator_access import CALLS, ROLES, OperatorAccessChecker
from fedveil.guard.registry_files import MonotonicClock
from fedveil.records import audit_log

NOW = datetime.now(UTC)


class Port:
    """The control port with one operator of each role, and what came through to Flower."""

    def __init__(self, folder) -> None:
        self.registry = folder / "registry"
        self.tokens = {"owner": kept.OperatorRegistry.create(self.registry, 30)}
        for role in ROLES:
            self.tokens[role] = kept.OperatorRegistry(self.registry).add(role, role, 30, renew=False)
        self.control = ControlLog(folder / "control.jsonl")
        self.operators = OperatorAccessChecker(self.registry, self.control)
        self.came: list[tuple[str, bytes]] = []
        self.answer = control_pb2.StartRunResponse(run_id=42).SerializeToString()
        self.status = 200

    def ask(self, path, token=None, body=b"", method="POST", kind="http", headers=()) -> int:
        """The HTTP status; 0 for a web socket that is closed."""
        sent: list[dict] = []
        scope = {"type": kind, "path": path, "method": method, "client": ("127.0.0.1", 5), "headers": list(headers)}
        if token is not None:
            scope["headers"].append((b"authorization", f"Bearer {token}".encode()))
        messages = [
            {"type": "http.request", "body": body[:10], "more_body": True},
            {"type": "http.request", "body": body[10:]},
        ]

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        async def flower(scope, receive, send):
            self.came.append((scope["path"], (await receive())["body"]))
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send({"type": "http.response.body", "body": self.answer})

        asyncio.run(self.operators.before(flower)(scope, receive, send))
        refusal_body = next((m["body"] for m in sent if m.get("body", b"")[:1] == b"{"), b"{}")
        self.said = json.loads(refusal_body).get("detail", "")
        return sent[0].get("status", 0)

    def lines(self):
        return audit_log.read_log(self.control.file) if self.control.file.exists() else []


@pytest.fixture
def port(tmp_path):
    return Port(tmp_path)


def test_each_role_may_its_calls_and_no_other(port):
    for call, roles in CALLS.items():
        for role in ROLES:
            port.came.clear()
            status = port.ask(f"/v1/control/{call}", port.tokens[role])
            assert (status == 200) == (role in roles) == bool(port.came), (call, role, port.said)
    assert {role for role in ROLES if "submit" in role or role == "admin"} == CALLS["start-run"]
    assert CALLS["register-node"] == CALLS["unregister-node"] == {"members", "admin"}


def test_every_call_that_flower_has_and_no_role_names_is_refused(port):
    paths = {route.path for route in control_router.routes}
    named = {f"/v1/control/{call}" for call in CALLS}
    assert named <= paths
    assert len(paths - named) > 20
    for path in sorted(paths - named):
        assert port.ask(path, port.tokens["admin"]) == 403, path
    assert port.came == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run/"),
        ("POST", "//v1/control/start-run"),
        ("POST", "/v1/runtime/../control/start-run"),
        ("POST", "/v1/runtime/"),
        ("POST", "/V1/control/start-run"),
        ("POST", "/v1/control/start-run\n"),
        ("POST", "/health\n"),
        ("GET", "/v1/control/start-run"),
        ("PUT", "/v1/control/start-run"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("POST", "/"),
    ],
)
def test_no_other_spelling_goes_through(method, path, port):
    assert port.ask(path, port.tokens["admin"], method=method) == 403
    assert port.ask(path, method=method) == 403
    assert port.came == []


def test_a_web_socket_is_closed(port):
    assert port.ask("/v1/control/start-run", port.tokens["admin"], kind="websocket") == 0
    assert port.came == []


def test_what_flower_itself_protects_goes_through(port):
    for path in ("/health", "/v1/runtime/acquire-task"):
        assert port.ask(path) == 200
    assert port.ask("lifespan", kind="lifespan") == 200


def test_without_a_token_or_with_a_wrong_one_nothing_is_done_and_each_attempt_is_logged(port):
    good = port.tokens["admin"]
    attempts = [None, "", "x", good[:-1], good + "x", good.swapcase(), "\u00e9", "x" * 5000, f" {good}"]
    for token in attempts:
        assert port.ask("/v1/control/start-run", token) == 403, token
    assert port.ask("/v1/control/start-run", good, headers=[(b"authorization", b"Bearer x")]) == 403
    assert port.ask("/v1/control/start-run", headers=[(b"authorization", f"Basic {good}".encode())]) == 403
    digest = json.loads((port.registry / "operators.json").read_text())["operators"]["admin"]["token"]
    assert port.ask("/v1/control/start-run", digest) == 403  # the file's content is no token
    assert port.came == []
    lines = port.lines()
    assert len(lines) == len(attempts) + 3
    assert {(line["decision"], line["call"], line["operator"]) for line in lines} == {("refused", "start-run", "")}
    assert good not in port.control.file.read_text()


def test_who_is_revoked_or_past_the_last_day_is_refused_by_name(port):
    kept.OperatorRegistry(port.registry).revoke("submit")
    assert port.ask("/v1/control/start-run", port.tokens["submit"]) == 403
    assert "revoked" in port.said
    other = kept.OperatorRegistry(port.registry).add("submit", "submit", 30, renew=True)
    assert port.ask("/v1/control/start-run", port.tokens["submit"]) == 403
    assert "token is unknown" in port.said
    assert port.ask("/v1/control/start-run", other) == 200
    port.control.clock = MonotonicClock(NOW + timedelta(days=31))
    assert port.ask("/v1/control/start-run", other) == 403
    assert "expired on" in port.said
    assert [line["operator"] for line in port.lines()] == ["submit", "", "submit", "submit", "submit"]


def test_the_log_says_who_started_which_run_of_which_app_and_who_stopped_it(port):
    fab = b"x" * 100
    body = control_pb2.StartRunRequest(fab=Fab(hash_str="a lie", content=fab)).SerializeToString()
    assert port.ask("/v1/control/start-run", port.tokens["submit"], body) == 200
    assert port.came == [("/v1/control/start-run", body)]
    stop = control_pb2.StopRunRequest(run_id=42).SerializeToString()
    assert port.ask("/v1/control/stop-run", port.tokens["read"], stop) == 403
    assert port.ask("/v1/control/stop-run", port.tokens["admin"], stop) == 200
    key = control_pb2.RegisterNodeRequest(public_key=b"key", name="guest").SerializeToString()
    assert port.ask("/v1/control/register-node", port.tokens["members"], key) == 200
    chain = ("n", "hash", "previous", "time", "clock")
    log_entries = [{key: value for key, value in line.items() if key not in chain} for line in port.lines()]
    app = hashlib.sha256(fab).hexdigest()
    assert log_entries[0] == {
        "event": "asked", "operator": "submit", "role": "submit", "call": "start-run", "decision": "permitted",
        "peer": "127.0.0.1", "app": app, "remote_app": "",
    }  # fmt: skip
    assert log_entries[1] == {"event": "submitted", "operator": "submit", "status": 200, "run": "42"}
    assert [line["decision"] for line in log_entries[2:]] == ["refused", "permitted", "permitted"]
    assert (log_entries[3]["run"], log_entries[3]["operator"], log_entries[4]["name"]) == ("42", "admin", "guest")
    audit_log.verify_log(port.control.file)


@pytest.mark.parametrize(
    "field",
    [
        {"user_prompt": "go"},
        {"user_prompt": " "},
        {"series_id": 0},
        {"series_id": 3},
        {"connector_refs": ["mail"]},
        {"connector_ids": [1]},
    ],
)
def test_a_start_of_anything_but_a_serverapp_is_refused_and_logged(port, field):
    fab = Fab(content=b"x" * 100)
    body = control_pb2.StartRunRequest(fab=fab, **field).SerializeToString()
    for role in ("submit", "admin"):
        assert port.ask("/v1/control/start-run", port.tokens[role], body) == 403
        assert f"{next(iter(field))}: this server starts only ServerApp runs" in port.said
    assert port.came == []
    assert [(line["decision"], line["operator"], line["app"]) for line in port.lines()] == [
        ("refused", role, hashlib.sha256(fab.content).hexdigest()) for role in ("submit", "admin")
    ]
    assert next(iter(field)) in port.lines()[0]["reason"]


def test_a_start_has_only_fields_that_were_judged_here():
    """A new field in a later Flower turns this red: decide then whether it makes a run of another type."""
    refused = {"user_prompt", "series_id", "connector_refs", "connector_ids"}
    known = {about.name for about in control_pb2.StartRunRequest.DESCRIPTOR.fields}
    assert known == refused | operator_access._START_FIELDS


def test_what_flowers_command_line_sends_to_start_a_serverapp_goes_through(port):
    request = control_pb2.StartRunRequest(fab=Fab(content=b"x"), federation="f", app_spec="")
    request.override_config["a"].sint64 = 1
    request.override_federation_config.SetInParent()
    assert port.ask("/v1/control/start-run", port.tokens["submit"], request.SerializeToString()) == 200
    assert len(port.came) == 1


def test_a_run_that_flower_refused_has_no_number(port):
    port.status, port.answer = 400, b"{}"
    assert port.ask("/v1/control/start-run", port.tokens["submit"]) == 400
    assert (port.lines()[-1]["run"], port.lines()[-1]["status"]) == ("", 400)


def test_what_cannot_be_logged_is_not_done(port):
    port.control.file.write_text("torn")
    for path, token in (("start-run", port.tokens["admin"]), ("list-runs", port.tokens["read"]), ("start-run", None)):
        assert port.ask(f"/v1/control/{path}", token) == 503
    assert port.came == []
    assert str(port.control.file) not in port.said


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"operators": []}',
        '{"operators": {"a": {"role": "god", "state": "active", "token": "00", "until": "2999-01-01T00:00:00+00:00"}}}',
        '{"operators": {"a": {"role": "admin", "state": "active", "token": "", "until": "2999-01-01T00:00:00+00:00"}}}',
        '{"operators": {"a": {"role": "read", "state": "active", "token": "ZEROS", "until": "2999-01-01"}}}',
    ],
)
def test_while_the_operators_cannot_be_read_nobody_is_one(text, port):
    (port.registry / "operators.json").write_text(text.replace("ZEROS", "00" * 32))
    assert port.ask("/v1/control/list-runs", port.tokens["admin"]) == 503
    with pytest.raises(StateError):
        OperatorAccessChecker(port.registry, port.control)
    assert port.came == []


def test_a_request_is_bounded_and_must_be_one(port):
    assert port.ask("/v1/control/stop-run", port.tokens["admin"], b"\x00" * (65 << 10)) == 403
    assert port.ask("/v1/control/stop-run", port.tokens["admin"], b"\xff\xff\xff") == 403
    assert port.came == []


def test_a_stranger_does_not_fill_the_disk_with_refusals(port):
    for _ in range(200):
        assert port.ask("/v1/control/start-run") == 403
    assert len(port.lines()) == 60
    assert port.ask("/v1/control/list-runs", port.tokens["read"]) == 200
    assert port.lines()[-1]["unsaid"] == 140
