"""A connection is cut before the answer to PushObject arrives: the object is stored, but a repeated push is refused."""

import threading
from concurrent import futures

import grpc
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.retry import make_simple_grpc_retry_invoker
from flwr.supernode.nodestate import NodeStateFactory
from node import RUN, message

stores = ObjectStoreFactory()
store, state = stores.store(), NodeStateFactory(stores).state()  # the part of a SuperLink's state that stores objects
sent = message(text="reply")
session, tree, content = state.start_session(RUN), get_object_tree(sent), sent.deflate()
state.preregister_object_tree(tree, session)
answers, cut = [], threading.Event()


def push(request: bytes, context: grpc.ServicerContext) -> bytes:
    answers.append(state.store_object(RUN, session, tree.object_id, request))
    if not cut.is_set():
        cut.set()
        context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")  # what the sender sees where the answer is lost
    return bytes([answers[-1]])


server = grpc.server(futures.ThreadPoolExecutor(1))
handler = grpc.unary_unary_rpc_method_handler(push)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fleet", {"Push": handler}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    stored = make_simple_grpc_retry_invoker().invoke(channel.unary_unary("/fleet/Push"), content)
server.stop(0)
print("answers:", answers, "in the store:", store.get(tree.object_id) == content)
assert answers == [True, False]
assert stored == bytes([False])
assert store.get(tree.object_id) == content
