"""A run that ends while a message's objects are pulled leaves the message and a pending task."""

from node import RUN, Node, message

node = Node(message(), ended=True)
assert node.pull() is None
tasks = [task.status.status for task in node.state.get_tasks(run_ids=[RUN])]
print("messages left:", len(node.state.msg_store), "tasks:", tasks)
assert (len(node.state.msg_store), tasks) == (1, ["pending"])
