"""A SuperLink's state of each kind with the fleet port before it, and two sites that call it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.run import InvalidRunStatusException

from fedveil.guard import flower
from fedveil.guard.control_log import ControlLog
from fedveil.guard.fleet import port as fleet_port
from fedveil.guard.fleet.refusal_log import FleetRefusalLog
from fedveil.guard.fleet.spool import ReplySpool
from fedveil.guard.fleet.staging import StagedReply
from fedveil.guard.flower.link_states import find_instruction
from fedveil.records import audit_log
from tests.fedveil.guard.fleet.replies import Reply, make_reply, metadata
from tests.fedveil.guard.flower.states import Superlink, copy_superlink

RELEASE = flower.installed_release()
_MODULE = importlib.import_module(fleet_port.FLEET_MODULES[RELEASE.speaks])
ORIGINALS = {name: getattr(_MODULE, name) for name in fleet_port.FLEET_CALLS}


class Refused(Exception):
    """What a site is answered: the HTTP status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Fleet:
    """The fleet functions of Flower, as its servicer calls them."""

    def __init__(self, superlink: Superlink, port: fleet_port.FleetPort, log: Path) -> None:
        self.superlink, self.port, self.log = superlink, port, log
        self.module = importlib.import_module(fleet_port.FLEET_MODULES[RELEASE.speaks])
        self.run, self.nodes = superlink.run, superlink.nodes
        self.state = superlink.state

    def call(self, name: str, request: Any) -> Any:
        more = {"store": self.state.object_store} if name in fleet_port._WITH_STORE else {}
        if name in ("register_node", "unregister_node") and RELEASE.speaks == "HTTP":
            more["enable_supernode_auth"] = True
        try:
            return getattr(self.module, name)(request=request, state=self.state, **more)
        except FlowerError as error:
            raise Refused(API_ERROR_MAP[error.code].http_status_code, error.public_details or "") from error
        except InvalidRunStatusException as error:
            raise Refused(403, error.message) from error

    def node(self, site: int) -> Node:
        return Node(node_id=self.nodes[site])

    def pull(self, site: int) -> str:
        """The site's next instruction; "" for none."""
        response = self.call("pull_messages", PullMessagesRequest(node=self.node(site)))
        return response.message_object_trees[0].object_id if response.message_object_trees else ""

    def pull_object(self, site: int, object_id: str, run: int | None = None) -> bytes:
        request = PullObjectRequest(node=self.node(site), run_id=run or self.run, object_id=object_id)
        return bytes(self.call("pull_object", request).object_content)

    def confirm(self, site: int, root: str, run: int | None = None) -> None:
        request = ConfirmMessageReceivedRequest(node=self.node(site), run_id=run or self.run, message_object_id=root)
        self.call("confirm_message_received", request)

    def reply(self, site: int, instruction: int | None = None, content: Any = None, **more: Any) -> Reply:
        """A reply of the site to its instruction, or to another one."""
        row = find_instruction(self.state, self.superlink.sent[site if instruction is None else instruction])
        assert row is not None
        return make_reply(content, metadata(row, self.nodes[site], **more))

    def announce(self, site: int, request: PushMessagesRequest) -> Any:
        request.node.node_id = self.nodes[site]
        return self.call("push_messages", request)

    def push(self, site: int, session: str, object_id: str, content: bytes, run: int | None = None) -> bool:
        request = PushObjectRequest(
            node=self.node(site),
            run_id=run or self.run,
            session_id=session,
            object_id=object_id,
            object_content=content,
        )
        return bool(self.call("push_object", request).stored)

    def send(self, site: int, reply: Reply) -> None:
        """Announce a reply and push all that is asked for."""
        answer = self.announce(site, reply.request)
        for object_id in answer.objects_to_push:
            assert self.push(site, answer.session_id, object_id, reply.objects[object_id])
        self.settle()

    def settle(self) -> None:
        """Wait until all whole replies are with Flower."""
        end = time.monotonic() + 30
        while not self.port._hand_over.is_idle():
            assert time.monotonic() < end
            time.sleep(0.005)

    def staged(self, site: int) -> list[StagedReply]:
        return list(self.port._staging._open[self.nodes[site]].values())

    def files(self) -> list[Path]:
        folder = self.port._staging._spool.folder
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []

    def lines(self, event: str = "fleet-refused") -> list[dict[str, Any]]:
        return [line for line in audit_log.read_log(self.log) if line["event"] == event] if self.log.exists() else []


@pytest.fixture(params=["dictionaries", "SQL"])
def superlink(request: pytest.FixtureRequest, tmp_path: Path, clean_database: Path) -> Superlink:
    return make_superlink(request.param, tmp_path, clean_database)


@pytest.fixture
def sql_superlink(tmp_path: Path, clean_database: Path) -> Superlink:
    return make_superlink("SQL", tmp_path, clean_database)


def make_superlink(kind: str, folder: Path, clean: Path) -> Superlink:
    """One whose run is running: else Flower takes no call of a site."""
    made = Superlink() if kind == "dictionaries" else copy_superlink(clean, folder / "state.db")
    task = made.state.get_run_info(run_ids=[made.run])[0].primary_task_id
    assert made.state.claim_task(task)
    assert made.state.activate_task(task)
    return made


@pytest.fixture
def fleet(superlink: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return make_fleet(superlink, tmp_path, monkeypatch)


def make_fleet(superlink: Superlink, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    log = folder / "log" / "control-log.jsonl"
    names: Callable[[bytes], str] = lambda key: {bytes([0]): "north", bytes([1]): "south"}.get(key, "")  # noqa: E731
    spool = ReplySpool(folder / "spool")
    port = fleet_port.FleetPort(FleetRefusalLog(ControlLog(log)), names, spool, sweeps=False)
    module = importlib.import_module(fleet_port.FLEET_MODULES[RELEASE.speaks])
    for name, function in ORIGINALS.items():
        monkeypatch.setattr(module, name, function)  # put back afterwards
    fleet_port.install_fleet_port(RELEASE, port)
    return Fleet(superlink, port, log)
