"""A client process dies between its reply and the reply's objects: the SuperNode waits for them forever."""

import threading
from datetime import timedelta

from flwr.supercore.date import now
from node import Node, message

asked = message()
node = Node(asked)
node.pull()
node.answer(asked.object_id, whole=False)
for session in node.state._object_push_sessions.values():
    session.expires_at = now() - timedelta(seconds=1)  # NodeState.get_object forgets them now
sender = threading.Thread(target=node.push, daemon=True)
sender.start()
sender.join(20)
print("still waiting after 20 s:", sender.is_alive())
assert sender.is_alive()
