"""compose.yaml as it stands: a server and three sites in containers; who can reach what, and who is let in."""

from __future__ import annotations

import json
import secrets
import time

import pytest

from fedveil.console.flower.machine import free_ports
from fedveil.federation.secagg.adversary_model import DEVIATING
from tests.conftest import ROOT
from tests.deployment.engine import FLOWER, IMAGE, Compose, docker, remove_leftovers, require_engine, until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1500)]

SITES = ("north", "south", "west")
SCAN = """
import concurrent.futures, socket, sys
def open_(port):
    with socket.socket() as s:
        s.settimeout(1.0)
        return s.connect_ex((sys.argv[1], port)) == 0
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print([port for port, found in zip(range(1, 65536), pool.map(open_, range(1, 65536))) if found])
"""
RESOLVE = "import socket, sys\ntry: print(socket.gethostbyname(sys.argv[1]))\nexcept OSError: print('unknown')"
CALL = {
    "gRPC": """
import grpc, sys
from flwr.proto import fleet_pb2
address, way, method = sys.argv[1:]
options = [("grpc.enable_http_proxy", 0)]
if way == "plain":
    link = grpc.insecure_channel(address, options)
else:
    link = grpc.secure_channel(address, grpc.ssl_channel_credentials(open("/kit/ca.crt", "rb").read()), options)
try:
    print("served", link.unary_unary("/flwr.proto.Fleet/" + method)(b"", timeout=8))
except grpc.RpcError as error:
    print(error.code().name)
""",
    "HTTP": """
import http.client, re, ssl, sys, urllib.error, urllib.request
address, way, method = sys.argv[1:]
path = method if "/" in method else "/v1/fleet/" + re.sub("(?<=[a-z])(?=[A-Z])", "-", method).lower()
url = ("http" if way == "plain" else "https") + "://" + address + path
context = ssl.create_default_context(cafile="/kit/ca.crt")
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
headers = {"Content-Type": "application/protobuf"}
try:
    print("served", opener.open(urllib.request.Request(url, b"", headers, method="POST"), timeout=8).read())
except urllib.error.HTTPError as error:
    print({401: "UNAUTHENTICATED"}.get(error.code, error.code))
except (OSError, http.client.HTTPException):
    print("UNAVAILABLE")
""",
}["HTTP" if FLOWER else "gRPC"]


@pytest.fixture(scope="module")
def trial():
    require_engine()
    remove_leftovers()
    compose = Compose(
        f"fedveil-test-{secrets.token_hex(3)}", ROOT / "compose.yaml", {"FEDVEIL_FLEET_PORT": str(free_ports(1)[0])}
    )
    try:
        compose("build", "setup", timeout=1200)
        began = time.monotonic()
        compose("up", "-d", "--wait", timeout=600)
        compose.seconds = time.monotonic() - began
        yield compose
    finally:
        compose.down()


def test_the_image_is_small_and_holds_no_secret_and_no_installer(trial):
    size = int(docker("image", "inspect", "-f", "{{.Size}}", IMAGE).stdout)
    print(f"image: {size / 1e9:.2f} GB; up --wait: {trial.seconds:.0f} s")
    assert size < 1.5e9
    config = json.loads(docker("image", "inspect", "-f", "{{json .Config}}", IMAGE).stdout)
    assert config["User"] == "10001:10001"
    stdout = trial.python(
        "north-clientapp", "import importlib.util, shutil\nprint(shutil.which('uv'), importlib.util.find_spec('pip'))"
    )
    assert stdout.split() == ["None", "None"]


def test_one_command_runs_the_demo_job_and_its_exit_code_is_true(trial):
    began = time.monotonic()
    done = trial("run", "--rm", "-T", "demo", timeout=900)
    print(f"demo: {time.monotonic() - began:.0f} s\n{done.stdout}")
    assert "round 2/2 " in done.stdout
    assert "\ncompleted\n" in done.stdout
    wrong = ("run", "--rm", "-T", "operator", "fedveil", "submit", "--federation=/federation/trial")
    wrong += ("--set=method.params=rho = 1.5",)
    message = "rho: expected a probability from 0 to 1, found 1.5"
    refused = trial(*wrong, check=False, timeout=300)
    assert refused.returncode == 2
    assert f"{message}; nothing was sent" in refused.stderr
    failed = trial(*wrong, "--extras-at-server", check=False, timeout=300)
    assert failed.returncode == 1
    assert message in failed.stdout
    for site in SITES:
        log = trial("exec", "-T", f"{site}-clientapp", "fedveil", "log", "verify", "/state/audit-log.jsonl").stdout
        assert "4 lines" in log  # admitted and sent, twice


def test_sites_whose_keys_are_in_the_roster_give_a_sum_and_know_whom_it_holds_against(trial):
    keys = {"method.name": "fedavg", "run.rounds": 1, "cohort.sites": 3, "train.batch-size": 8, "train.max-steps": 1}
    keys |= {"task.evaluation": "/data", "evaluate.eval-examples": 4, "run.name": "unseen"}
    keys |= {"secure.enabled": "true", "secure.roster": "/roster/roster.json"}
    named = ("run", "--rm", "-T", "operator", "fedveil", "submit", "--federation=/federation/trial")
    done = trial(*named, *(f"--set={key}={value}" for key, value in keys.items()), timeout=600)
    assert "round 1/1 " in done.stdout
    assert "\ncompleted\n" in done.stdout
    for site in SITES:
        status = ("fedveil", "site", "status", "--state-dir", "/state", "--policy", "/secret/site-policy.toml")
        stdout = trial("exec", "-T", f"{site}-clientapp", *status, check=False).stdout
        assert "secure aggregation: last masked for round 1, attempt 1; last agreed to a sum in round 1" in stdout
        assert DEVIATING in stdout


