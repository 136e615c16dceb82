"""Another user of the machine against a site and a server that run without containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fedveil.console.flower.local_deployment import LocalDeployment, LocalSite
from tests.conftest import ROOT

NOBODY = 65534
# It imports as root, for nobody may not be allowed to read the installation; then it is nobody, and attacks.
ATTACK = """
import json, os, select, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.constant import TaskType
import httpx

ports, ca = json.loads(sys.argv[1]), Path(sys.argv[2]).read_bytes()
os.setgroups([]); os.setgid(65534); os.setuid(65534)

def client(port, tls, *more):
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    return RuntimeHttpClient.from_server_address(
        server_address=f"127.0.0.1:{port}", insecure=not tls, root_certificates=ca if tls else None,
        interceptors=[version, *more], retry_invoker=None)

found = {"taken": 0, "answered": 0, "refused": 0, "read": 0, "control": [], "errors": []}
clients = [(port, tls, client(port, tls)) for port, tls in ports]
kinds = list(TaskType)
print("attacking", flush=True)
seen = set()
while not select.select([sys.stdin], [], [], 0.05)[0]:
    for port, tls, runtime in clients:
        try:
            answer = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=kinds))
            found["answered"] += 1
            found["taken"] += bool(answer.token)
        except Exception as error:
            found["refused"] += 1
            found["errors"].append(str(error)[:200])
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\\0")
        except OSError:
            continue
        token = words[words.index(b"--token") + 1].decode() if b"--token" in words else ""
        if token and token not in seen:
            seen.add(token)
            for port, tls, _ in clients:
                try:
                    client(port, tls, RuntimeTokenHttpInterceptor(token)).PullTaskInput(PullTaskInputRequest())
                    found["read"] += 1
                except Exception as error:
                    found["errors"].append(str(error)[:200])
    (control, tls) = ports[0]
    found["control"].append(httpx.get(f"https://127.0.0.1:{control}/health", verify=False).status_code)
found["errors"] = sorted(set(found["errors"]))[:10]
found["control"] = sorted(set(found["control"]))
found["tokens"] = len(seen)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_takes_no_task_reads_no_broadcast_and_reaches_no_control_port(tmp_path):
    """Without the secret it took every task; without the check of users it read broadcasts by the tokens in `ps`."""
    site = LocalSite("north", ROOT / "data" / "e2e")
    config = {"method.name": "fedavg", "run.rounds": 2, "run.dir": str(tmp_path), "run.name": "run"}
    config |= {"cohort.min-sites": 1, "cohort.sites": 1, "train.max-steps": 1, "task.examples-per-site": 20}
    with LocalDeployment([site], tmp_path / "work") as federation:
        ports = [[federation._control_port, True], [federation._site_ports["north"], False]]
        attack = subprocess.Popen(
            [sys.executable, "-c", ATTACK, json.dumps(ports), str(tmp_path / "work" / "ca.crt")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert attack.stdout.readline() == "attacking\n", attack.communicate()[1][-2000:]
            ended = federation.wait(federation.run(ROOT, config), timeout=120)
            out, err = attack.communicate(timeout=30)
        finally:
            attack.kill()
        attack_report = json.loads(out) if out else pytest.fail(err[-2000:])
        assert ended.completed, (ended, attack_report)
        assert attack_report["refused"] > 20
        assert attack_report["tokens"] >= 1, "the attack saw no task go by"
        assert (attack_report["taken"], attack_report["answered"], attack_report["read"], attack_report["control"]) == (
            0,
            0,
            0,
            [403],
        ), attack_report
        assert (tmp_path / "work" / "keys" / "north.superexec").stat().st_mode & 0o777 == 0o600
