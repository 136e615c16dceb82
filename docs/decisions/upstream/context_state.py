"""With a `Context.state` of 400 MB every reply succeeds, but the state is lost at the next message."""

import sys

from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory
from stock import run

# The only store there is: a new SuperNode process begins with an empty one.
print("store:", type(NodeStateFactory(ObjectStoreFactory()).state()).__name__)
said = run(messages=3, state_mb=int(sys.argv[1]) if len(sys.argv) > 1 else 400)
print(said)
assert [one["in context.state"] for one in said] != [1, 2, 3]