def test_from_a_site_nothing_of_the_server_answers_but_the_fleet_port(trial):
    assert json.loads(trial.python("north-supernode", SCAN, "superlink")) == [9092]
    networks = json.loads(docker("inspect", "-f", "{{json .NetworkSettings.Networks}}", trial.container("pod")).stdout)
    others = {name: net["IPAddress"] for name, net in networks.items() if not name.endswith("north-fleet")}
    assert len(others) == 3
    reach = "import socket, sys\ns = socket.socket(); s.settimeout(2.0)\n"
    reach += "print(s.connect_ex((sys.argv[1], int(sys.argv[2]))))"
    for address in others.values():
        for port in ("9092", "8000"):
            assert trial.python("north-supernode", reach, address, port).strip() != "0"


def test_what_runs_apps_reaches_its_supernode_alone(trial):
    assert json.loads(trial.python("north-clientapp", SCAN, "supernode")) == [9094]
    for name in ("superlink", "pod", "south-supernode", "south-clientapp", "example.org"):
        assert trial.python("north-clientapp", RESOLVE, name).strip() == "unknown"
    assert trial.python("north-supernode", RESOLVE, "south-supernode").strip() == "unknown"


@pytest.mark.parametrize(
    "method", ["RegisterNode", "ActivateNode", "PullMessages", "PushMessages", "GetFab", "PullObject"]
)
def test_without_a_key_no_message_is_served_and_without_tls_nobody_is_answered(trial, method):
    assert trial.python("north-supernode", CALL, "superlink:9092", "plain", method).strip() == "UNAVAILABLE"
    refused = trial.python("north-supernode", CALL, "superlink:9092", "tls", method).strip()
    assert refused == "UNAUTHENTICATED"


@pytest.mark.skipif(not FLOWER, reason="Flower 1.39's fleet port has no paths: it speaks gRPC")
@pytest.mark.parametrize(
    "path", ["control/list-runs", "control/start-run", "runtime/acquire-task", "fleet/../control/list-runs"]
)
def test_the_port_of_sites_has_no_way_to_what_is_the_server_s_own(trial, path):
    """With a registered key too: tests/deployment/test_loopback.py."""
    assert trial.python("north-supernode", CALL, "superlink:9092", "tls", f"/v1/{path}").strip() == "404"


def test_a_key_that_nobody_registered_is_not_let_in(trial):
    trial("exec", "-T", "north-supernode", "fedveil", "site", "init", "--kit", "/kit", "--out", "/tmp/other")
    tried = trial(
        "exec", "-T", "north-supernode", "timeout", "60", "flower-supernode",
        "--root-certificates=/kit/ca.crt", "--superlink=superlink:9092",
        "--auth-supernode-private-key=/tmp/other/node.key", "--port=9199",
        check=False, timeout=90,
    )  # fmt: skip
    assert tried.returncode not in (0, 124), tried.stdout
    assert "fedveil: this key is not registered" in tried.stdout + tried.stderr


def test_without_the_secret_no_task_is_handed_out(trial):
    """The SuperNode's own API inside the site."""
    code = """
import urllib.error, urllib.request
HEADERS = {"Content-Type": "application/protobuf"}
url = "http://supernode:9094/v1/runtime/acquire-task"
request = urllib.request.Request(url, data=b"", method="POST", headers=HEADERS)
try: print(urllib.request.urlopen(request, timeout=8).status)
except urllib.error.HTTPError as error: print(error.code)
"""
    assert trial.python("north-clientapp", code).strip() == "401"


def test_the_root_is_read_only_and_the_user_has_no_power(trial):
    code = "import os\nprint(os.getuid(), os.access('/opt/fedveil', os.W_OK))\n"
    code += "try: open('/etc/x', 'w')\nexcept OSError as e: print(e.errno)"
    for service in ("superlink", "serverapp", "north-supernode", "north-clientapp"):
        assert trial.python(service, code).split() in (["10001", "False", "30"], ["10001", "False", "13"])
        assert json.loads(
            docker("inspect", "-f", "{{json .HostConfig.ReadonlyRootfs}}", trial.container(service)).stdout
        )
        assert "CapEff:\t0000000000000000" in trial("exec", "-T", service, "cat", "/proc/1/status").stdout


def test_a_site_that_the_server_does_not_hear_says_so_and_that_it_is_heard_again(trial):
    check = ("exec", "-T", "west-supernode", "fedveil", "doctor", "--heartbeat", "/tmp/heartbeat")
    network, container = f"{trial.project}_west-fleet", trial.container("west-supernode")
    assert "heard by the server" in trial(*check).stdout
    docker("network", "disconnect", network, container)
    try:
        until(lambda: trial(*check, check=False).returncode == 1, 150, "75 s without an answer")
        assert "not heard by the server since" in trial(*check, check=False).stdout
        assert "running" in docker("inspect", "-f", "{{.State.Status}}", container).stdout  # so nothing else would tell
    finally:
        docker("network", "connect", network, container)
    until(lambda: trial(*check, check=False).returncode == 0, 150, "heard again")
