"""A SuperLink and one SuperNode of stock Flower on this machine, without TLS, and an app of a few lines.

from stock import run
replies = run(messages=3, state_mb=0)      # what the ClientApp said to each message, in order
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = """
[project]
name = "reproducer"
version = "0.1.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
[tool.flwr.app.config]
messages = 1
state-mb = 0
out = ""
"""
APP = """
import json, os, time
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()
of_module = 0

@client.train()
def train(message: Message, context: Context) -> Message:
    global of_module
    of_module += 1
    known = context.state.get("known", ConfigRecord({"count": 0}))["count"] + 1
    context.state["known"] = ConfigRecord({"count": known})
    if size := context.run_config["state-mb"]:
        context.state["large"] = ArrayRecord([np.random.rand(size * 131072)])
    said = ConfigRecord({"pid": os.getpid(), "in module": of_module, "in context.state": known})
    return Message(RecordDict({"said": said}), reply_to=message)

@server.main()
def main(grid, context: Context) -> None:
    said = []
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    for _ in range(context.run_config["messages"]):
        message = Message(RecordDict(), dst_node_id=nodes[0], message_type="train")
        (reply,) = grid.send_and_receive([message], timeout=120)
        said.append(str(reply.error) if reply.has_error() else dict(reply.content["said"]))
    with open(context.run_config["out"] + ".new", "w") as file:
        json.dump(said, file)
    os.replace(context.run_config["out"] + ".new", context.run_config["out"])
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(messages: int, state_mb: int, timeout: float = 600.0) -> list[dict]:
    """What the ClientApp said to each message; whatever was started is ended."""
    folder, started = Path(tempfile.mkdtemp(prefix="stock-")), []
    control, fleet, node, out = free_port(), free_port(), free_port(), folder / "out.json"
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(PROJECT)
    (folder / "app" / "app.py").write_text(APP)
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
    )
    programs = str(Path(sys.executable).parent)
    env = {**os.environ, "FLWR_HOME": str(folder), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    try:
        with (folder / "log").open("wb") as log:

            def start(*words: str) -> None:
                started.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))

            start(
                "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(control), "--fleet-api-type",
                "grpc-rere", "--fleet-api-address", f"127.0.0.1:{fleet}", "--disable-runtime-dependency-installation",
            )  # fmt: skip
            start(
                "flower-supernode", "--insecure", "--grpc-rere", "--superlink", f"127.0.0.1:{fleet}", "--host",
                "127.0.0.1", "--port", str(node),
            )  # fmt: skip
            deadline = time.monotonic() + timeout
            while socket.socket().connect_ex(("127.0.0.1", control)):
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.5)
            config = f'messages={messages} state-mb={state_mb} out="{out}"'
            words = ["flwr", "run", str(folder / "app"), "here", "-c", config]
            submitted = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
            assert submitted.returncode == 0, submitted.stdout + submitted.stderr
            while not out.exists():
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.5)
            time.sleep(1.0)
        return json.loads(out.read_text())
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
