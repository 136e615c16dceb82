"""A registered site that forges replies over the real port, while two honest sites train: the run ends as without it.

Its SuperNode is stopped, and this test speaks in its place, with its key, over gRPC or HTTP.
"""

from __future__ import annotations

import contextlib
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from cryptography.hazmat.primitives import serialization
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, SUPERLINK_NODE_ID, TIMESTAMP_HEADER
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, run_pb2
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from fedveil.guard import flower
from fedveil.guard.flower.link_states import InstructionRow
from fedveil.records import audit_log
from fedveil.records.tensor_state import state_digest
from tests.conftest import ROOT
from tests.deployment.loopback import in_process, over_grpc
from tests.deployment.loopback import lines as lines_of
from tests.deployment.test_loopback import signed
from tests.fedveil.guard.fleet.replies import make_reply, metadata, upload
from tests.fedveil.guard.fleet.rogue import AnswerError, Rogue, is_bearable

DATA = ROOT / "data" / "e2e"
CONFIG = {
    "method.name": "fedavg", "run.deterministic": True, "run.rounds": 2, "train.max-steps": 1, "train.batch-size": 4,
    "train.received-loss-examples": 0, "cohort.min-sites": 2, "client.worker": False, "evaluate.generate": "never",
    "task.evaluation": str(DATA), "evaluate.eval-examples": 4, "cohort.deadline-seconds": 60.0, "cohort.sites": 2,
}  # fmt: skip
RESPONSES = {
    "RegisterNode": fleet_pb2.RegisterNodeFleetResponse, "UnregisterNode": fleet_pb2.UnregisterNodeFleetResponse,
    "ActivateNode": fleet_pb2.ActivateNodeResponse, "DeactivateNode": fleet_pb2.DeactivateNodeResponse,
    "SendNodeHeartbeat": heartbeat_pb2.SendNodeHeartbeatResponse, "PullMessages": fleet_pb2.PullMessagesResponse,
    "PushMessages": fleet_pb2.PushMessagesResponse, "GetRun": run_pb2.GetRunResponse, "GetFab": GetFabResponse,
    "PullObject": message_pb2.PullObjectResponse, "PushObject": message_pb2.PushObjectResponse,
    "ConfirmMessageReceived": message_pb2.ConfirmMessageReceivedResponse,
}  # fmt: skip
SIGNATURE_SECONDS = 30.0  # a signed time is good for 300
STATUSES = {"PERMISSION_DENIED": 403, "UNAVAILABLE": 503, "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 412}


class Caller:
    """The calls of a site with its own key, without Flower's SuperNode."""

    def __init__(self, federation: LocalDeployment, site: str) -> None:
        self.federation, self.site = federation, site
        self._headers: tuple[float, Any] = (-math.inf, None)
        self.key = serialization.load_ssh_private_key(federation._key(site).read_bytes(), None)
        ca, address = federation.folder / "ca.crt", f"127.0.0.1:{federation._fleet_port}"
        self.is_grpc = flower.installed_release().speaks == "gRPC"
        if self.is_grpc:
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes()))
        else:
            context = ssl.create_default_context(cafile=str(ca))
            self.client = httpx.Client(verify=context, timeout=30, trust_env=False, base_url=f"https://{address}")

    def __call__(self, name: str, request: Any) -> Any:
        method = "".join(word.capitalize() for word in name.split("_"))
        return RESPONSES[method].FromString(self.send(name, request.SerializeToString()))

    def send(self, name: str, body: bytes) -> bytes:
        """Send a body as it is. Raises AnswerError."""
        method = "".join(word.capitalize() for word in name.split("_"))
        return self._grpc(method, body) if self.is_grpc else self._http(name, body)

    def headers(self) -> Any:
        """Return what signs a call; the same for some seconds, for the same key signs them all."""
        if time.monotonic() - self._headers[0] > SIGNATURE_SECONDS:
            self._headers = time.monotonic(), self._signed() if self.is_grpc else signed(self.federation, self.site)
        return self._headers[1]

    def _signed(self) -> list[tuple[str, str | bytes]]:
        stamp = now().isoformat()
        return [
            (PUBLIC_KEY_HEADER, public_key_to_bytes(self.key.public_key())), (TIMESTAMP_HEADER, stamp),
            (SIGNATURE_HEADER, sign_message(self.key, stamp.encode())),
        ]  # fmt: skip

    def _grpc(self, method: str, body: bytes) -> bytes:
        try:
            call = self.channel.unary_unary(f"/flwr.proto.Fleet/{method}")
            return bytes(call(body, metadata=self.headers(), timeout=60))
        except grpc.RpcError as error:
            raise AnswerError(STATUSES.get(error.code().name, error.code().name)) from None

    def _http(self, name: str, body: bytes) -> bytes:
        path = f"/v1/fleet/{name.replace('_', '-')}"
        answer = self.client.post(path, headers=self.headers(), content=body)
        if answer.status_code != 200:
            raise AnswerError(answer.status_code)
        return answer.content


