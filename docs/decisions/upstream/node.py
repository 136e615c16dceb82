"""A SuperNode's own state and stock functions, in this process, with a server and a client process played by hand."""

import flwr.supernode.start_client_internal as stock
from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.nodestate import NodeStateFactory

RUN = 7


def message(reply_to: str = "", text: str = "") -> Message:
    made = Message(
        content=RecordDict(), metadata=Metadata(RUN, "", 1, 2, reply_to, text, now().timestamp(), 100.0, "train")
    )
    with no_object_id_recompute():
        made.metadata.__dict__["_message_id"] = made.object_id
    return made


class Node:
    """`messages`: the server's. `sent`: to which of them it got replies. `ended`: the run ends at the objects."""

    def __init__(self, *messages: Message, ended: bool = False) -> None:
        self.messages, self.sent, self.ended = list(messages), [], ended
        stores = ObjectStoreFactory()
        self.store, self.state = stores.store(), NodeStateFactory(stores).state()
        self.state.set_node_id(2)
        self.state.store_run(Run.create_empty(RUN))

    def pull(self) -> int | None:
        objects = {i: o.deflate() for m in self.messages for i, o in get_all_nested_objects(m).items()}

        def pull_object(_run: int, object_id: str) -> bytes:
            if self.ended:
                raise RunNotRunningException
            return objects[object_id]

        def receive():
            return (self.messages[0], get_object_tree(self.messages.pop(0))) if self.messages else None

        return stock._pull_and_store_message(
            state=self.state, object_store=self.store, node_config={}, receive=receive, get_run=None, get_fab=None,
            pull_object=pull_object, confirm_message_received=lambda *_: None, trusted_entities=None,
        )  # fmt: skip

    def answer(self, message_id: str, whole: bool = True) -> None:
        """What a client process does at its end; with `whole` false it dies after its message."""
        reply = message(message_id)
        session = self.state.start_session(RUN)
        self.state.store_message_and_object_tree(reply, get_object_tree(reply), session)
        for object_id, content in get_all_nested_objects(reply).items() if whole else ():
            self.state.store_object(RUN, session, object_id, content.deflate())

    def push(self) -> None:
        def send(reply, tree, _seconds):
            self.sent.append(reply.metadata.reply_to_message_id)
            return {tree.object_id}, "session"

        stock._push_messages(state=self.state, object_store=self.store, send=send, push_object=lambda *_: None)
