"""A SuperLink with default isolation gives any client of its port the same answer as its own SuperExec."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from stock import free_port

port, fleet = free_port(), free_port()


def answered(*more: str) -> str:
    """Return the SuperLink's answer to a client without a secret."""
    program = str(Path(sys.executable).parent / "flower-superlink")
    words = [program, "--insecure", "--host", "127.0.0.1", "--port", str(port), "--fleet-api-type", "grpc-rere"]
    words += ["--fleet-api-address", f"127.0.0.1:{fleet}", "--disable-runtime-dependency-installation", *more]
    env = {**os.environ, "PATH": f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"}
    superlink = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert superlink.poll() is None, "the SuperLink has ended"
            time.sleep(0.5)
        client = RuntimeHttpClient.from_server_address(
            server_address=f"127.0.0.1:{port}", insecure=True, root_certificates=None, retry_invoker=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        )  # fmt: skip
        try:
            client.AcquireTask(AcquireTaskRequest(supported_task_types=list(TaskType)))
        except Exception as error:
            return f"refused: {error}"
        return "answered"
    finally:
        superlink.terminate()
        superlink.wait(30)


default = answered()
with tempfile.TemporaryDirectory() as folder:
    secret = Path(folder) / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    closed = answered("--isolation", "process", "--superexec-auth-secret-file", str(secret))
print("default:", default)
print("process isolation with a secret:", closed)
assert default == "answered"
assert closed.startswith("refused")