def act(end: threading.Event, federation: LocalDeployment, problems: list[str], statuses: dict[Any, int]) -> None:
    """Forge what a member can, from its first instruction on; ends each round with an error reply of its own."""
    call, rng = Caller(federation, "site-2"), random.Random(7)
    public = public_key_to_bytes(call.key.public_key())
    node_id = call("activate_node", fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id
    rogue, node = None, fleet_pb2.PullMessagesRequest().node
    node.node_id = node_id
    while not end.is_set():
        try:
            response = call("pull_messages", fleet_pb2.PullMessagesRequest(node=node))
        except AnswerError as error:
            problems.append(f"pull_messages: {error}")
            return
        if response.messages_list and (
            rogue is None or rogue.row.message_id != response.message_object_trees[0].object_id
        ):
            about, tree = response.messages_list[0].metadata, response.message_object_trees[0]
            ids = [part.object_id for part in iterate_object_tree(tree)]
            row = InstructionRow(
                tree.object_id,
                about.run_id,
                node_id,
                about.message_type,
                about.group_id,
                about.created_at,
                about.ttl,
                "",
            )
            rogue = Rogue(rng, call, node_id, about.run_id, public, row, ids, ["ab" * 32, *ids])
            others = [int(number) for number in federation.flower.nodes() if int(number) != node_id]
            rogue.foreign_nodes = others
            for destination in (SUPERLINK_NODE_ID, *others):  # the attack that decided a whole model
                reply = make_reply(upload(b"x" * 100), metadata(row, node_id))
                forged = reply.request.messages_list[0].metadata
                forged.reply_to_message_id, forged.src_node_id = "", SUPERLINK_NODE_ID
                forged.dst_node_id = destination
                reply.request.node.node_id = node_id
                try:
                    call("push_messages", reply.request)
                    problems.append("a forged message was taken")
                except AnswerError as error:
                    if error.status != 403:
                        problems.append(f"a forged message: {error}")
            rogue.act(150)
            for answer, count in rogue.statuses.items():
                statuses[answer] = statuses.get(answer, 0) + count
                if not is_bearable(answer[1]):
                    problems.append(f"{answer[0]} ends with {answer[1]}")
        time.sleep(0.5)


@contextlib.contextmanager
def beside(actor: Callable[..., None], *args: Any) -> Iterator[None]:
    """Run `actor(end, *args)` in a thread until the block is left; it ends at the event `end`."""
    end = threading.Event()
    thread = threading.Thread(target=actor, args=(end, *args))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(400)  # a sequence of calls takes minutes on a busy machine
    assert not thread.is_alive()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_over_the_real_port_a_run_of_two_sites_ends_as_without_the_rogue(tmp_path):
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", 2))) for i in range(3)]
    problems, statuses = list[str](), dict[Any, int]()
    with LocalDeployment(sites, tmp_path / "federation", database=True) as federation:
        federation.kill_site("site-2", grace=5.0)
        with beside(act, federation, problems, statuses):
            ended = over_grpc(federation, tmp_path, CONFIG, timeout=600)
        assert ended.completed, ended.reason
        assert problems == []
        assert sum(count for (_, status), count in statuses.items() if status == 403) > 20
        assert federation.processes.ended("superlink") is None
        lines = audit_log.read_log(federation.folder / "control-log.jsonl")
        named = {line["site"] for line in lines if line["event"] in ("fleet-refused", "rogue")}
        assert named == {"site-2"}
        assert any(line["event"] == "rogue" for line in lines)
    rounds = lines_of(tmp_path / "fedavg" / "metrics.jsonl")
    assert rounds[-1]["weights"] == state_digest(in_process(CONFIG, DATA, 2).models()["server"])
    events = audit_log.read_log(tmp_path / audit_log.NAME)
    assert sorted(line["site"] for line in events if line["event"] == "accepted") == ["site-0"] * 2 + ["site-1"] * 2


def watch(end: threading.Event, federation: LocalDeployment, peaks: dict[str, float]) -> None:
    """Note the peak of resident memory, in MB, of each of the server's programs: the kernel's own, for each process."""
    while not end.is_set():
        for process in federation.processes.alive("superlink"):
            with contextlib.suppress(OSError, IndexError, psutil.Error):  # it has ended meanwhile
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
                name = status.split("Name:")[1].split()[0]
                peaks[name] = max(peaks.get(name, 0.0), peak)
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rogue_costs_the_server_at_most_64_mib_and_the_run_at_most_twice_its_time(tmp_path):
    """Runs of one federation, first without and then with the rogue; peaks are those of whole processes."""
    sites = [LocalSite(f"site-{i}", DATA, (("partition-id", i), ("num-partitions", 2))) for i in range(3)]
    problems, statuses = list[str](), dict[Any, int]()
    peaks, seconds = dict[str, dict[str, float]](), dict[str, float]()
    with LocalDeployment(sites, tmp_path / "federation", database=True) as federation:
        federation.kill_site("site-2", grace=5.0)
        database = next(federation.folder.glob("**/*.db"))
        sizes = {}
        for name in ("warm", "honest", "rogue"):  # the first run fills the caches of both programs
            with contextlib.ExitStack() as stack:
                stack.enter_context(beside(watch, federation, peaks.setdefault(name, {})))
                if name == "rogue":
                    stack.enter_context(beside(act, federation, problems, statuses))
                started = time.monotonic()
                assert over_grpc(federation, tmp_path / name, CONFIG, timeout=600).completed
                seconds[name] = time.monotonic() - started
            sizes[name] = sum(file.stat().st_size for file in database.parent.glob(database.name + "*"))
        assert problems == []
        assert federation.processes.ended("superlink") is None
    found = {name: round(peaks["rogue"][name] - peak) for name, peak in peaks["honest"].items()}
    print(f"seconds {seconds}; peaks in MB {peaks}; more with the rogue {found}; bytes of the database {sizes}")
    assert {"flwr-serverapp", "flower-superlin"} <= set(found)
    assert max(found.values()) <= 64 * 1.048576
    assert sizes["rogue"] <= sizes["honest"] + (256 << 20)
    assert seconds["rogue"] <= 2 * seconds["honest"]
