"""A SuperLink in this process: Flower's own state, its runtime port for the ServerApp, and its fleet port for sites.

Each call is serialized, as over a network. No guard of ours stands before the fleet port: what a site may send is what
Flower lets it send. Sites act whenever the ServerApp asks for replies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto import fleet_pb2, message_pb2, runtime_pb2
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

from fedveil.guard import flower
from fedveil.guard.fleet import port as fleet_port
from fedveil.guard.flower.link_states import InstructionRow
from fedveil.guard.flower.replaced import FLEET_MODULES
from tests.fedveil.guard.fleet.conftest import make_superlink
from tests.fedveil.guard.fleet.replies import Reply, make_reply, metadata

_FLEET: Any = importlib.import_module(FLEET_MODULES[flower.installed_release().speaks])


@dataclass(frozen=True)
class Instruction:
    """A message to a site: as the SuperLink keeps it, and inflated."""

    row: InstructionRow
    message: Message


Act = Callable[["FleetSite", Instruction], None]


class FleetSite:
    """A registered site that speaks the fleet protocol by itself."""

    def __init__(self, superlink: RuntimePort, name: str, node_id: int, context: Context) -> None:
        self.superlink, self.name, self.node_id, self.context = superlink, name, node_id, context
        self.node = Node(node_id=node_id)

    def call(self, name: str, request: Any) -> Any:
        more = {"store": self.superlink.state.object_store} if name in fleet_port._WITH_STORE else {}
        request = type(request).FromString(request.SerializeToString())
        return getattr(_FLEET, name)(request=request, state=self.superlink.state, **more)

    def pull(self) -> Instruction | None:
        """The next instruction for this site, with its objects, as an honest site takes it."""
        response = self.call("pull_messages", fleet_pb2.PullMessagesRequest(node=self.node))
        if not response.messages_list:
            return None
        about, tree = response.messages_list[0].metadata, response.message_object_trees[0]
        objects = {}
        for id_ in {part.object_id for part in iterate_object_tree(tree)}:
            request = PullObjectRequest(node=self.node, run_id=about.run_id, object_id=id_)
            objects[id_] = self.call("pull_object", request).object_content
        self.call(
            "confirm_message_received",
            ConfirmMessageReceivedRequest(node=self.node, run_id=about.run_id, message_object_id=tree.object_id),
        )
        message = inflate_object_from_contents(tree.object_id, objects)
        message.metadata.__dict__["_message_id"] = tree.object_id
        row = InstructionRow(
            tree.object_id, about.run_id, self.node_id, about.message_type, about.group_id, about.created_at, about.ttl,
            "",
        )  # fmt: skip
        return Instruction(row, message)

    def train(self, instruction: Instruction) -> Message:
        """What the app at this site answers."""
        with no_object_id_recompute():
            return self.superlink.app(instruction.message, self.context)

    def answer(self, instruction: Instruction) -> None:
        """Do as an honest site does."""
        reply = self.train(instruction)
        self.send(
            make_reply(reply.content if reply.has_content() else reply.error, metadata(instruction.row, self.node_id))
        )

    def send(self, reply: Reply, without: Iterable[str] = ()) -> None:
        """Announce a reply, and push the objects that are asked for, but for some."""
        reply.request.node.node_id = self.node_id
        answer = self.call("push_messages", reply.request)
        for id_ in answer.objects_to_push:
            if id_ not in without:
                self.call(
                    "push_object",
                    PushObjectRequest(
                        node=self.node, run_id=self.superlink.run, object_id=id_, session_id=answer.session_id,
                        object_content=reply.objects[id_],
                    ),
                )  # fmt: skip


class RuntimePort:
    """Stands for Flower's runtime client, without HTTP.

    Attributes:
        hostile: acts in the place of an honest answer, by site.
        sites: by name.
        calls: names of the calls so far.
    """

    def __init__(
        self, app: ClientApp, names: Iterable[str], folder: Path, database: Path, kind: str = "dictionaries",
        run_config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        names = sorted(names)
        made = make_superlink(kind, folder, database)
        self.app, self.state, self.run = app, made.state, made.run
        for message_id in made.sent:  # of the helper's, which no test of a run needs
            self.state.delete_messages({message_id})
            self.state.object_store.delete(message_id)
        for node_id in made.nodes:
            self.state.deactivate_node(node_id)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self.run, SUPERLINK_NODE_ID, 1
        self.hostile: dict[str, Act] = {}
        self.calls: list[str] = []
        self.sites: dict[str, FleetSite] = {}
        for index, name in enumerate(names):
            node_id = self.state.create_node("us", "us", name.encode(), 30.0)
            self.state.activate_node(node_id, 1000.0)
            node_config = {
                "site": name, "data": "unused", "state-dir": str(folder / "sites"), "partition-id": index,
                "num-partitions": len(names),
            }  # fmt: skip
            context = Context(self.run, node_id, node_config, RecordDict(), dict(run_config or {}))
            self.sites[name] = FleetSite(self, name, node_id, context)
        task_id = self.state.get_run_info(run_ids=[self.run])[0].primary_task_id
        self._task = SimpleNamespace(run_id=self.run, task_id=task_id)

    @property
    def grid(self) -> HttpGrid:
        """Flower's grid of a deployment, on this port."""
        grid = HttpGrid(token="unused")
        grid._client = self  # type: ignore[assignment]
        grid.set_run(self.state.get_run_info(run_ids=[self.run])[0])
        return grid

    def act(self) -> None:
        """Let each site do what its instructions ask for, or what a hostile one does instead."""
        for name, site in sorted(self.sites.items(), key=lambda entry: entry[0] not in self.hostile):
            self.state.acknowledge_task_heartbeat(self._task.task_id)
            while (instruction := site.pull()) is not None:
                self.hostile.get(name, FleetSite.answer)(site, instruction)

    def call(self, name: str, request: Any, response: Any) -> Any:
        self.calls.append(name)
        self.state.acknowledge_task_heartbeat(self._task.task_id)  # else a slow machine ends the run
        request = type(request).FromString(request.SerializeToString())
        answer = getattr(runtime_handlers, name)(request, self.state, self._task)
        return response.FromString(answer.SerializeToString())

    # The methods of Flower's client

    def GetNodes(self, request: Any) -> Any:  # noqa: N802
        answer = self.call("get_nodes", request, runtime_pb2.GetNodesResponse)
        by_node = {site.node_id: site.name for site in self.sites.values()}
        named = [node for node in answer.nodes if node.node_id in by_node]
        for node in named:
            node.name = by_node[node.node_id]
        return runtime_pb2.GetNodesResponse(nodes=named)

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        return self.call("push_messages", request, runtime_pb2.PushAppMessagesResponse)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        self.act()
        return self.call("pull_messages", request, runtime_pb2.PullAppMessagesResponse)

    def PushObject(self, request: Any) -> Any:  # noqa: N802
        return self.call("push_object", request, message_pb2.PushObjectResponse)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        return self.call("pull_object", request, message_pb2.PullObjectResponse)

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        return self.call("confirm_message_received", request, message_pb2.ConfirmMessageReceivedResponse)
