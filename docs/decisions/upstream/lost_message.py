"""A connection is cut before the answer to PullMessages arrives: the SuperLink never delivers the message again."""

import threading
from concurrent import futures

import grpc
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.fleet.message_handler.message_handler import pull_messages
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_tree, no_object_id_recompute
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.superlink.federation import NoOpFederationManager

store = ObjectStoreFactory().store()
state = InMemoryLinkState(NoOpFederationManager(), store)
run = state.create_run("us/toy", "0.1.0", "0", {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
site = state.create_node("us", "us", b"key", 30.0)
state.activate_node(site, 30.0)
with no_object_id_recompute():
    metadata = Metadata(run, "", SUPERLINK_NODE_ID, site, "", "", now().timestamp(), 900.0, "train")
    message = Message(RecordDict({"config": ConfigRecord({"round": 1})}), metadata=metadata)
    message.metadata.__dict__["_message_id"] = message.object_id
state.store_message_and_object_tree(message, get_object_tree(message), state.start_session(run))
handed_out, cut = [], threading.Event()


def pull(request: PullMessagesRequest, context: grpc.ServicerContext) -> PullMessagesResponse:
    answer = pull_messages(request, state, store)
    handed_out.append(len(answer.messages_list))
    if not cut.is_set():
        cut.set()
        context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")  # what the site sees where the answer is lost
    return answer


server = grpc.server(futures.ThreadPoolExecutor(1))
handler = grpc.unary_unary_rpc_method_handler(
    pull, PullMessagesRequest.FromString, PullMessagesResponse.SerializeToString
)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fleet", {"Pull": handler}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    ask = channel.unary_unary("/fleet/Pull", PullMessagesRequest.SerializeToString, PullMessagesResponse.FromString)
    heard = make_simple_grpc_retry_invoker().invoke(ask, PullMessagesRequest(node=Node(node_id=site)))
server.stop(0)
print("messages in each answer:", handed_out, "that the site heard of:", len(heard.messages_list))
assert handed_out == [1, 0]
assert len(heard.messages_list) == 0
assert not state.get_message_ins(node_id=site, limit=1)
