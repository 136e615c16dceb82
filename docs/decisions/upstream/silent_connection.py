"""A relay between client and server goes silent: a channel with the SuperNode's settings never notices."""

import concurrent.futures
import socket
import threading

import grpc
from flwr.supercore.grpc import create_channel

lit = threading.Event()
lit.set()


def carry(one: socket.socket, other: socket.socket) -> None:
    while data := one.recv(65536):
        if lit.is_set():
            other.sendall(data)


def relay(listener: socket.socket, port: int) -> None:
    while True:
        client, server = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
        for pair in ((client, server), (server, client)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


class Echo(grpc.GenericRpcHandler):
    def service(self, _details):
        return grpc.unary_unary_rpc_method_handler(lambda request, _context: request)


server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=relay, args=(listener, port), daemon=True).start()
channel = create_channel(f"127.0.0.1:{listener.getsockname()[1]}", insecure=True)
ask = channel.unary_unary("/flwr.proto.Fleet/PullMessages")
assert ask(b"one") == b"one"
lit.clear()  # as when a network's link comes back under another address, and nobody sends a reset
question = ask.future(b"two")
try:
    question.result(timeout=30)
except grpc.FutureTimeoutError:
    print("no answer and no error after 30 s")
else:
    raise SystemExit("the question has ended")
finally:
    question.cancel()
    channel.close()
    server.stop(0)
