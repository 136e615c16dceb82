"""A reply to an abandoned message delays every later reply by one message."""

from node import Node, message

first, second = message(text="first"), message(text="second")
node = Node(first, second)
node.pull()
node.answer("ab" * 32)  # of a message that was given up
node.push()
node.answer(first.object_id)
held, node.messages = node.messages, []
assert node.pull() is None  # stock Flower sends only after a message has come: the reply to the first one waits
node.messages = held
node.pull()
node.push()
print("sent after the second message came: the reply to the", "first" if node.sent[-1] == first.object_id else "second")
assert node.sent == ["ab" * 32, first.object_id]
